"""Captured forwards: what a step launches is recorded once per size and replayed as a whole."""
