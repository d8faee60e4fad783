"""The report of an experiment: figures, verdicts, explanations, plots and files."""
