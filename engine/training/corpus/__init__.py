"""Generates corpora: dialogues of the target, each determined by a seed and its number."""
