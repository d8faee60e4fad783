"""Suites by name or file, cut to some categories and to so many prompts of each."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.errors import ConfigError
from playground.experiments.bench.groups import group_of
from playground.experiments.bench.layouts import read_suite_file
from presets import Prompt, PromptSuite


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a benchmark.

    Attributes:
        suite: name of its suite.
        id: its name within the suite.
        category: as its file has it.
        group: one of the kinds of task, or the category itself.
    """

    suite: str
    id: str
    category: str
    group: str
    turns: tuple[str, ...]
    raw: bool = False
    history: tuple[dict[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        same = {key: getattr(self, key) for key in ("suite", "id", "category", "group", "raw")}
        return {**same, "turns": list(self.turns), "history": list(self.history)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        lists = {key: tuple(values[key]) for key in ("turns", "history")}
        return cls(**{**values, **lists})


def choose_suite(name: str, known: Mapping[str, PromptSuite]) -> PromptSuite:
    """A suite by name, or read from a file.

    Raises:
        ConfigError: there is none, or the file is in no known layout.
    """
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.is_file():
        return read_suite_file(path)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--suite must be one of {', '.join(known)}, or a file of prompts, got {name!r:.80}. {hint}"
    )


def choose_items(
    suites: Sequence[PromptSuite],
    *,
    categories: Sequence[str] = (),
    limit_per_category: int | None = None,
) -> tuple[Item, ...]:
    """The prompts of some suites, cut.

    Args:
        categories: groups, or categories as the files have them; empty = all.
        limit_per_category: at most so many prompts of each group of each suite.

    Raises:
        ConfigError: a category that no prompt has, or two suites of one name.
    """
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("Two suites have the same name. Give each file once, or rename one.")
    if limit_per_category is not None and limit_per_category < 1:
        raise ConfigError(f"limit_per_category must be at least 1, got {limit_per_category}.")
    items = [item for suite in suites for item in items_of(suite)]
    _check_categories(items, categories)
    wanted = set(categories)
    kept = [item for item in items if not wanted or wanted & {item.category, item.group}]
    return tuple(kept if limit_per_category is None else _evenly(kept, limit_per_category))


def _evenly(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` of each group of each suite, taken from its categories in turn."""
    seen: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for place, item in enumerate(items):
        seen[item.suite, item.category] += 1
        rank = seen[item.suite, item.category]
        places.setdefault((item.suite, item.group), []).append((rank, place))
    kept = {place for ranked in places.values() for _, place in sorted(ranked)[:limit]}
    return [item for place, item in enumerate(items) if place in kept]


def items_of(suite: PromptSuite) -> tuple[Item, ...]:
    """Every prompt of a suite, each under a name of its own."""
    seen: Counter[str] = Counter()
    items = []
    for place, prompt in enumerate(suite.prompts, start=1):
        name = prompt.id or str(place)
        seen[name] += 1
        items.append(_item(suite.name, name if seen[name] == 1 else f"{name}#{seen[name]}", prompt))
    return tuple(items)


def _item(suite: str, name: str, prompt: Prompt) -> Item:
    return Item(
        suite,
        name,
        prompt.category,
        group_of(prompt.category),
        prompt.turns,
        prompt.raw,
        prompt.history,
    )


def _check_categories(items: Sequence[Item], categories: Sequence[str]) -> None:
    known = {item.category for item in items} | {item.group for item in items}
    for name in categories:
        if name not in known:
            raise ConfigError(
                f"categories must be some of {', '.join(sorted(known))}, got {name!r:.60}."
            )
