"""What came of an experiment: figures, verdicts, explanations, plots and files."""
