"""What the options of training mean, on the command line as on the page."""

ABOUT = {
    "method": "medusa, eagle, eagle3, redrafter or draft_target.",
    "learn_from": "Answers to what: shipped prompts, those of a file, or runs of the log.",
    "minutes": "Time for writing, training and measuring; empty = until the tokens are learnt.",
    "tokens": "Text to learn from; what is missing is written first. Empty = as time allows.",
    "prompts": "Prompts in Spec-Bench's layout, besides those the target makes.",
    "evals": "How many times acceptance is measured, evenly over the run.",
}
