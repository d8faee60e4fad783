"""EAGLE-1, 2 and 3: one layer on the target's features drafts a tree."""
