"""Schema changes, oldest first; a released one is never edited."""
