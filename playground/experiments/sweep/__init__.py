"""Sweeps: many settings of one method measured, and the best of them found."""
