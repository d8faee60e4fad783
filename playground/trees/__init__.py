"""The Tree page's work, without gradio: rank tables, latency, search, trees in and out."""
