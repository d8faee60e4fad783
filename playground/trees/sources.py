"""Sources of the Tree page: rank tables, texts to measure over, and runs with drafted trees."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from typing import Any

import presets
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import at_least, mat, position_rates, step_ms_of
from engine.tree import Path
from engine.tuning.ranks import RankTable
from playground.host.catalog import Catalog
from playground.trees.methods import TreeMethod
from playground.trees.tables import find_tables, is_greedy
from storage import Artifact, RunLog, RunQuery, RunSummary, StepRow

SHIPPED = presets.FOLDER / "ranks"
NEWEST_RUNS = 12
MAX_SEARCHED_RUNS, MAX_LISTED_RUNS = 80, 5
RECENT = 24
"""Number of newest runs whose texts are measured together."""
MAX_PATHS, MAX_DRAFTED_RUNS = 64, 100
"""Paths of dynamic trees that are shown, the most frequent ones, of so many runs."""


@dataclass(frozen=True, slots=True)
class Source:
    """One choice of the page's menu.

    Attributes:
        id: `table:ID` or `shipped:NAME`, ready to replay; `recent:`, `run:ID`, `benchmark:ID` or
            `suite:NAME`, to be measured first.
        what: its texts in words, for the offer to measure over them.
        examples: whether the log has its texts.
    """

    id: str
    title: str
    group: str
    ready: bool
    what: str = ""
    examples: bool = False


class Sources:
    def __init__(self, log: RunLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog

    def resolve(self, method: TreeMethod) -> TreeMethod:
        """The method; if it names no weights, with those of its newest run."""
        config = method.config
        if getattr(config, "speculative_model", "") is None:
            query = RunQuery(target=method.target, decoding_type=config.decoding_type, limit=1)
            for row in self._log.rows(query):
                weights = row.method.get("speculative_model")
                if isinstance(weights, str):
                    return replace(method, config=config.replace(speculative_model=weights))
        return method

    def rows(
        self, method: TreeMethod, pick: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The menu for a method, ready sources first, and the one to select, if any.

        Args:
            pick: a source to include; for a benchmark, its table if there is one.
        """
        config, target = method.config, method.target
        if not config.offline:
            return [], None
        tables, shipped = list[Artifact](), list[Source]()
        if method.kind != "dynamic":
            tables = find_tables(self._log, target=target, config=config)
            shipped = self._shipped_for(method)
        sources = [*map(self._table_source, tables), *shipped, *self._text_sources(method)]
        kind, _, name = (pick or "").partition(":")
        if kind == "benchmark":
            if pick not in {source.id for source in sources}:
                sources += self._benchmark(name, target)
            ready = (f"table:{table.id}" for table in tables if table.benchmark_id == name)
            pick = next(ready, pick)
        return [asdict(source) for source in sources], pick

    def remark(self, method: TreeMethod) -> str:
        """Why the method cannot be replayed; empty if it can."""
        if method.config.offline:
            return ""
        return (
            f"{type(method.config).title} learns from every step, so no table can say what other "
            "settings would have accepted. Edit here, and run it (below) to measure."
        )

    # ---- ready

    def _table_source(self, table: Artifact) -> Source:
        meta, day = table.meta, f"{table.created_at.astimezone():%b %d, %H:%M}"
        texts = meta.get("texts", 0)
        of = f"{texts} texts" if texts != 1 else "one run"
        if table.benchmark_id is not None:
            benchmark = self._log.benchmarks.head(table.benchmark_id)
            of = f"benchmark {benchmark.name}" if benchmark else of
        title = f"{of} · {meta.get('positions', 0):,} positions · {day}"
        return Source(f"table:{table.id}", title, "Measured here", ready=True, examples=True)

    def _shipped_for(self, method: TreeMethod) -> list[Source]:
        table = self._shipped_table(method.key)
        if table is None or table.about.get("target") != method.target:
            return []
        title = f"shipped · {table.num_positions:,} positions of {table.num_texts} texts"
        return [Source(f"shipped:{method.key}", title, "Shipped", ready=True)]

    def _shipped_table(self, method: str) -> RankTable | None:
        file = SHIPPED / f"{method}.npz"
        if method not in self._catalog.presets or not file.is_file():
            return None
        return RankTable.from_bytes(file.read_bytes())

    def table(self, source: str) -> RankTable:
        """The table of a source that is ready.

        Raises:
            ConfigError: it is not ready, or there is no such source.
            StorageError: it was deleted.
        """
        kind, _, name = source.partition(":")
        if kind == "table":
            return RankTable.from_bytes(self._log.artifacts.payload(name))
        if kind == "shipped" and (shipped := self._shipped_table(name)) is not None:
            return shipped
        raise ConfigError(f"There is no rank table {source!r:.80}. Pick one from the list.")

    # ---- to measure

    def _text_sources(self, method: TreeMethod) -> list[Source]:
        target, runs = method.target, self._usable_runs(method)
        sources = []
        if len(runs) > 1:
            many = f"the newest {len(runs)} greedy texts"
            sources.append(Source("recent:", f"{many} of this target", MEASURE, False, many))
        for benchmark in self._log.benchmarks.list(NEWEST_RUNS):
            sources += self._benchmark(benchmark.id, target)
        for name, suite in self._catalog.suites.items():
            title = f"suite {suite.title} (writes the texts first)"
            what = f"up to {RECENT} prompts of {suite.title}, which the target answers first"
            sources.append(Source(f"suite:{name}", title, MEASURE, False, what))
        for run in runs[:NEWEST_RUNS]:
            name = textwrap.shorten(run.name or run.prompt_text, 40, placeholder="\u2026")
            title = f"run \u201c{name}\u201d"
            sources.append(Source(f"run:{run.id}", title, MEASURE, False, "this run's text"))
        return sources

    def _benchmark(self, benchmark_id: str, target: str) -> list[Source]:
        """The benchmark as a source, if it has a run of this target."""
        benchmark = self._log.benchmarks.head(benchmark_id)
        query = RunQuery(experiment_id=benchmark_id, target=target, limit=1)
        if benchmark is None or not self._log.rows(query):
            return []
        title = f"benchmark {benchmark.name}"
        return [Source(f"benchmark:{benchmark_id}", title, MEASURE, False, title)]

    def _usable_runs(self, method: TreeMethod) -> list[RunSummary]:
        """The newest greedy runs, one per prompt; for dynamic trees, those of the method."""
        own = method.config.decoding_type if method.kind == "dynamic" else None
        query = RunQuery(
            target=method.target, decoding_type=own, status="completed", limit=MAX_SEARCHED_RUNS
        )
        texts: dict[str, RunSummary] = {}
        for run in self._log.rows(query):
            if run.lossless and is_greedy(run):
                texts.setdefault(run.prompt_id, run)
        return list(texts.values())[:RECENT]

    def run_ids(self, source: str, method: TreeMethod) -> tuple[list[str], str | None]:
        """The run ids of a source of texts other than a suite, and its benchmark's id, if any.

        Raises ConfigError: there is no such source.
        """
        kind, _, name = source.partition(":")
        if kind == "run":
            return [name], None
        if kind == "recent":
            return [run.id for run in self._usable_runs(method)], None
        if kind == "benchmark":
            query = RunQuery(experiment_id=name, target=method.target, descending=False)
            return list(self._log.ids(query)), name
        raise ConfigError(f"There are no texts {source!r:.80}. Pick one from the list.")


MEASURE = "Measure over"


# ---- runs with the displayed tree


def runs_with(log: RunLog, config: MethodConfig, target: str) -> dict[str, Any]:
    """Rows of the newest greedy, completed runs of a target with these settings.

    If there are none, `text` says so.
    """
    settings = _effective_settings(config)
    kind = config.decoding_type
    query = RunQuery(target=target, decoding_type=kind, status="completed", limit=MAX_SEARCHED_RUNS)
    matching = (r for r in log.rows(query) if is_greedy(r) and _settings_of(r) == settings)
    rows = [_row(run) for run in islice(matching, MAX_LISTED_RUNS)]
    text = "" if rows else "No greedy run with these settings is among the newest of the log."
    return {"runs": rows, "text": text}


def _settings_of(run: RunSummary) -> dict[str, Any] | None:
    try:
        return _effective_settings(parse_method(run.method, where=f"run {run.id}"))
    except ConfigError:
        return None  # of another version, or of a method that is not available


def _effective_settings(config: MethodConfig) -> dict[str, Any]:
    """The settings that have an effect: with a dynamic tree, the static one has none."""
    return config.model_dump(include=config.live_settings() - {"num_medusa_heads", "drafting"})


def _row(run: RunSummary) -> dict[str, Any]:
    return {
        "id": run.id,
        "prompt": " ".join((run.name or run.prompt_text).split())[:120],
        "how": run.method.get("drafting", "as set"),
        "mat": run.mat,
        "tok_s": run.tok_s,
        "step_ms": step_ms_of(run.mat, run.tok_s),
    }


# ---- recorded dynamic trees


def drafted_row(steps: Iterable[StepRow]) -> dict[str, Any] | None:
    """Figures and shapes of the steps' trees, as the page's `DynamicCard` reads them; plain JSON.

    A path has the numbers of steps that drafted and accepted it, and follows its parent; `smaller`
    has the MAT of these steps with only the n most probable nodes, by n. None without steps.
    """
    sizes, depths, lengths = Counter[int](), Counter[int](), Counter[int]()
    places = Counter[int]()  # accepted nodes by rank in their tree, the most probable node first
    drafted, accepted = Counter[Path](), Counter[Path]()
    for step in steps:
        paths, probs = list[Path]([()]), [1.0]
        nodes = zip(step.parents[1:], step.ranks[1:], step.draft_probs[1:], strict=True)
        for parent, rank, prob in nodes:
            paths.append((*paths[parent], rank))
            probs.append(probs[parent] * (prob or 0.0))
        order = sorted(range(1, len(paths)), key=probs.__getitem__, reverse=True)
        sizes[len(order)] += 1
        depths[max(map(len, paths))] += 1
        lengths[len(step.accepted)] += 1
        places.update(order.index(node) for node in step.accepted)
        drafted.update(paths[1:])
        accepted.update(paths[node] for node in step.accepted)
    if not lengths:
        return None
    num_steps, num_accepted = lengths.total(), places.total()
    most = sorted(drafted.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    kept = accumulate(places[place] for place in range(max(sizes)))
    return {
        "steps": num_steps,
        "tokens": num_steps + num_accepted,
        "mat": mat(num_accepted, num_steps),
        "rates": position_rates(at_least(lengths), num_steps),
        "nodes": sum(n * count for n, count in sizes.items()) / num_steps,
        "counts": {
            "nodes": list(map(list, sorted(sizes.items()))),
            "depths": list(map(list, sorted(depths.items()))),
        },
        "smaller": [[n, mat(count, num_steps)] for n, count in enumerate(kept, start=1)],
        "paths": [[list(path), n, accepted[path]] for path, n in most[:MAX_PATHS]],
    }


def drafts_of(log: RunLog, run_ids: Sequence[str], config: MethodConfig) -> dict[str, Any] | None:
    """The dynamic trees of those runs that share the settings of the first; None without any.

    Runs that drafted as set come first: under the controller, only what paid off was drafted.
    """
    configs = {
        run_id: parse_method(run.method, where=f"run {run_id}")
        for run_id in run_ids[:MAX_DRAFTED_RUNS]
        if (run := log.get(run_id)) is not None
        and run.method.get("use_dynamic_tree")
        and run.decoding_type == config.decoding_type
        and is_greedy(run)
    }
    settings = next(iter(sorted(configs.values(), key=lambda own: own.drafting != "as set")), None)
    if settings is None:
        return None
    matching = [run_id for run_id, own in configs.items() if own == settings]
    row = drafted_row(step for run_id in matching for step in log.steps(run_id))
    if row is None:
        return None
    runs = f"{len(matching)} runs" if len(matching) != 1 else "one run"
    how = " as set" if settings.drafting == "as set" else ", as much as paid (drafting: auto)"
    return {**row, "text": f"Drafted{how} by {runs} in {row['steps']} steps."}
