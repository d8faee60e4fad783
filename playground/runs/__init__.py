"""What the Runs page and the command line ask of the log."""
