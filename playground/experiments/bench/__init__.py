"""The benchmark: suites × configurations × repeats on one target, and what came of it."""
