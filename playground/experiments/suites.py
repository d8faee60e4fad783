"""Prompts for an experiment: suites by name or file, their kinds of task, and how they are cut."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError, one_of
from playground.experiments.plan import TYPED, Item
from playground.experiments.prompt_files import read_suite_file
from playground.host.request import GenerateRequest
from presets import PromptSuite

GROUPS: dict[str, str] = {
    "chat": "Multi-turn conversation",
    "translation": "Translation",
    "summarisation": "Summarisation",
    "qa": "Question answering",
    "maths": "Mathematical reasoning",
    "rag": "Retrieval-grounded",
    "code": "Code",
}
"""Spec-Bench's six kinds of task, and code → their titles, in the order of the tables."""
_CHAT = "writing roleplay reasoning math coding extraction stem humanities multi-turn mt_bench"
_MEMBERS: dict[str, str] = {
    "chat": _CHAT,
    "translation": "wmt",
    "summarisation": "summarization summary",
    "qa": "question_answering question-answering",
    "maths": "math_reasoning maths_reasoning gsm8k",
    "rag": "retrieval retrieval-grounded retrieval_grounded",
    "code": "humaneval completion instruction",
}
_GROUP_OF = {name: group for group, names in _MEMBERS.items() for name in names.split()}


def group_of(category: str) -> str:
    """The group of a category as a file spells it; one that is in none is a group of its own.

    MT-Bench's eight categories, `math` and `coding` among them, are Spec-Bench's conversations.
    """
    name = category.strip().lower().replace(" ", "_")
    return name if name in GROUPS else _GROUP_OF.get(name, category.strip())


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups in the order of the tables; those of a file's own come last."""
    present = set(groups)
    return [group for group in GROUPS if group in present] + sorted(present - set(GROUPS))


def choose_suite(name: str, known: Mapping[str, PromptSuite]) -> PromptSuite:
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
    """
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("Two suites have the same name. Give each file once, or rename one.")
    if limit_per_category is not None and limit_per_category < 1:
        raise ConfigError(f"limit_per_category must be at least 1, got {limit_per_category}.")
    items = [item for suite in suites for item in items_of(suite)]
    known = {item.category for item in items} | {item.group for item in items}
    for name in categories:
        one_of("categories", name, sorted(known))
    chosen_kinds = set(categories) or known
    matching = [item for item in items if chosen_kinds & {item.category, item.group}]
    if limit_per_category is None:
        return tuple(matching)
    members: dict[tuple[str, str], list[Item]] = {}
    for item in matching:
        members.setdefault((item.suite, item.group), []).append(item)
    chosen = {id(i) for group in members.values() for i in evenly(group, limit_per_category)}
    return tuple(item for item in matching if id(item) in chosen)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, taken from their categories in turn and left in their order."""
    seen: Counter[str] = Counter()
    ranked = []
    for place, item in enumerate(items):
        seen[item.category] += 1
        ranked.append((seen[item.category], place))
    return [items[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def first_turns(suite: PromptSuite, most: int) -> list[Item]:
    """The first turn of a suite's first prompts, from its categories in turn."""
    return [replace(item, turns=item.turns[:1]) for item in evenly(items_of(suite), most)]


def typed_item(request: GenerateRequest) -> Item:
    """A prompt that was typed."""
    system = request.system.strip() if request.mode == "chat" else ""
    history = ({"role": "system", "content": system},) if system else ()
    return Item(TYPED, "1", TYPED, TYPED, (request.prompt,), request.mode == "raw", history)


def items_of(suite: PromptSuite) -> tuple[Item, ...]:
    seen: Counter[str] = Counter()
    items = []
    for place, prompt in enumerate(suite.prompts, start=1):
        name = prompt.id or str(place)
        seen[name] += 1
        items.append(
            Item(
                suite.name,
                name if seen[name] == 1 else f"{name}#{seen[name]}",
                prompt.category,
                group_of(prompt.category),
                prompt.turns,
                prompt.raw,
                prompt.history,
            )
        )
    return tuple(items)
