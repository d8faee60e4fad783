"""Fast forwards: compiled kernels on a processor, graphs on CUDA."""
