"""GGUF files, read as they are: header, config, tensors and tokenizer."""
