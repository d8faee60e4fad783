"""What a draft brings and what it costs: rank tables, replay, tree search, latency."""
