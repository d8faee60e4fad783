"""`app.py tune`: rank tables, trees fitted to them, latency curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from engine.safe_text import file_name
from playground.cli.options import (
    EMBEDDED,
    CommandGroup,
    DeviceOptions,
    JsonOptions,
    LogOptions,
    MethodOptions,
    option,
    parts,
    say,
    takes,
    whole_numbers,
    write_files,
)

if TYPE_CHECKING:
    from engine.tuning.latency import StepLatency
    from engine.tuning.ranks import RankTable
    from playground.trees.fitting import Fit
    from storage import RunLog

tune = typer.Typer(
    cls=CommandGroup,
    name="tune",
    help="Fit draft trees to a drafter's measured ranks, and measure what they cost.",
    no_args_is_help=True,
)


@dataclass(kw_only=True)
class MeasureOptions(LogOptions, MethodOptions, DeviceOptions):
    """Which method on which target."""

    target: str | None = option(
        None, "Target: preset, local folder, .gguf file or hub id; default: the runs'."
    )
    dtype: str | None = option(
        None, "auto, float32, bfloat16, float16, q8 or q4; default: the runs'."
    )


@dataclass(kw_only=True)
class RanksOptions(MeasureOptions):
    runs: str | None = option(None, "Runs of the log, by id: ID,ID.", metavar="ID,ID")
    benchmark: str | None = option(None, "All runs of a benchmark of the log.", metavar="ID")
    depths: int = option(8, "Depths to rank; for lookup, the longest draft.", min=1, max=64)


@dataclass(kw_only=True)
class FitOptions(JsonOptions, LogOptions):
    nodes: str = option("8,16,32,63", "Tree sizes, in drafted nodes: 8,16,32.", metavar="N,N")
    table: str | None = option(None, "Rank table; default: the newest.", metavar="ID")
    max_depth: int | None = option(None, "Longest path.", min=1)
    max_width: int | None = option(None, "Ranks used: 0 up to one less than this.", min=1)
    category: str | None = option(None, "Only texts of this kind of task.")
    held_out: int = option(0, "Hold out one text in this many for judging; 0 = off.", min=0)
    output: Path | None = option(None, "Write one preset per size here.", metavar="DIR")
    name: str | None = option(None, "First part of the presets' names.", metavar="NAME")
    prompts: str = option("", "What the texts answer, noted in the preset: a suite's name.")


@dataclass(kw_only=True)
class LatencyOptions(JsonOptions, MeasureOptions):
    pass


@tune.command()
@takes(RanksOptions)
def ranks(options: RanksOptions) -> None:
    """Measure which ranks a drafter gave to the true tokens of stored texts."""
    import presets
    from playground.cli.tables import Terminal, progress_bar
    from playground.trees.tables import make_table

    config, run_ids = options.config(), parts(options.runs)
    with options.open_log() as log:
        target, dtype = _made_with(log, options)
        with (
            options.models(presets.resolve(target), dtype) as models,
            progress_bar(Terminal(stderr=True), f"Ranking with {config.decoding_type}", 100) as bar,
        ):
            artifact_id, table = make_table(
                log,
                config,
                models.build_context(),
                run_ids=run_ids,
                benchmark_id=options.benchmark,
                depths=options.depths,
                on_progress=lambda fraction: bar(round(100 * fraction)),
            )
    say("\n".join(_described(table)))
    say(f"table {artifact_id}")


@tune.command()
@takes(FitOptions)
def fit(options: FitOptions) -> None:
    """Fit the best tree of every size to a rank table, beside the published trees."""
    import presets
    from engine.drafters import parse_method
    from engine.tuning.experience import ExperienceStore
    from playground.host import paths
    from playground.trees.fitting import fit_trees, fit_yaml, stock_trees
    from playground.trees.tables import load_table

    with options.open_log() as log:
        table = load_table(log, options.table or _newest_table(log))
        about = table.about
        config = parse_method(about["method"])
    latency = ExperienceStore(paths.drafting()).latency(about["target"], config)
    judging: dict[str, Any] = {
        "category": options.category,
        "held_out": options.held_out,
        "latency": latency,
    }
    fits = fit_trees(
        table,
        config,
        whole_numbers("--nodes", options.nodes, "8,16,32"),
        max_depth=options.max_depth,
        max_width=options.max_width,
        **judging,
    )
    stock = stock_trees(table, config, presets.trees().values(), **judging)
    if options.as_json:
        say(json.dumps([one.row() for one in (*fits, *stock)], indent=2))
    else:
        say("\n".join(_fitted([*fits, *stock], options.held_out > 0, latency)))
    if options.output is not None:
        made_for = f"{Path(str(about['target'])).name}-{about['decoding_type']}".lower()
        names = {f"{options.name or made_for}-{len(one.tree)}": one for one in fits}
        texts = {
            f"{file_name(name)}.yaml": fit_yaml(one, name, table, options.prompts)
            for name, one in names.items()
        }
        for file in write_files(options.output, texts):
            say(f"wrote {file}", err=True)


@tune.command()
@takes(LatencyOptions)
def latency(options: LatencyOptions) -> None:
    """Measure what verifying and drafting cost on this machine; runs start from it."""
    import presets
    from playground.cli.tables import Terminal, progress_bar

    config, spec = options.config(), presets.resolve(options.target or EMBEDDED)
    with (
        options.models(spec, options.dtype) as models,
        progress_bar(Terminal(stderr=True), "Measuring latency", 100) as bar,
    ):
        tell = lambda fraction: bar(round(100 * fraction))  # noqa: E731
        latency = models.experience.measure(config, models.build_context(), on_progress=tell)
    if options.as_json:
        say(json.dumps(latency.to_dict(), indent=2))
    else:
        say("\n".join(_latency_lines(latency)))


def _made_with(log: RunLog, options: RanksOptions) -> tuple[str, str | None]:
    """Target and dtype of the texts, unless others are asked for."""
    from storage import RunQuery

    run_id = next(iter(parts(options.runs)), None)
    if options.benchmark is not None:
        rows = log.rows(RunQuery(benchmark_id=options.benchmark, limit=1))
        run_id = rows[0].id if rows else None
    run = None if run_id is None else log.get(run_id)
    if run is None:
        return options.target or EMBEDDED, options.dtype
    return options.target or run.target, options.dtype or run.dtype or None


def _newest_table(log: RunLog) -> str:
    from engine.errors import ConfigError
    from playground.trees.tables import find_tables

    tables = find_tables(log)
    if not tables:
        raise ConfigError("The log has no rank table. Measure one first: app.py tune ranks.")
    return tables[0].id


# ---- what they print: Markdown tables


def _rows(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def _described(table: RankTable) -> Iterator[str]:
    """How often the true token had which rank; for lookup, MAT by draft length."""
    import numpy as np

    from engine.tuning.replay import chain_lengths, replay_chain

    yield (
        f"{table.num_positions} positions of {table.num_texts} texts, {table.about['target']} in "
        f"{table.about['dtype']}, {table.about['decoding_type']}"
    )
    if table.chains:
        lengths = chain_lengths(table)
        mats = [(length, f"{replay_chain(table, length).mat:.3f}") for length in lengths]
        yield from _rows(("draft length", "MAT"), mats)
        return
    shares = [
        (
            depth,
            *(f"{np.mean((column >= 0) & (column < n)):.3f}" for n in (1, 4, 10, table.num_ranks)),
        )
        for depth, column in enumerate(table.ranks.T, start=1)
    ]
    yield from _rows(("depth", "rank 0", "ranks 0-3", "ranks 0-9", "kept"), shares)


def _fitted(fits: Sequence[Fit], held_out: bool, latency: StepLatency | None) -> Iterator[str]:
    """A row per tree, and which is fastest where a latency is known."""
    heads = ["tree", "nodes", "depth", "MAT"]
    heads += ["held out"] if held_out else []
    heads += ["predicted tok/s", "of plain"] if latency else []
    rows = []
    for one in fits:
        cells = [one.title, str(len(one.tree)), str(one.tree.depth), f"{one.mat:.3f}"]
        if held_out:
            cells.append("-" if one.held_out_mat is None else f"{one.held_out_mat:.3f}")
        if one.prediction is not None:
            cells += [f"{one.prediction.tok_s:.1f}", f"{one.prediction.speedup:.2f}"]
        rows.append(cells)
    yield from _rows(heads, rows)
    if latency is None:
        yield "No latency is known for this method; app.py tune latency measures it."
    elif fits:
        best = max(fits, key=lambda one: one.prediction.tok_s if one.prediction else 0.0)
        yield f"Fastest on this machine, as predicted: {best.title}, {len(best.tree)} nodes."


def _latency_lines(latency: StepLatency) -> Iterator[str]:
    """The curve of a step, and what a draft takes."""
    verify = latency.verify
    yield f"A step without its draft, at {verify.context_len} tokens of context:"
    costs = zip(verify.rows, verify.ms, strict=True)
    yield from _rows(("rows", "ms"), [(rows, f"{ms:.2f}") for rows, ms in costs])
    yield f"A draft: {latency.start_ms:.2f} ms, and {latency.level_ms:.2f} ms per level."
