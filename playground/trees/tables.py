"""Rank tables from the run log: measured on stored runs or a benchmark, kept as artifacts."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.config import Limits
from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.errors import ConfigError
from engine.tuning import OnProgress, ignore
from engine.tuning.ranks import RankTable, measure_ranks
from playground.host.bounded import BoundedCache
from playground.trees.methods import DYNAMIC_FIELDS
from storage import Artifact, RunDetail, RunLog, RunQuery, UnknownBenchmarkError, UnknownRunError

KIND = "ranks"
TREE_SETTINGS = (
    *("medusa_choices", "eagle_choices", "beam_width", "beam_length", "drafting", "acceptance"),
    *("use_dynamic_tree", *DYNAMIC_FIELDS),
)
"""Settings that a table answers for, rather than depends on."""
MAX_PACKED_BYTES = 64_000_000
BEFORE = 14
"""Tokens shown before an example's root."""
MAX_TEXT_BYTES, BYTES_PER_PIECE = 32_000_000, 64
"""Memory for texts whose tokens are remembered, and what a token's text takes."""


def texts_of_runs(log: RunLog, run_ids: Sequence[str], *, target: str | None = None) -> list[Text]:
    """Texts of stored runs, one per prompt, in the order given.

    A lossless method writes what the target alone would write, so any run of a prompt serves; of
    several, the first. Failed and lossy runs are left out. Of a sampled text the ranks say what
    greedy drafts would have accepted, had the target written just this.

    Args:
        target: refuse runs of another one.

    Raises:
        UnknownRunError: no such run.
        ConfigError: a run is of another target, or none of them can be used.
    """
    texts: dict[tuple[int, ...], Text] = {}
    for run_id in run_ids:
        run = log.get(run_id)
        if run is None:
            raise UnknownRunError(f"No run {run_id!r:.80} is in the log.")
        if target is not None and run.target != target:
            raise ConfigError(
                f"Run {run.id} was made with {run.target}, but {target} is loaded. "
                "Choose runs of one target, and load it."
            )
        usable = run.lossless and run.status in ("completed", "cancelled")
        if usable and len(run.output_ids) > 1:
            texts.setdefault(run.prompt_ids, _text(run))
    if not texts:
        raise ConfigError(
            "None of these runs can be used: a text must be finished, lossless and have two new "
            "tokens or more. Choose other runs."
        )
    return list(texts.values())


def texts_of_benchmark(log: RunLog, benchmark_id: str, *, target: str | None = None) -> list[Text]:
    """The same of all runs of a benchmark, whose suite has the categories.

    Raises UnknownBenchmarkError besides: no such benchmark.
    """
    if log.benchmarks.get(benchmark_id) is None:
        raise UnknownBenchmarkError(f"No benchmark {benchmark_id!r:.80} is in the log.")
    ids = log.ids(RunQuery(benchmark_id=benchmark_id, descending=False))
    return texts_of_runs(log, ids, target=target)


def _text(run: RunDetail) -> Text:
    limits = Limits.parse(run.limits, where=f"run {run.id}")
    return Text(
        prompt_ids=run.prompt_ids,
        output_ids=run.output_ids,
        category=run.labels.get("category", ""),
        limits=limits,
        source=run.id,
    )


# ---- measured, kept, found again


def method_key(config: MethodConfig) -> dict[str, Any]:
    """What a table depends on besides texts, target and dtype: the method, what it drafts with."""
    settings = config.model_dump(mode="json")
    return {name: value for name, value in settings.items() if name not in TREE_SETTINGS}


def as_json(value: object) -> str:
    """Comparable text: stored values have lists where settings have tuples."""
    return json.dumps(value, sort_keys=True)


def make_table(
    log: RunLog,
    config: MethodConfig,
    bench: BuildContext,
    *,
    run_ids: Sequence[str] = (),
    benchmark_id: str | None = None,
    depths: int = 8,
    on_progress: OnProgress = ignore,
) -> tuple[str, RankTable]:
    """Measure a method's rank table on stored texts and keep it; returns the artifact's id too.

    A table of one run or of a benchmark is kept with it.

    Raises:
        UnknownRunError, UnknownBenchmarkError: no such run or benchmark.
        ConfigError: neither runs nor a benchmark, or both; no usable text; no ranks to measure.
        SourceError, DrafterError: the drafter cannot be had.
        StoppedError: somebody stopped it.
    """
    if bool(run_ids) == (benchmark_id is not None):
        raise ConfigError("A rank table needs either runs or a benchmark. Give one of them.")
    name = bench.target.name
    if benchmark_id is not None:
        texts = texts_of_benchmark(log, benchmark_id, target=name)
    else:
        texts = texts_of_runs(log, run_ids, target=name)
    table = measure_ranks(config, bench, texts, depths=depths, on_progress=on_progress)
    return keep_table(log, config, table, benchmark_id=benchmark_id), table


def keep_table(
    log: RunLog, config: MethodConfig, table: RankTable, *, benchmark_id: str | None = None
) -> str:
    """Store a table; returns its id. An older one of the same texts and method goes."""
    key = {name: table.about[name] for name in ("target", "dtype")} | {"method": method_key(config)}
    sources = list(table.about["sources"])
    run_id = sources[0] if len(sources) == 1 and benchmark_id is None else None
    if benchmark_id is None and run_id is None:
        key["runs"] = sources
    meta = {
        "decoding_type": config.decoding_type,
        "positions": table.num_positions,
        "depths": table.depths,
        "texts": table.num_texts,
        "categories": sorted(set(table.categories)),
        "lengths": sorted(table.chains),
    }
    older = log.artifacts.find(KIND, key, run_id=run_id, benchmark_id=benchmark_id)
    artifact_id = log.artifacts.put(
        KIND, key, meta=meta, payload=table.to_bytes(), run_id=run_id, benchmark_id=benchmark_id
    )
    for artifact in older:
        if (artifact.run_id, artifact.benchmark_id) == (run_id, benchmark_id) != (None, None):
            log.artifacts.delete(artifact.id)
    return artifact_id


def find_tables(
    log: RunLog,
    *,
    target: str | None = None,
    config: MethodConfig | None = None,
    benchmark_id: str | None = None,
) -> tuple[Artifact, ...]:
    """Tables in the log, newest first; None lets every one through.

    Args:
        config: only tables that answer for this method with these weights, whatever its tree.
    """
    artifacts = log.artifacts.find(KIND, benchmark_id=benchmark_id)
    method = as_json(method_key(config)) if config else ""
    return tuple(
        artifact
        for artifact in artifacts
        if (target is None or artifact.key.get("target") == target)
        and (config is None or as_json(artifact.key.get("method")) == method)
    )


def load_table(log: RunLog, artifact_id: str) -> RankTable:
    """A stored table.

    Raises:
        UnknownArtifactError: no such artifact.
        ConfigError: it is no rank table, or of another version.
    """
    return RankTable.from_bytes(log.artifacts.payload(artifact_id))


# ---- for the page: packed for its own replay, and example steps in words


def pack(table: RankTable) -> dict[str, Any]:
    """The table as the page's `unpackTable` reads it; plain JSON.

    Ranks go up by one, so that 0 means "not among the ranks kept": `(positions, depths)` integers
    of `width` bytes, little-endian, in base64.

    Raises ConfigError: too large to send.
    """
    width = 1 if table.num_ranks <= 254 else 2
    if table.ranks.size * width > MAX_PACKED_BYTES:
        raise ConfigError(
            f"The rank table has {table.num_positions} positions and is too large for the page. "
            "Measure it over fewer texts."
        )
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
    """Steps made offline by a drafter that looks up: counts of accepted and drafted lengths."""
    text_of = np.searchsorted(np.array(table.texts), np.arange(table.num_positions), "right") - 1
    names = np.array(table.categories, dtype=object)
    rows = []
    for length, steps in sorted(table.chains.items()):
        categories = names[text_of[steps.roots]]
        for name in dict.fromkeys(table.categories):
            mine = categories == name
            rows.append(
                {
                    "length": length,
                    "category": name,
                    "ends": np.bincount(steps.accepted[mine], minlength=1).tolist(),
                    "drafted": np.bincount(steps.drafted[mine], minlength=1).tolist(),
                }
            )
    return rows


def describe(table: RankTable) -> str:
    """The table in one line."""
    about = table.about
    ranks = f"{table.depths} depths, {table.num_ranks} ranks" if table.depths else "lookup chains"
    made = " · ".join(str(about[key]) for key in ("target", "dtype") if about.get(key))
    texts = "one text" if table.num_texts == 1 else f"{table.num_texts} texts"
    parts = (f"{table.num_positions:,} positions of {texts}", ranks, made)
    return " · ".join(part for part in parts if part)


class Examples:
    """Reads steps out of the log's texts."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._pieces: BoundedCache[str, tuple[str, ...]]
        self._pieces = BoundedCache(MAX_TEXT_BYTES, lambda pieces: BYTES_PER_PIECE * len(pieces))

    def known_for(self, table: RankTable) -> bool:
        """Whether the log has the texts that the table was measured on."""
        sources = table.about.get("sources") or ()
        return any(isinstance(name, str) and self._log.get(name) for name in sources[:1])

    def example(self, table: RankTable, row: int, depth: int) -> dict[str, Any] | None:
        """The step at a row in words: text up to its root, and the tokens down to a depth.

        None where the log has no such text, or the step goes beyond what was written down.
        """
        text, at = table.locate(row)
        sources = table.about.get("sources") or ()
        run_id = sources[text] if text < len(sources) else None
        pieces: tuple[str, ...] = ()
        if isinstance(run_id, str):
            pieces = self._pieces.read(run_id, lambda _: self._tokens(run_id))
        if at + depth >= len(pieces):
            return None
        before = "".join(pieces[max(0, at - BEFORE) : at + 1])
        return {"before": before, "tokens": list(pieces[at + 1 : at + depth + 1]), "run": run_id}

    def _tokens(self, run_id: str) -> tuple[str, ...]:
        detail = self._log.get(run_id)
        pieces = [] if detail is None else [detail.first_text]
        for step in () if detail is None else self._log.steps(run_id):
            pieces += step.committed_texts
        return tuple(pieces)
