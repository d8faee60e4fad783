"""Training a drafter: its plan, its folder, its work, and the jobs of one server."""

ABOUT = {
    "learn_from": "Prompts for the target: shipped, of a file, or of its runs in the log.",
    "minutes": "Time for writing, training and measuring; empty = until the tokens are learnt.",
    "tokens": "Text to learn from; what is missing is written first. Empty = as time allows.",
}
"""What options mean, on the command line as on the page."""
