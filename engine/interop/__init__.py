"""Configs of other engines, in and out, and the choice trees' text formats."""
