"""What a comparison is to do, read from what the Compare page holds.

round 1   plain  A  B          who begins moves on by one from round to round, so that
round 2   A  B  plain          whatever drifts (heat, other load) hits all alike
round 3   B  plain  A
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from engine.config import Limits, Sampling, Settings
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.experiments.bench.plan import BASELINE, Configuration
from playground.experiments.bench.suites import Item, choose_items
from playground.host.catalog import Catalog, Method
from playground.host.request import GenerateRequest, check_form, read_request
from playground.web.controls import settings_from

PLAIN = "Plain decoding"
"""Name of the baseline in every comparison."""
MIN_CONFIGURATIONS, MAX_CONFIGURATIONS = 1, 4
"""Besides plain decoding."""
OWN_SUITE = "own prompt"
"""Stands for a suite where the prompt was typed in."""
PLACEHOLDER = "x"
FIELDS = ("target", "dtype", "mode", "system", "prompt", "suite", "count")
"""What the page sends before the slots and the form."""


class CompareOptions(Settings):
    """How often and on how much a comparison runs."""

    repeats: int = Field(3, ge=1, le=10, description="rounds of every prompt; more show the noise")
    num_prompts: int = Field(
        6, ge=1, le=20, description="prompts of a suite, taken from its categories in turn"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """A checked comparison; plain decoding is the first configuration.

    Attributes:
        items: the prompts; of several turns only the first is asked.
    """

    target: TargetSpec
    dtype: str
    configurations: tuple[Configuration, ...]
    items: tuple[Item, ...]
    repeats: int
    sampling: Sampling
    limits: Limits

    @property
    def num_rounds(self) -> int:
        return self.repeats * len(self.items)

    def rounds(self) -> Iterator[tuple[int, Item, tuple[int, ...]]]:
        """Every round: its repeat (from 0), its prompt, the order of the configurations."""
        size = len(self.configurations)
        number = 0
        for repeat in range(self.repeats):
            for item in self.items:
                yield repeat, item, tuple((number + i) % size for i in range(size))
                number += 1

    def request(self, at: int, item: Item) -> GenerateRequest:
        """One configuration's request for one prompt."""
        configuration = self.configurations[at]
        return GenerateRequest(
            target=self.target,
            dtype=self.dtype,
            method=Method(configuration.title, "", configuration.config),
            config=configuration.config,
            sampling=self.sampling,
            limits=self.limits,
            mode="raw" if item.raw else "chat",
            system="",
            prompt=item.turns[0],
        )

    def labels(self, compare_id: str, at: int, item: Item, repeat: int) -> dict[str, str]:
        """What a run of this comparison carries in the log; enough to show all of it again."""
        return {
            "compare": compare_id,
            "place": str(at),
            "configuration": self.configurations[at].name,
            "suite": item.suite,
            "category": item.category,
            "group": item.group,
            "prompt": item.id,
            "turn": "0",
            "repeat": str(repeat),
        }


def read_held(held: Sequence[Any]) -> dict[str, Any]:
    """What the page's components hold, in the order of its inputs, for `read_plan`.

    Raises:
        ConfigError: too little was sent, or `count` is not one of the page's.
    """
    if len(held) < len(FIELDS) + 1:
        raise ConfigError("The comparison must have every field of the page's form.")
    raw = dict(zip(FIELDS, held, strict=False))
    slots = held[len(FIELDS) : -1]
    count = raw.pop("count")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(slots) // 2:
        raise ConfigError(
            f"count must be an integer in [1, {MAX_CONFIGURATIONS}], got {count!r:.40}."
        )
    pairs = [(slots[2 * i], slots[2 * i + 1]) for i in range(count)]
    return {**raw, "slots": pairs, "form": held[-1]}


def read_plan(catalog: Catalog, raw: Mapping[str, Any]) -> ComparePlan:
    """A plan from what the page's components hold.

    Args:
        raw: `target`, `dtype`, `mode`, `system`, `prompt` as on the Generate page; `suite`, empty
            for the typed prompt; `form` with groups sampling, limits and compare; `slots`, one
            `(method, form)` per configuration.

    Raises:
        ConfigError: a setting is unknown or out of range, or there is nothing to compare.
        PromptError: the prompt is empty or too long to look at.
    """
    form = check_form(raw.get("form"))
    options = settings_from(CompareOptions, form.get("compare", {}), where="compare")
    slots = raw.get("slots")
    if not isinstance(slots, Sequence) or not 1 <= len(slots) <= MAX_CONFIGURATIONS:
        raise ConfigError(f"A comparison takes one to {MAX_CONFIGURATIONS} configurations.")
    suite = raw.get("suite")
    asked = {**raw, "prompt": PLACEHOLDER} if suite else raw
    requests = [_slot(catalog, asked, form, slot) for slot in slots]
    first = requests[0]
    return ComparePlan(
        target=first.target,
        dtype=first.dtype,
        configurations=configurations([(r.method.title, r.config) for r in requests]),
        items=_items(catalog, suite, options.num_prompts) if suite else (_own(first),),
        repeats=options.repeats,
        sampling=first.sampling,
        limits=first.limits,
    )


def _slot(
    catalog: Catalog, raw: Mapping[str, Any], form: Mapping[str, Any], slot: Any
) -> GenerateRequest:
    """One configuration, checked by the same rules as a run of the Generate page."""
    if not isinstance(slot, Sequence) or len(slot) != 2:
        raise ConfigError("Every configuration must have a method and its settings.")
    method, own = slot
    values = {key: form.get(key, {}) for key in ("sampling", "limits")}
    values["method"] = check_form(own).get("method", {})
    same = {key: raw.get(key) for key in ("target", "dtype", "mode", "system", "prompt")}
    return read_request(catalog, {**same, "method": method, "form": {"values": values}})


def configurations(given: Sequence[tuple[str, MethodConfig]]) -> tuple[Configuration, ...]:
    """The configurations behind plain decoding; methods that stand twice are told apart.

    Raises:
        ConfigError: nothing but plain decoding, or two that are the same.
    """
    drafting = [(title, c) for title, c in given if c.decoding_type != BASELINE]
    if not drafting:
        raise ConfigError(
            "Choose at least one method that drafts: plain decoding runs beside it anyway."
        )
    for i, (_, config) in enumerate(drafting):
        if any(config == other for _, other in drafting[:i]):
            raise ConfigError(
                f"Two configurations of {drafting[i][0]} are the same. Change a setting of one, "
                "or compare fewer."
            )
    names = _distinct(
        [_name(title, c, [o for t, o in drafting if t == title]) for title, c in drafting]
    )
    plain = Configuration(PLAIN, PLAIN, parse_method({"decoding_type": BASELINE}))
    named = zip(names, drafting, strict=True)
    return plain, *(Configuration(name, name, config) for name, (_, config) in named)


def _name(title: str, config: MethodConfig, alike: Sequence[MethodConfig]) -> str:
    """The title, with the first setting that tells the configurations of that title apart."""
    if len(alike) == 1:
        return title
    values = config.model_dump(mode="json")
    others = [other.model_dump(mode="json") for other in alike]
    for key, value in values.items():
        short = isinstance(value, bool | int | float | str) and len(str(value)) <= 24
        told_apart = {str(other.get(key)) for other in others}
        if short and len(told_apart) == len(others):
            return f"{title} · {key} {value}"
    return title


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where no setting tells them apart."""
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _own(request: GenerateRequest) -> Item:
    """The typed prompt."""
    system = request.system.strip() if request.mode == "chat" else ""
    history = ({"role": "system", "content": system},) if system else ()
    raw = request.mode == "raw"
    return Item(OWN_SUITE, "1", OWN_SUITE, OWN_SUITE, (request.prompt,), raw, history)


def _items(catalog: Catalog, suite: Any, most: int) -> tuple[Item, ...]:
    """The first prompts of a suite, from its categories in turn."""
    if not isinstance(suite, str) or suite not in catalog.suites:
        known = ", ".join(catalog.suites)
        raise ConfigError(f"suite must be one of {known}, got {suite!r:.80}.")
    items = choose_items([catalog.suites[suite]])
    ranked: list[tuple[int, int]] = []
    seen: dict[str, int] = {}
    for place, item in enumerate(items):
        seen[item.category] = seen.get(item.category, 0) + 1
        ranked.append((seen[item.category], place))
    kept = sorted(place for _, place in sorted(ranked)[:most])
    return tuple(items[place] for place in kept)
