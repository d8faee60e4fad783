"""Training a drafter: its plan, its folder, its work, and the jobs of one server."""

ABOUT = {
    "method": "medusa, eagle, eagle3, redrafter or draft_target.",
    "learn_from": "Prompts for the target: shipped, of a file, or of its runs in the log.",
    "minutes": "Time for writing, training and measuring; empty = until the tokens are learnt.",
    "tokens": "Text to learn from; what is missing is written first. Empty = as time allows.",
    "prompts": "Prompts in Spec-Bench's layout, besides those the target makes.",
    "evals": "How many times acceptance is measured, evenly over the run.",
}
"""What the options mean, on the command line as on the page."""
