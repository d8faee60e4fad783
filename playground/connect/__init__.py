"""Engines that run elsewhere: what their counters say of drafting, and what would suit them."""
