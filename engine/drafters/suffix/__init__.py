"""Suffix decoding and the memories it looks contexts up in."""
