"""`specdec suites`: `list`, `fetch`, `export`: sets of prompts for `--suite`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from playground.cli.options import REQUIRED, argument, command, option
from playground.cli.streams import echo, write_output

suites = typer.Typer(
    name="suites",
    help="List the sets of prompts, fetch public ones, write them for other benchmarks.",
    no_args_is_help=True,
)


@dataclass(kw_only=True)
class FetchOptions:
    name: str = argument(REQUIRED, "humaneval or spec-bench.")
    file: Path | None = option(
        None, "A local copy instead of a download; may be gzipped (.gz).", metavar="FILE"
    )


@dataclass(kw_only=True)
class ExportSuiteOptions:
    name: str = argument(REQUIRED, "Suite or file of prompts.")
    to: str = option("genai-perf", "genai-perf or trtllm-bench.")
    output: Path | None = option(None, "Write the file here.", metavar="FILE.jsonl")
    max_new_tokens: int = option(128, "Tokens per answer, for trtllm-bench.", min=1)


@suites.command("list")
def list_() -> None:
    """List what --suite takes: the shipped sets of prompts, and those that were fetched."""
    from playground.experiments.prompts import PUBLIC, known_suites

    known = known_suites()
    for suite in known.values():
        echo(f"{suite.name:16}{suite.title}: {len(suite.prompts)} prompts")
    for name in [name for name in PUBLIC if name not in known]:
        echo(f"{name:16}not fetched yet: specdec suites fetch {name}")


@suites.command("fetch")
@command(FetchOptions)
def fetch(options: FetchOptions) -> None:
    """Fetch HumanEval or Spec-Bench, or read a copy, and keep it for --suite and the page."""
    from playground.experiments.prompts import fetch_suite

    suite = fetch_suite(options.name, options.file)
    echo(f"{len(suite.prompts)} prompts: bench --suite {suite.name}")


@suites.command("export")
@command(ExportSuiteOptions)
def export(options: ExportSuiteOptions) -> None:
    """Write a suite as the input file of another benchmark: the first turn of every prompt."""
    from playground.experiments.prompts import find_suite, input_lines

    suite = find_suite(options.name)
    write_output(input_lines(suite, options.to, options.max_new_tokens), options.output)
