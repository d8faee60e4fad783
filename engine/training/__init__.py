"""Training of drafters: corpora by self-distillation, trainers, evaluation, checkpoints."""
