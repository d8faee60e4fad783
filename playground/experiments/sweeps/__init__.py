"""Sweeps: many settings of one method measured on the same prompts, by grid or by search."""
