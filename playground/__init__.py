"""The page: Gradio pages and components over an engine host and a run log."""
