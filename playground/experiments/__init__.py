"""Compare, Benchmark and Sweep: plans, jobs, measurements and reports."""
