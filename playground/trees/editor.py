"""Requests of the Tree page, validated before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.config import Settings
from engine.drafters.method import ChoiceLimits
from engine.errors import ConfigError
from engine.tree import MAX_NODES, ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.search import SIZES, BestTree, best_trees, fastest_trees
from playground.experiments.forms import closest_method
from playground.host.bounded import BoundedCache
from playground.host.catalog import Catalog
from playground.host.live import LiveRun
from playground.host.runner import EngineHost, Work
from playground.trees import files, tables
from playground.trees.measurements import Measurements
from playground.trees.methods import TreeMethod, method_rows, tree_method
from playground.trees.sources import Sources, drafts_of, runs_with

MAX_TABLE_BYTES = 128_000_000
"""Memory for cached rank tables."""
NOT_DRAFTED = (
    "None of these runs grew a tree with this method. Run it here (below) or in Generate: the "
    "figures then rest on the trees that were recorded."
)
Id = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]*$")]


class TreeRequest(Settings):
    """The fields of all requests; each request needs some of them."""

    target: Id | None = None
    method: Id | None = None
    source: Id | None = None
    pick: Id | None = None
    category: str | None = None
    max_depth: int | None = Field(None, ge=1, le=MAX_NODES)
    max_width: int | None = Field(None, ge=1, le=MAX_NODES)
    nodes: int = Field(0, ge=0, le=MAX_NODES)
    position: int = Field(0, ge=0)
    depth: int = Field(0, ge=0, le=64)
    tree: list[Any] | None = None
    settings: dict[str, int | None] | None = None
    kind: Literal["latency", "ranks", "runs"] | None = None
    tab: Id = "?"
    job: Id | None = None
    text: str = ""
    file: str | None = None
    format: str = ""
    name: str = ""
    where: str = ""
    weights: str | None = None

    def require(self, field: str) -> str:
        """A field that this request needs. Raises ConfigError: it is missing."""
        value: str | None = getattr(self, field)
        if value is None:
            raise ConfigError(f"{field} is missing. Pick one from the list.")
        return value

    @property
    def choices(self) -> ChoiceTree:
        """The tree. Raises TreeError: it is not one."""
        return ChoiceTree.parse(self.tree, form="candidates")


class TreeEditor:
    """Answers the page: its requests are the public methods, which return plain JSON.

    Every method may raise ConfigError (or a subclass) with a sentence for the user.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._log = host.log
        self._catalog = host.catalog
        self._sources = Sources(host.log, host.catalog)
        self._measurements = Measurements(host, self._sources)
        self._tables = BoundedCache[RankTable](MAX_TABLE_BYTES, lambda table: table.num_bytes)

    def start(self, request: TreeRequest) -> dict[str, Any]:
        """All menus of the page."""
        targets = self._catalog.target_choices()
        methods = {
            key: method_rows(self._catalog, key, self._host.menu.choices(key)) for _, key in targets
        }
        return {
            "targets": [{"key": key, "title": title} for title, key in targets if methods[key]],
            "methods": methods,
            "formats": list(files.TITLES.items()),
            "trees": files.tree_rows(self._log),
        }

    # ---- sources to replay a tree on

    def sources(self, request: TreeRequest) -> dict[str, Any]:
        """The rank tables of a method on a target, and the texts that one can be measured over."""
        method = self._method(request)
        rows, pick = self._sources.rows(method, request.pick)
        limits = method.limits()
        return {
            "sources": rows,
            "pick": pick,
            "remark": self._sources.remark(method),
            "weights": getattr(method.config, "speculative_model", None),
            "limits": asdict(limits) if limits.what else None,
        }

    def table(self, request: TreeRequest) -> dict[str, Any]:
        """A rank table, packed, and the latency that goes with it."""
        table = self._table(request)
        return {
            "table": tables.pack(table),
            "text": tables.describe(table),
            "speed": self._measurements.speed(self._method(request)),
        }

    def drafted(self, request: TreeRequest) -> dict[str, Any]:
        """The dynamic trees that a source's runs drafted; `drafted` is None where they did not."""
        method, source, drafts = self._method(request), request.require("source"), None
        if not source.startswith("suite:"):
            run_ids, _ = self._sources.run_ids(source, method)
            drafts = drafts_of(self._log, run_ids, method.config)
        text, speed = "" if drafts else NOT_DRAFTED, self._measurements.speed(method)
        return {"drafted": drafts, "text": text, "speed": speed}

    def example(self, request: TreeRequest) -> dict[str, Any]:
        """A step of the log as text; `tokens` is empty where the log lacks it."""
        table = self._table(request)
        return tables.example_step(self._log, table, request.position, request.depth)

    # ---- optimise

    def optimise(self, request: TreeRequest) -> dict[str, Any]:
        return {"tree": self._best(request, (request.nodes,))[0].tree.as_lists()}

    def curve(self, request: TreeRequest) -> dict[str, Any]:
        """The best tree of every size: MAT, and what it drafts."""
        points: list[dict[str, Any]] = []
        for point in self._best(request, SIZES):
            if points and len(point.tree) == points[-1]["size"]:
                continue
            size = len(point.tree)
            points.append({"size": size, "depth": point.tree.depth, "mat": point.mat})
        return {"points": points}

    def _best(self, request: TreeRequest, sizes: Sequence[int]) -> tuple[BestTree, ...]:
        """The best tree of every size: by MAT, or where depth costs time by tok/s."""
        method, table = self._method(request), self._table(request).only(request.category)
        table = table.limited_to(max_depth=request.max_depth, max_width=request.max_width)
        latency = self._host.experience.step_latency(method.target, method.config)
        if latency is None or latency.verify.trees is None:
            return best_trees(table, sizes)

        def tok_s(point: BestTree) -> float:
            return latency.predict_config(method.config.with_tree(point.tree), point.mat).tok_s

        return fastest_trees(table, sizes, tok_s)

    # ---- trees in and out

    def read(self, request: TreeRequest) -> dict[str, Any]:
        """A tree from text, or from the bytes of a growmap file, that the drafter can take."""
        limits = self._method(request).limits() if request.method else ChoiceLimits()
        if request.file is not None:
            return files.read_growmap(request.file, limits)
        return files.read_text(request.text, limits)

    def write(self, request: TreeRequest) -> dict[str, Any]:
        kind = self._method(request).config.decoding_type if request.method else "Medusa"
        return files.write_text(request.choices, request.format, decoding_type=kind)

    def save(self, request: TreeRequest) -> dict[str, Any]:
        """Keep a tree under a name."""
        title = self._method(request).title if request.method else ""
        name = files.save_tree(self._log, request.name, request.choices, title)
        return {"text": f"Saved as {name}.", "trees": files.tree_rows(self._log)}

    def forget(self, request: TreeRequest) -> dict[str, Any]:
        name = files.forget_tree(self._log, request.name)
        return {"text": f"Deleted {name}.", "trees": files.tree_rows(self._log)}

    def measured(self, request: TreeRequest) -> dict[str, Any]:
        """Finished runs with this tree, this draft length, or dynamic trees of this size."""
        method = self._method(request)
        config = method.edited(request.tree, request.settings)
        return runs_with(self._log, config, method.target)

    # ---- long actions

    def measure(self, request: TreeRequest) -> dict[str, Any]:
        """Begin a measurement; `job` reports its progress, `stop` ends it."""
        method, measurements = self._method(request), self._measurements
        work: Work
        if request.kind == "latency":
            work = partial(measurements.latency, method=method)
        elif request.kind == "ranks":
            work = partial(measurements.ranks, method=method, source=request.require("source"))
        else:
            config = method.edited(request.tree, request.settings)
            source = request.source or ""
            work = partial(measurements.runs, method=method, config=config, source=source)
        return {"job": self._host.submit(work, owner=f"{request.tab}/tree").id}

    def job(self, request: TreeRequest) -> dict[str, Any]:
        """The progress of a measurement."""
        run = self._job(request)
        over = run.over.is_set()
        return {**run.status, "over": over, "end": run.answer if over else None}

    def stop(self, request: TreeRequest) -> dict[str, Any]:
        """Stop a measurement."""
        self._job(request).cancel()
        return {}

    # ---- parts of a request

    def _method(self, request: TreeRequest) -> TreeMethod:
        return self._sources.resolve(tree_method(self._catalog, request.method, request.target))

    def _job(self, request: TreeRequest) -> LiveRun:
        run = self._host.runs.get(request.require("job"))
        if run is None:
            raise ConfigError("This measurement no longer exists. Start it again.")
        return run

    def _table(self, request: TreeRequest) -> RankTable:
        source = request.require("source")
        return self._tables.get_or_compute(source, lambda _: self._sources.table(source))


def read_tree_choice(catalog: Catalog, raw: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Target, method and settings that the Tree page sends to another page.

    Raises ConfigError: the method is not offered for the target, or refuses the tree.
    """
    request = TreeRequest.parse(raw, where="the tree page")
    method = tree_method(catalog, request.method, request.target)
    config = method.edited(request.tree, request.settings)
    if request.weights and getattr(config, "speculative_model", "") is None:
        config = config.replace(speculative_model=request.weights)
    key = closest_method(catalog, config, method.target)
    return method.target, key, config.model_dump(exclude={"decoding_type"})


REQUESTS = tuple(name for name in vars(TreeEditor) if not name.startswith("_"))
"""The page's requests."""
