"""Requests of the Tree page; each is checked here before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tree import MAX_NODES
from engine.tuning.ranks import RankTable
from engine.tuning.search import SIZES, CurvePoint
from playground.host.bounded import BoundedCache
from playground.host.runner import EngineHost
from playground.trees.drafted import recorded
from playground.trees.files import (
    ANY,
    forget_tree,
    formats,
    read_growmap,
    read_paths,
    read_text,
    save_tree,
    tree_rows,
    write_text,
)
from playground.trees.fitting import best_trees
from playground.trees.measurements import TEXT_TOKENS, Jobs, Measurements, Work
from playground.trees.methods import TreeMethod, tree_method, tree_methods
from playground.trees.sources import Sources, runs_with
from playground.trees.tables import Examples, describe, pack

MAX_TABLE_BYTES = 128_000_000
"""Memory for rank tables that are kept ready."""
NOT_DRAFTED = (
    "None of these runs grew a tree with this method. Run it here (below) or in Generate: the "
    "figures then rest on the trees that were recorded."
)
Id = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Question(Settings):
    """The fields of a request; each request needs some of them."""

    target: Id | None = None
    method: Id | None = None
    source: Id | None = None
    wanted: Id | None = None
    category: str | None = None
    max_depth: int | None = Field(None, ge=0, le=MAX_NODES)
    max_width: int | None = Field(None, ge=0, le=MAX_NODES)
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

    def require(self, field: str) -> str:
        """A field that this question cannot do without. Raises ConfigError: it is not there."""
        value: str | None = getattr(self, field)
        if value is None:
            raise ConfigError(f"{field} is missing. Pick one from the list.")
        return value

    @property
    def bounds(self) -> dict[str, Any]:
        """What confines the search of a tree."""
        return self.model_dump(include={"category", "max_depth", "max_width"})


class TreeEditor:
    """Answers the page: its requests are the public methods, which return plain JSON.

    Every method may raise ConfigError (or a subclass) with a sentence for the user.

    Args:
        text_tokens: new tokens of every text that is written to be measured.
    """

    def __init__(self, host: EngineHost, *, text_tokens: int = TEXT_TOKENS) -> None:
        self._host = host
        self._log = host.log
        self._catalog = host.catalog
        self._sources = Sources(host.log, host.catalog)
        self._measurements = Measurements(host, self._sources, text_tokens=text_tokens)
        self._jobs = Jobs(host)
        self._examples = Examples(host.log)
        self._tables: BoundedCache[str, RankTable]
        self._tables = BoundedCache(MAX_TABLE_BYTES, lambda table: table.num_bytes)

    def start(self, question: Question) -> dict[str, Any]:
        """All menus of the page."""
        targets = self._catalog.target_choices()
        methods = {
            key: tree_methods(self._catalog, key, self._host.menu.choices(key))
            for _, key in targets
        }
        return {
            "targets": [{"key": key, "title": title} for title, key in targets if methods[key]],
            "methods": {key: [one.row() for one in offered] for key, offered in methods.items()},
            "formats": formats(),
            "trees": tree_rows(self._log),
        }

    # ---- what a tree is replayed on

    def sources(self, question: Question) -> dict[str, Any]:
        """The rank tables of a method on a target, and what tables can be measured over."""
        method = self._method(question)
        rows, pick = self._sources.rows(method, question.wanted)
        return {
            "sources": rows,
            "pick": pick,
            "remark": self._sources.remark(method),
            "weights": getattr(method.config, "speculative_model", None),
            "limits": method.limits_row(),
        }

    def table(self, question: Question) -> dict[str, Any]:
        """A rank table, packed, and the latency that goes with it."""
        table = self._table(question)
        return {
            "table": pack(table),
            "text": describe(table),
            "examples": self._examples.known_for(table),
            "speed": self._measurements.speed(self._method(question)),
        }

    def drafted(self, question: Question) -> dict[str, Any]:
        """The dynamic trees that a source's runs drafted; `drafted` is None where they did not."""
        method, source, drafts = self._method(question), question.require("source"), None
        if not source.startswith("suite:"):
            run_ids, _ = self._sources.run_ids(source, method)
            drafts = recorded(self._log, run_ids, method.config)
        text, speed = "" if drafts else NOT_DRAFTED, self._measurements.speed(method)
        return {"drafted": drafts, "text": text, "speed": speed}

    def example(self, question: Question) -> dict[str, Any]:
        """A step of the log as text; `tokens` is empty where the log lacks it."""
        table = self._table(question)
        example = None
        if question.position < table.num_positions:
            example = self._examples.example(table, question.position, question.depth)
        return example or {"before": "", "tokens": [], "run": None}

    # ---- optimise

    def optimise(self, question: Question) -> dict[str, Any]:
        return {"tree": self._best(question, (question.nodes,))[0].tree.as_lists()}

    def curve(self, question: Question) -> dict[str, Any]:
        """The best tree of every size: MAT, and what it drafts."""
        points: list[dict[str, Any]] = []
        for point in self._best(question, SIZES):
            if points and len(point.tree) == points[-1]["size"]:
                continue
            size = len(point.tree)
            points.append({"size": size, "depth": point.tree.depth, "mat": point.mat})
        return {"points": points}

    def _best(self, question: Question, sizes: Sequence[int]) -> tuple[CurvePoint, ...]:
        method = self._method(question)
        latency = self._host.experience.latency(method.target, method.config)
        return best_trees(self._table(question), method.config, sizes, latency, **question.bounds)

    # ---- trees in and out

    def read(self, question: Question) -> dict[str, Any]:
        """A tree from text, or from the bytes of a growmap file, that the drafter can take."""
        limits = self._method(question).limits() if question.method else ANY
        if question.file is not None:
            return read_growmap(question.file, limits)
        return read_text(question.text, limits)

    def write(self, question: Question) -> dict[str, Any]:
        kind = self._method(question).config.decoding_type if question.method else "Medusa"
        return write_text(read_paths(question.tree), question.format, decoding_type=kind)

    def save(self, question: Question) -> dict[str, Any]:
        """Keep a tree under a name."""
        tree = read_paths(question.tree)
        title = self._method(question).title if question.method else ""
        name = save_tree(self._log, question.name, tree, {"method": title})
        return {"text": f"Saved as {name}.", "trees": tree_rows(self._log)}

    def forget(self, question: Question) -> dict[str, Any]:
        name = forget_tree(self._log, question.name)
        return {"text": f"Deleted {name}.", "trees": tree_rows(self._log)}

    def measured(self, question: Question) -> dict[str, Any]:
        """Finished runs with this tree, this draft length, or dynamic trees of this size."""
        method = self._method(question)
        return runs_with(self._log, self._edited(question, method), method.target)

    # ---- long actions

    def measure(self, question: Question) -> dict[str, Any]:
        """Begin a measurement: `job` says how far it is, `stop` ends it."""
        method, measurements = self._method(question), self._measurements
        work: Work
        if question.kind == "latency":
            work = partial(measurements.latency, method=method)
        elif question.kind == "ranks":
            work = partial(measurements.ranks, method=method, source=question.require("source"))
        else:
            config, source = self._edited(question, method), question.source or ""
            work = partial(measurements.runs, method=method, config=config, source=source)
        return {"job": self._jobs.start(work, owner=f"{question.tab}/tree")}

    def job(self, question: Question) -> dict[str, Any]:
        """How far a measurement is."""
        return self._jobs.state(question.require("job"))

    def stop(self, question: Question) -> dict[str, Any]:
        """Ask a measurement to end."""
        self._jobs.stop(question.require("job"))
        return {}

    # ---- parts of a question

    def _method(self, question: Question) -> TreeMethod:
        return self._sources.effective(tree_method(self._catalog, question.method, question.target))

    def _edited(self, question: Question, method: TreeMethod) -> MethodConfig:
        """The method with the tree, or the size of its dynamic tree, that the page shows."""
        if method.kind == "dynamic":
            return method.with_settings(question.settings)
        return method.config.with_tree(read_paths(question.tree))

    def _table(self, question: Question) -> RankTable:
        source = question.require("source")
        return self._tables.read(source, lambda _: self._sources.table(source))


QUESTIONS = tuple(name for name in vars(TreeEditor) if not name.startswith("_"))
"""The page's requests."""


def ask(editor: TreeEditor, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one of `QUESTIONS`, whose fields are checked first."""
    assert name in QUESTIONS
    question = Question.parse(fields, where="the tree page")
    answer: dict[str, Any] = getattr(editor, name)(question)
    return answer
