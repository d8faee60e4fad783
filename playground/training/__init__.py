"""Training a drafter: what is asked for, its folder, its work, and the jobs of one server."""
