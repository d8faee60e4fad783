"""Experiments: Compare, Benchmark and Sweep, all measured by one loop.

What cannot be run as it was asked is refused with a `ConfigError`, whose sentence names what is
wrong; functions do not say so again.
"""
