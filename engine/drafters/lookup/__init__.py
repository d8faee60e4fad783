"""Methods without weights: they copy from texts, or from what the target said before."""
