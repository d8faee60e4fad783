"""Engines that run elsewhere: the drafting in their counters, and the best draft length."""
