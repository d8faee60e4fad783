"""CUDA graphs: a forward is captured once per bucket and replayed as a whole."""
