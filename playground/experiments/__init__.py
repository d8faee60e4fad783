"""Experiments: Compare, Benchmark and Sweep, all measured by one loop.

A plan that cannot be run is refused with a `ConfigError` that names the reason; the docstrings of
functions do not repeat this.
"""
