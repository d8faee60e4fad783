"""Queries and tables of the run log, for the Runs page and the command line."""
