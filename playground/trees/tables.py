"""Rank tables measured on stored runs or a benchmark, and stored as artifacts of the run log."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.config import Limits
from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.errors import ConfigError
from engine.tuning import OnProgress, no_progress
from engine.tuning.ranks import RankTable, measure_ranks
from playground.host.live import pieces
from playground.runs.reading import stored_run
from playground.trees.methods import DYNAMIC_FIELDS
from storage import Artifact, RunLog, RunSummary

KIND = "ranks"
TREE_SETTINGS = (
    *("medusa_choices", "eagle_choices", "beam_width", "beam_length", "drafting", "acceptance"),
    *("use_dynamic_tree", *DYNAMIC_FIELDS),
)
"""Settings that a table predicts, and so does not depend on."""
BEFORE = 14
"""Tokens shown before an example's root."""


def is_greedy(run: RunSummary) -> bool:
    """Whether the run was greedy: only such texts replay exactly."""
    temperature = run.sampling.get("temperature", 0.0)
    return isinstance(temperature, int | float) and temperature < 1e-5


def texts_of_runs(log: RunLog, run_ids: Sequence[str], *, target: str) -> list[Text]:
    """Texts of stored runs, one per prompt, in the given order.

    A lossless method writes the same text as the target alone, so the first run of each prompt is
    used. Failed and lossy runs are skipped.

    Args:
        target: refuse runs of other targets.

    Raises ConfigError: no such run, one of another target, a sampled one, or none that can be used.
    """
    texts: dict[tuple[int, ...], Text] = {}
    for run_id in run_ids:
        run = stored_run(log, run_id)
        if run.target != target:
            raise ConfigError(
                f"Run {run.id} was made with {run.target}, but {target} is loaded. "
                "Choose runs of one target, and load it."
            )
        if not is_greedy(run):
            raise ConfigError(
                "These runs were sampled; a replay is exact for greedy texts only. Choose runs "
                "with temperature 0."
            )
        usable = run.lossless and run.status in ("completed", "cancelled")
        if usable and len(run.output_ids) > 1 and run.prompt_ids not in texts:
            texts[run.prompt_ids] = Text(
                prompt_ids=run.prompt_ids,
                output_ids=run.output_ids,
                category=run.labels.get("category", ""),
                limits=Limits.parse(run.limits, where=f"run {run.id}"),
                source=run.id,
            )
    if not texts:
        raise ConfigError(
            "None of these runs can be used: a text must be finished, lossless and have two new "
            "tokens or more. Choose other runs."
        )
    return list(texts.values())


# ---- measuring, storing, finding


def method_key(config: MethodConfig) -> dict[str, Any]:
    """The settings that a table depends on: the method and its weights, but not the tree."""
    settings = config.model_dump(mode="json")
    return {name: value for name, value in settings.items() if name not in TREE_SETTINGS}


def make_table(
    log: RunLog,
    config: MethodConfig,
    context: BuildContext,
    *,
    run_ids: Sequence[str],
    benchmark_id: str | None = None,
    depths: int = 8,
    on_progress: OnProgress = no_progress,
) -> tuple[str, RankTable]:
    """Measure a method's rank table on stored texts and store it; returns its artifact id, too.

    Args:
        benchmark_id: the benchmark of the runs, to which the table then belongs.

    Raises:
        ConfigError: no such run, no usable text, or no ranks to measure.
        SourceError, DrafterError: the drafter cannot be loaded.
        StoppedError: it was stopped.
    """
    texts = texts_of_runs(log, run_ids, target=context.target.name)
    table = measure_ranks(config, context, texts, depths=depths, on_progress=on_progress)
    return save_table(log, config, table, benchmark_id=benchmark_id), table


def save_table(
    log: RunLog, config: MethodConfig, table: RankTable, *, benchmark_id: str | None = None
) -> str:
    """Store a table; returns its id. Replaces an older one of the same texts and method."""
    key = {name: table.about[name] for name in ("target", "dtype")} | {"method": method_key(config)}
    if benchmark_id is None:
        key["runs"] = list(table.about["sources"])
    meta = {"positions": table.num_positions, "texts": table.num_texts}
    payload = table.to_bytes()
    return log.artifacts.put(KIND, key, meta=meta, payload=payload, benchmark_id=benchmark_id)


def find_tables(log: RunLog, *, target: str, config: MethodConfig) -> list[Artifact]:
    """Stored tables of a method with these weights, whatever its tree."""
    key = {"target": target, "method": method_key(config)}
    return [one for one in log.artifacts.find(KIND) if key.items() <= one.key.items()]


# ---- for the page: packed tables for its replay, and example steps as text


def pack(table: RankTable) -> dict[str, Any]:
    """The table as the page's `unpackTable` reads it; plain JSON.

    Ranks are stored plus one, so that 0 means "not among the stored ranks": `(positions, depths)`
    little-endian integers of `width` bytes, in base64.
    """
    width = 1 if table.num_ranks <= 254 else 2
    shifted = (table.ranks + 1).astype("<u1" if width == 1 else "<u2")
    return {
        "depths": table.depths,
        "num_ranks": table.num_ranks,
        "starts": list(table.texts),
        "positions": table.num_positions,
        "categories": list(table.categories),
        "width": width,
        "ranks": base64.b64encode(shifted.tobytes()).decode(),
        "chains": _chains(table),
    }


def _chains(table: RankTable) -> list[dict[str, Any]]:
    """Offline steps of a lookup drafter: counts of accepted and drafted lengths."""
    text_of = np.searchsorted(np.array(table.texts), np.arange(table.num_positions), "right") - 1
    names = np.array(table.categories, dtype=object)
    rows = []
    for length, (roots, accepted, drafted) in sorted(table.chains.items()):
        categories = names[text_of[roots]]
        for name in dict.fromkeys(table.categories):
            in_category = categories == name
            rows.append(
                {
                    "length": length,
                    "category": name,
                    "ends": np.bincount(accepted[in_category], minlength=1).tolist(),
                    "drafted": np.bincount(drafted[in_category], minlength=1).tolist(),
                }
            )
    return rows


def describe(table: RankTable) -> str:
    """The table in one line."""
    about = table.about
    ranks = f"{table.depths} depths, {table.num_ranks} ranks" if table.depths else "lookup chains"
    where = " · ".join(str(about[key]) for key in ("target", "dtype") if about.get(key))
    texts = "one text" if table.num_texts == 1 else f"{table.num_texts} texts"
    parts = (f"{table.num_positions:,} positions of {texts}", ranks, where)
    return " · ".join(part for part in parts if part)


def example_step(log: RunLog, table: RankTable, row: int, depth: int) -> dict[str, Any]:
    """The step at a row as text: the text up to its root, and the tokens down to a depth.

    Without tokens if the log lacks the text, or the step extends beyond it.
    """
    nothing: dict[str, Any] = {"before": "", "tokens": []}
    if row >= table.num_positions:
        return nothing
    text, at = table.locate(row)
    own = pieces(log, table.about["sources"][text])
    if at + depth >= len(own):
        return nothing
    return {
        "before": "".join(own[max(0, at - BEFORE) : at + 1]),
        "tokens": own[at + 1 : at + depth + 1],
    }
