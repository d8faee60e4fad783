"""Attacks, as data: what other pages, programs and files try."""
