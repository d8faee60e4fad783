"""What the Tree page asks the server for; every question is checked here before anything runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ConfigError
from engine.tuning.ranks import RankTable
from engine.tuning.search import best_tree, curve
from engine.tuning.shape import draft_shape, with_tree
from engine.tuning.sizing import SIZES
from playground.host.request import read_count
from playground.host.runner import EngineHost
from playground.trees.editor_drafted import recorded
from playground.trees.editor_jobs import Jobs
from playground.trees.editor_measure import TEXT_TOKENS, Measurements
from playground.trees.editor_methods import TreeMethod, tree_method, tree_methods
from playground.trees.editor_runs import TreeRuns
from playground.trees.editor_sources import Sources
from playground.trees.editor_tables import Examples, pack, words_of
from playground.trees.editor_trees import (
    forget_tree,
    formats,
    read_growmap,
    read_paths,
    read_text,
    save_tree,
    tree_rows,
    write_text,
)

TABLES_KEPT = 4
MAX_ID_CHARS = 120
MAX_NODES = 1024
NOT_DRAFTED = "Other methods wrote these texts: \u201cRe-draft the texts\u201d tries this one."
Asked = Mapping[str, Any]


class TreeEditor:
    """Answers the page; every method takes what the page sent and returns plain JSON.

    Raises ConfigError (or a subclass) with a sentence for the user, from every method.

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
        self._runs = TreeRuns(host.log)
        self._tables: OrderedDict[str, RankTable] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, asked: Asked) -> dict[str, Any]:
        """All menus of the page."""
        targets = self._catalog.target_choices()
        methods = {key: tree_methods(self._catalog, key) for _, key in targets}
        return {
            "targets": [{"key": key, "title": title} for title, key in targets if methods[key]],
            "methods": {key: [one.row() for one in found] for key, found in methods.items()},
            "formats": formats(),
            "trees": tree_rows(self._log),
        }

    # ---- what a tree is replayed on

    def sources(self, asked: Asked) -> dict[str, Any]:
        """The rank tables of a method on a target, and what tables can be measured over."""
        method, target = self._method(asked), self._target(asked)
        wanted = _id(asked, "wanted") if asked.get("wanted") else None
        rows, pick = self._sources.rows(method, target, wanted)
        used = self._sources.effective(method, target)
        return {
            "sources": rows,
            "pick": pick,
            "remark": self._sources.remark(method, target),
            "weights": getattr(used, "speculative_model", None),
            "limits": method.limits(used),
        }

    def table(self, asked: Asked) -> dict[str, Any]:
        """A rank table, packed, and the latency that goes with it."""
        method, target = self._method(asked), self._target(asked)
        table = self._table(asked)
        return {
            "table": pack(table),
            "words": words_of(table),
            "examples": self._examples.known_for(table),
            "speed": self._measurements.speed(method, target),
        }

    def drafted(self, asked: Asked) -> dict[str, Any]:
        """The dynamic trees that a source's runs drafted; `drafted` is None where they did not."""
        method, target, source = self._method(asked), self._target(asked), _id(asked, "source")
        found = None
        if not source.startswith("suite:"):
            run_ids, _ = self._sources.run_ids(source, target)
            config = self._sources.effective(method, target)
            found = recorded(self._log, run_ids, config)
        return {
            "drafted": found,
            "words": "" if found else NOT_DRAFTED,
            "speed": self._measurements.speed(method, target),
        }

    def example(self, asked: Asked) -> dict[str, Any]:
        """A step of the log in words; `tokens` is empty where the log lacks it."""
        table = self._table(asked)
        row = read_count("position", asked.get("position"), most=max(0, table.num_positions - 1))
        depth = read_count("depth", asked.get("depth"), most=64)
        found = self._examples.example(table, row, depth)
        return found or {"before": "", "tokens": [], "run": None}

    # ---- optimise

    def optimise(self, asked: Asked) -> dict[str, Any]:
        """The best tree of so many nodes."""
        nodes = read_count("nodes", asked.get("nodes"), most=MAX_NODES)
        tree = best_tree(self._table(asked), nodes, **_bounds(asked))
        return {"tree": tree.as_lists()}

    def curve(self, asked: Asked) -> dict[str, Any]:
        """The best tree of every size: MAT, and what it drafts."""
        method, table = self._method(asked), self._table(asked)
        points: list[dict[str, Any]] = []
        for point in curve(table, SIZES, **_bounds(asked)):
            if points and len(point.tree) == points[-1]["size"]:
                continue
            levels = draft_shape(with_tree(method.config, point.tree)).levels
            size = len(point.tree)
            points.append({"nodes": size, "size": size, "mat": point.mat, "levels": list(levels)})
        return {"points": points}

    # ---- trees in and out

    def read(self, asked: Asked) -> dict[str, Any]:
        """A tree from text, or from the bytes of a growmap file, that the drafter can take."""
        limits = self._limits(asked) if asked.get("method") else None
        if "file" in asked:
            return read_growmap(asked["file"], limits)
        return read_text(asked.get("text"), limits)

    def write(self, asked: Asked) -> dict[str, Any]:
        """A tree as text in a format."""
        kind = self._method(asked).config.decoding_type if asked.get("method") else "Medusa"
        return write_text(read_paths(asked.get("tree")), asked.get("format"), decoding_type=kind)

    def save(self, asked: Asked) -> dict[str, Any]:
        """Keep a tree under a name."""
        tree = read_paths(asked.get("tree"))
        title = self._method(asked).title if asked.get("method") else ""
        name = save_tree(self._log, asked.get("name"), tree, {"method": title})
        return {"words": f"Saved as {name}.", "trees": tree_rows(self._log)}

    def forget(self, asked: Asked) -> dict[str, Any]:
        """Delete a saved tree."""
        name = forget_tree(self._log, asked.get("name"))
        return {"words": f"Deleted {name}.", "trees": tree_rows(self._log)}

    def measured(self, asked: Asked) -> dict[str, Any]:
        """Finished runs with this tree, this draft length, or dynamic trees of this size."""
        method, target = self._method(asked), self._target(asked)
        used = replace(method, config=self._sources.effective(method, target))
        if method.kind == "dynamic":
            config = used.config.replace(**used.changed(asked.get("settings")))
        else:
            config = used.with_tree(read_paths(asked.get("tree")).paths)
        return {"runs": self._runs.rows(config, target)}

    # ---- long actions

    def measure(self, asked: Asked) -> dict[str, Any]:
        """Begin a measurement; `job` is asked for with `job` and stopped with `stop`."""
        method, target, kind = self._method(asked), self._target(asked), asked.get("kind")
        owner = f"{_id(asked, 'tab')}/tree"
        if kind == "latency":
            work = self._measurements.latency(method, target)
        elif kind == "ranks":
            work = self._measurements.ranks(method, target, _id(asked, "source"))
        elif kind == "redraft":
            settings = method.changed(asked.get("settings"))
            work = self._measurements.redraft(method, target, _id(asked, "source"), settings)
        else:
            raise ConfigError(f"kind must be latency, ranks or redraft, got {kind!r:.80}.")
        return {"job": self._jobs.start(work, owner=owner)}

    def job(self, asked: Asked) -> dict[str, Any]:
        """How far a measurement is."""
        return self._jobs.state(_id(asked, "job"))

    def stop(self, asked: Asked) -> dict[str, Any]:
        """Ask a measurement to end."""
        self._jobs.stop(_id(asked, "job"))
        return {}

    # ---- parts of a question

    def _method(self, asked: Asked) -> TreeMethod:
        return tree_method(self._catalog, asked.get("method"))

    def _target(self, asked: Asked) -> str:
        return self._catalog.target(asked.get("target")).name

    def _limits(self, asked: Asked) -> dict[str, Any] | None:
        method = self._method(asked)
        return method.limits(self._sources.effective(method, self._target(asked)))

    def _table(self, asked: Asked) -> RankTable:
        source = _id(asked, "source")
        with self._lock:
            table = self._tables.pop(source, None) or self._sources.table(source)
            self._tables[source] = table
            while len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        return table


def _bounds(asked: Asked) -> dict[str, Any]:
    category = asked.get("category")
    if category is not None and not isinstance(category, str):
        raise ConfigError(f"category must be text, got {category!r:.80}.")
    bounds: dict[str, Any] = {"category": category}
    for name in ("max_depth", "max_width"):
        value = asked.get(name)
        bounds[name] = None if value is None else read_count(name, value, most=MAX_NODES)
    return bounds


def _id(asked: Asked, name: str) -> str:
    value = asked.get(name)
    if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable():
        return value
    raise ConfigError(f"{name} must be given, got {value!r:.80}. Pick one of the page's list.")
