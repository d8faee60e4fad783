"""Makes corpora: dialogues that the target writes, each from a seed and its number alone."""
