"""`specdec suites`: `list`, `fetch`, `export`: sets of prompts for `--suite`."""

from __future__ import annotations

from playground.cli.commands import ExportSuiteOptions, FetchOptions, ListSuitesOptions
from playground.cli.streams import echo, write_output
from playground.experiments.prompts import (
    PUBLIC,
    fetch_suite,
    find_suite,
    input_lines,
    known_suites,
)


def list_(options: ListSuitesOptions) -> None:
    """Print the suites, and those that can be fetched."""
    known = known_suites()
    for suite in known.values():
        echo(f"{suite.name:16}{suite.title}: {len(suite.prompts)} prompts")
    for name in [name for name in PUBLIC if name not in known]:
        echo(f"{name:16}not fetched yet: specdec suites fetch {name}")


def fetch(options: FetchOptions) -> None:
    """Fetch a suite, or read a copy."""
    suite = fetch_suite(options.name, options.file)
    echo(f"{len(suite.prompts)} prompts: bench --suite {suite.name}")


def export(options: ExportSuiteOptions) -> None:
    """Write a suite for another benchmark."""
    suite = find_suite(options.name)
    write_output(input_lines(suite, options.to, options.max_new_tokens), options.output)
