"""The comparison: up to four configurations and plain decoding on the same prompts, and why."""
