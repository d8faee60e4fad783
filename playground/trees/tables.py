"""Rank tables from the run log: measured on stored runs or a benchmark, kept as artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.config import Limits
from engine.drafters.base import Workbench
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tuning.measure import measure_ranks
from engine.tuning.ranks import RankTable
from engine.tuning.texts import Text
from engine.tuning.watch import UNWATCHED, Watch
from storage import Artifact, RunDetail, RunLog, RunQuery, UnknownBenchmarkError, UnknownRunError

KIND = "ranks"
PAGE = 500
NOT_ASKED = ("medusa_choices", "eagle_choices", "max_draft_len", "adaptive", "acceptance")
"""Settings that a table answers for, rather than depends on."""
DYNAMIC = ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")


def texts_of_runs(log: RunLog, run_ids: Sequence[str], *, target: str | None = None) -> list[Text]:
    """Texts of stored runs, one per prompt, in the order given.

    A lossless method writes what the target alone would write, so any run of a prompt serves; of
    several, the first. Left out are runs that failed or were lossy. Of a sampled text the ranks say
    what greedy drafts would have accepted, had the target written just this.

    Args:
        target: refuse runs of another one.

    Raises:
        UnknownRunError: no such run.
        ConfigError: a run is of another target, or none of them can be used.
    """
    details = []
    for run_id in run_ids:
        detail = log.get(run_id)
        if detail is None:
            raise UnknownRunError(f"No run {run_id!r:.80} is in the log.")
        details.append(detail)
    return _texts(details, target)


def texts_of_benchmark(log: RunLog, benchmark_id: str, *, target: str | None = None) -> list[Text]:
    """Texts of all runs of a benchmark, one per prompt; categories are its suite's.

    Raises:
        UnknownBenchmarkError: no such benchmark.
        ConfigError: a run is of another target, or none of them can be used.
    """
    if log.benchmarks.get(benchmark_id) is None:
        raise UnknownBenchmarkError(f"No benchmark {benchmark_id!r:.80} is in the log.")
    return _texts(_runs_of(log, benchmark_id), target)


def _runs_of(log: RunLog, benchmark_id: str) -> Iterable[RunDetail]:
    offset = 0
    while True:
        query = RunQuery(benchmark_id=benchmark_id, descending=False, limit=PAGE, offset=offset)
        page = log.find(query)
        for row in page.rows:
            detail = log.get(row.id)
            if detail is not None:
                yield detail
        offset += len(page.rows)
        if not page.rows or offset >= page.total:
            return


def _texts(details: Iterable[RunDetail], target: str | None) -> list[Text]:
    found: dict[tuple[int, ...], Text] = {}
    for run in details:
        if target is not None and run.target != target:
            raise ConfigError(
                f"Run {run.id} was made with {run.target}, but {target} is loaded. "
                "Choose runs of one target, and load it."
            )
        usable = run.lossless and run.status in ("completed", "cancelled")
        if usable and len(run.output_ids) > 1:
            found.setdefault(run.prompt_ids, _text(run))
    if not found:
        raise ConfigError(
            "None of these runs can be used: a text must be finished, lossless and have two new "
            "tokens or more. Choose other runs."
        )
    return list(found.values())


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


def table_key(config: MethodConfig, bench_target: str, dtype: str) -> dict[str, Any]:
    """What a table depends on besides its texts: target, dtype, method, and what it drafts with."""
    settings = config.model_dump(mode="json")
    left_out = (*NOT_ASKED, *DYNAMIC, "max_non_leaves_per_layer", "beam_width", "beam_length")
    return {
        "target": bench_target,
        "dtype": dtype,
        "method": {name: value for name, value in settings.items() if name not in left_out},
    }


def make_table(
    log: RunLog,
    config: MethodConfig,
    bench: Workbench,
    *,
    run_ids: Sequence[str] = (),
    benchmark_id: str | None = None,
    depths: int = 8,
    watch: Watch = UNWATCHED,
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
        raise ConfigError("A rank table needs runs or a benchmark, and not both. Give one of them.")
    name = bench.target.name
    if benchmark_id is not None:
        texts = texts_of_benchmark(log, benchmark_id, target=name)
    else:
        texts = texts_of_runs(log, run_ids, target=name)
    table = measure_ranks(config, bench, texts, depths=depths, watch=watch)
    return keep_table(log, config, table, benchmark_id=benchmark_id), table


def keep_table(
    log: RunLog, config: MethodConfig, table: RankTable, *, benchmark_id: str | None = None
) -> str:
    """Store a table; returns its id. An older one of the same texts and method goes."""
    key = table_key(config, table.about["target"], table.about["dtype"])
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
    kept = log.artifacts.put(
        KIND, key, meta=meta, payload=table.to_bytes(), run_id=run_id, benchmark_id=benchmark_id
    )
    for artifact in older:
        if (artifact.run_id, artifact.benchmark_id) == (run_id, benchmark_id) != (None, None):
            log.artifacts.delete(artifact.id)
    return kept


def find_tables(
    log: RunLog,
    *,
    target: str | None = None,
    config: MethodConfig | None = None,
    run_id: str | None = None,
    benchmark_id: str | None = None,
) -> tuple[Artifact, ...]:
    """Tables in the log, newest first; None lets every one through.

    Args:
        config: only tables that answer for this method with these weights, whatever its tree.
    """
    found = log.artifacts.find(KIND, run_id=run_id, benchmark_id=benchmark_id)
    return tuple(
        artifact
        for artifact in found
        if (target is None or artifact.key.get("target") == target)
        and (config is None or _serves(artifact.key, config))
    )


def _serves(key: Mapping[str, Any], config: MethodConfig) -> bool:
    # Compared as JSON: what is stored has lists where settings have tuples.
    wanted = table_key(config, "", "")["method"]
    return json.dumps(key.get("method"), sort_keys=True) == json.dumps(wanted, sort_keys=True)


def load_table(log: RunLog, artifact_id: str) -> RankTable:
    """A stored table.

    Raises:
        UnknownArtifactError: no such artifact.
        ConfigError: it is no rank table, or of another version.
    """
    return RankTable.from_bytes(log.artifacts.payload(artifact_id))
