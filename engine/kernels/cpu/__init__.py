"""Packed weights under transformers' modules, and whole forwards by compiled kernels."""
