"""Fast forwards: compiled kernels on a processor, recorded graphs on CUDA."""
