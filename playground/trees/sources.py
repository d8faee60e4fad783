"""What a tree can be replayed on: stored rank tables, shipped ones, and texts to measure over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import presets
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import step_ms_of
from engine.tuning.ranks import RankTable
from playground.host.catalog import Catalog
from playground.trees.methods import DYNAMIC_FIELDS, TreeMethod
from playground.trees.tables import find_tables, load_table
from storage import Artifact, RunDetail, RunLog, RunQuery

SHIPPED = presets.FOLDER / "ranks"
NEWEST_RUNS = 12
LOOKED_THROUGH = 80
MOST_FOUND = 5
REMEMBERED = 400
RECENT = 24
"""Texts of the newest runs that are measured together."""


@dataclass(frozen=True, slots=True)
class Source:
    """One choice of the page's menu.

    Attributes:
        id: `table:ID` or `shipped:NAME`, ready to replay; `recent:`, `run:ID`, `benchmark:ID` or
            `suite:NAME`, to be measured first.
        what: the texts, in words, for the sentence that offers to measure.
        examples: whether the log has the texts behind it.
    """

    id: str
    title: str
    group: str
    ready: bool
    what: str = ""
    examples: bool = False


class Sources:
    def __init__(self, log: RunLog, catalog: Catalog, shipped: Path = SHIPPED) -> None:
        self._log = log
        self._catalog = catalog
        self._shipped = shipped

    def effective(self, method: TreeMethod) -> TreeMethod:
        """The method; where it names no weights, with those of its newest run here."""
        config = method.config
        if getattr(config, "speculative_model", "") is None:
            query = RunQuery(target=method.target, decoding_type=config.decoding_type, limit=1)
            for row in self._log.rows(query):
                weights = row.method.get("speculative_model")
                if isinstance(weights, str):
                    return replace(method, config=config.replace(speculative_model=weights))
        return method

    def rows(
        self, method: TreeMethod, wanted: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The menu for a method, what is ready first; and which to pick, if any.

        Args:
            wanted: a source to have among them; of a benchmark its table, if there is one.
        """
        config, target = method.config, method.target
        if not config.offline:
            return [], None
        found: list[Source] = []
        if method.kind != "dynamic":
            tables = find_tables(self._log, target=target, config=config)
            found = [*map(self._stored, tables), *self._shipped_for(method)]
        found += self._texts(target)
        kind, _, name = (wanted or "").partition(":")
        if kind == "benchmark" and wanted not in {source.id for source in found}:
            found += self._benchmark(name, target)
        if kind == "benchmark" and method.kind != "dynamic":
            tables = find_tables(self._log, target=target, config=config, benchmark_id=name)
            wanted = f"table:{tables[0].id}" if tables else wanted
        return [asdict(source) for source in found], wanted

    def remark(self, method: TreeMethod) -> str:
        """Why there is nothing to replay on; empty where there may be something."""
        if method.config.offline:
            return ""
        return (
            f"{type(method.config).title} learns from every step, so no table can say what other "
            "settings would have accepted. Edit here, use it in Generate or Compare, and measure."
        )

    # ---- ready

    def _stored(self, table: Artifact) -> Source:
        meta, day = table.meta, table.created_at.strftime("%b %d, %H:%M")
        texts = meta.get("texts", 0)
        of = f"{texts} texts" if texts != 1 else "one run"
        if table.benchmark_id is not None:
            benchmark = self._log.benchmarks.get(table.benchmark_id)
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
        file = self._shipped / f"{method}.npz"
        if method not in self._catalog.presets or not file.is_file():
            return None
        return RankTable.from_bytes(file.read_bytes())

    def table(self, source: str) -> RankTable:
        """The table of a source that is ready.

        Raises:
            ConfigError: it is not ready, or there is no such source.
            UnknownArtifactError: it was deleted.
        """
        kind, _, name = source.partition(":")
        if kind == "table":
            return load_table(self._log, name)
        if kind == "shipped" and (shipped := self._shipped_table(name)) is not None:
            return shipped
        raise ConfigError(f"There is no rank table {source!r:.80}. Pick one from the list.")

    # ---- to measure

    def _texts(self, target: str) -> list[Source]:
        runs = self._usable(target)
        found = []
        if len(runs) > 1:
            many = f"the newest {min(RECENT, len(runs))} greedy runs"
            found.append(Source("recent:", f"{many} of this target", MEASURE, False, many))
        for benchmark in self._log.benchmarks.list(NEWEST_RUNS):
            found += self._benchmark(benchmark.id, target)
        for name, suite in self._catalog.suites.items():
            title = f"suite {suite.title} (writes the texts first)"
            what = f"up to {RECENT} prompts of {suite.title}, which the target answers first"
            found.append(Source(f"suite:{name}", title, MEASURE, False, what))
        for run in runs[:NEWEST_RUNS]:
            title = f"run \u201c{_short(run.name or run.prompt_text)}\u201d"
            found.append(Source(f"run:{run.id}", title, MEASURE, False, "this run's text"))
        return found

    def _benchmark(self, benchmark_id: str, target: str) -> list[Source]:
        """The benchmark, if it has a run of this target."""
        benchmark = self._log.benchmarks.get(benchmark_id)
        query = RunQuery(benchmark_id=benchmark_id, target=target, limit=1)
        if benchmark is None or not self._log.rows(query):
            return []
        title = f"benchmark {benchmark.name}"
        return [Source(f"benchmark:{benchmark_id}", title, MEASURE, False, title)]

    def _usable(self, target: str) -> list[RunDetail]:
        query = RunQuery(target=target, status="completed", limit=2 * RECENT)
        lossless = [row.id for row in self._log.rows(query) if row.lossless]
        return [run for run in self._log.details(lossless) if is_greedy(run)][:RECENT]

    def run_ids(self, source: str, target: str) -> tuple[list[str], str | None]:
        """Runs behind a source of texts, and its benchmark if it is one; no suites.

        Raises ConfigError: there is no such source, or nothing usable in it.
        """
        kind, _, name = source.partition(":")
        if kind == "run":
            return [name], None
        if kind == "recent":
            found = [run.id for run in self._usable(target)]
            if not found:
                raise ConfigError("There is no finished greedy run of this target yet. Make one.")
            return found, None
        if kind == "benchmark":
            rows = self._log.rows(RunQuery(benchmark_id=name, target=target, limit=500))
            return [row.id for row in rows], name
        if kind == "table":
            return [str(run) for run in load_table(self._log, name).about.get("sources", ())], None
        raise ConfigError(f"There are no texts {source!r:.80}. Pick one from the list.")


MEASURE = "Measure over"


def is_greedy(run: RunDetail) -> bool:
    """Whether the run took the likeliest token throughout: only such texts replay exactly."""
    temperature = run.sampling.get("temperature", 0.0)
    return isinstance(temperature, int | float) and temperature < 1e-5


def depths_for(method: TreeMethod) -> int:
    """How deep a table should be for a method."""
    return 8 if method.kind == "tree" else max(16, method.tree.depth)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else line[:39] + "\u2026"


def require_greedy(log: RunLog, run_ids: Sequence[str]) -> None:
    """Raises ConfigError: one of the runs was sampled."""
    for run in log.details(run_ids):
        if not is_greedy(run):
            raise ConfigError(
                "These runs were sampled; a replay is exact for greedy texts only. Choose runs "
                "with temperature 0."
            )


# ---- runs made with the tree on show


class TreeRuns:
    """Finds the newest runs of a tree; a finished run is read once."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._read = lru_cache(REMEMBERED)(self._comparable)

    def rows(self, config: MethodConfig, target: str) -> list[dict[str, Any]]:
        """Greedy completed runs of this target with these very settings, newest first."""
        wanted = _compared(config)
        kind = config.decoding_type
        query = RunQuery(
            target=target, decoding_type=kind, status="completed", limit=LOOKED_THROUGH
        )
        found = []
        for row in self._log.rows(query):
            settings, shown = self._read(row.id)
            if settings == wanted:
                found.append(shown)
            if len(found) == MOST_FOUND:
                break
        return found

    def _comparable(self, run_id: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """A greedy run's settings, and what is shown of it: its texts are not kept."""
        run = self._log.get(run_id)
        if run is None or not is_greedy(run):
            return None, {}
        return _made_with(run), _row(run)


def _made_with(run: RunDetail) -> dict[str, Any] | None:
    try:
        return _compared(parse_method(run.method, where=f"run {run.id}"))
    except ConfigError:
        return None  # of another version, or of a method that is not offered here


def _compared(config: MethodConfig) -> dict[str, Any]:
    """The settings that have an effect: a static tree's size does not, if the tree is grown."""
    kept = config.model_dump()
    kept.pop("num_medusa_heads", None)
    if "use_dynamic_tree" in kept and "eagle_choices" in kept:
        unused = ("eagle_choices",) if kept["use_dynamic_tree"] else DYNAMIC_FIELDS
        for name in unused:
            del kept[name]
    return kept


def _row(run: RunDetail) -> dict[str, Any]:
    return {
        "id": run.id,
        "prompt": " ".join((run.name or run.prompt_text).split())[:120],
        "mat": run.mat,
        "tok_s": run.tok_s,
        "step_ms": step_ms_of(run.mat, run.tok_s),
        "dtype": run.dtype,
        "when": run.created_at.isoformat(),
    }
