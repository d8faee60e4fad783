"""The engine's thread: queue, loaded models, recording, what streams to the page."""
