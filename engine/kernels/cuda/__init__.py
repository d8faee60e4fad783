"""Graphs: what a forward launches is captured once per size and replayed as a whole."""
