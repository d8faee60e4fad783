"""A target and where it comes from: sources, loading, cache, masks, features, text."""
