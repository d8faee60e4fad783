"""Methods that run a small network on what the target shows."""
