"""What came of an experiment: figures, verdicts, explanations, tables, plots and files."""
