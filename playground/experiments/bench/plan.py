"""What a benchmark is to do: prompts × configurations × repeats, and in which order.

For every prompt all configurations answer in turn, and who begins changes from prompt to prompt and
from repeat to repeat: whatever drifts (heat, other load) hits all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from engine.config import Limits, Sampling
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.experiments.bench.suites import Item

BASELINE = "Autoregressive"
"""Decoding type of plain decoding."""
BASELINE_NAME = "plain"
MAX_REPEATS = 100
Types = Mapping[str, type[MethodConfig]]
"""Methods by decoding type."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method's settings under a name that is unique in its benchmark."""

    name: str
    title: str
    config: MethodConfig

    @property
    def is_baseline(self) -> bool:
        return self.config.decoding_type == BASELINE

    def to_dict(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json")
        lossless = self.config.lossless
        return {"name": self.name, "title": self.title, "lossless": lossless, "config": config}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], types: Types) -> Self:
        kind = types.get(values["config"]["decoding_type"])
        if kind is None:
            raise ConfigError(
                f"No method is called {values['config']['decoding_type']!r:.60} here."
            )
        config = kind.parse(values["config"], where=f"configuration {values['name']}")
        return cls(values["name"], values["title"], config)


Key = tuple[str, str, int, int, str]
"""Suite, prompt, turn, repeat, configuration: what makes a request."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one prompt, to be answered by one configuration in one repeat."""

    item: Item
    turn: int
    repeat: int
    configuration: str

    @property
    def key(self) -> Key:
        return self.item.suite, self.item.id, self.turn, self.repeat, self.configuration

    @property
    def labels(self) -> dict[str, str]:
        """What its run carries in the log."""
        return {
            "suite": self.item.suite,
            "category": self.item.category,
            "group": self.item.group,
            "prompt": self.item.id,
            "turn": str(self.turn),
            "repeat": str(self.repeat),
            "configuration": self.configuration,
        }


def key_of(labels: Mapping[str, str]) -> Key:
    """The key of the request whose run carries these labels."""
    turn, repeat = int(labels["turn"]), int(labels["repeat"])
    return labels["suite"], labels["prompt"], turn, repeat, labels["configuration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole benchmark; the first configuration is the reference of every ratio.

    Attributes:
        target: with `dtype`, what answers; its weights may be fetched again on a resume.
        items: the prompts. Turn n + 1 follows on the reference's answer to turn n in repeat 0, so
            that all configurations get the same conversation.
        sampling: greedy unless told otherwise; repeat r samples with `seed + r`.
    """

    target: TargetSpec
    dtype: str
    configurations: tuple[Configuration, ...]
    items: tuple[Item, ...]
    repeats: int
    sampling: Sampling
    limits: Limits

    @property
    def reference(self) -> Configuration:
        return self.configurations[0]

    @property
    def num_requests(self) -> int:
        turns = sum(len(item.turns) for item in self.items)
        return turns * self.repeats * len(self.configurations)

    def rounds(self) -> Iterator[tuple[Request, ...]]:
        """Requests in order, those of one turn together: its configurations, rotated."""
        for repeat in range(self.repeats):
            number = 0
            for item in self.items:
                for turn in range(len(item.turns)):
                    names = [c.name for c in self.configurations]
                    start = (number + repeat) % len(names)
                    rotated = names[start:] + names[:start]
                    yield tuple(Request(item, turn, repeat, name) for name in rotated)
                    number += 1

    def configuration(self, name: str) -> Configuration:
        return next(c for c in self.configurations if c.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, stored with the benchmark."""
        return {
            "target": self.target.model_dump(mode="json", exclude_defaults=True),
            "dtype": self.dtype,
            "configurations": [c.to_dict() for c in self.configurations],
            "items": [item.to_dict() for item in self.items],
            "repeats": self.repeats,
            "sampling": self.sampling.model_dump(mode="json"),
            "limits": self.limits.model_dump(mode="json"),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], types: Types | None = None) -> Self:
        """A stored plan; `types` are the methods that it may name, all of the engine by default.

        Raises:
            ConfigError: it was written by a version that knew other settings.
        """
        known = types or methods()
        try:
            return cls(
                target=TargetSpec.parse(values["target"]),
                dtype=values["dtype"],
                configurations=tuple(
                    Configuration.from_dict(c, known) for c in values["configurations"]
                ),
                items=tuple(map(Item.from_dict, values["items"])),
                repeats=values["repeats"],
                sampling=Sampling.parse(values["sampling"]),
                limits=Limits.parse(values["limits"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The stored plan is not one of a benchmark: {error!r}.") from error


def make_plan(
    target: TargetSpec,
    dtype: str,
    configurations: Sequence[Configuration],
    items: Sequence[Item],
    *,
    repeats: int = 1,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
) -> Plan:
    """A checked plan: plain decoding comes first, whether asked for or not.

    Raises:
        ConfigError: nothing to run, two configurations of one name, or repeats out of range.
    """
    if not items:
        raise ConfigError("There is no prompt to run. Choose a suite, or fewer restrictions.")
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"repeats must be in [1, {MAX_REPEATS}], got {repeats}.")
    return Plan(
        target=target,
        dtype=dtype,
        configurations=with_baseline(configurations),
        items=tuple(items),
        repeats=repeats,
        sampling=sampling or Sampling(),
        limits=limits or Limits.parse({"max_new_tokens": 128}),
    )


def with_baseline(configurations: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """The configurations behind plain decoding, each name once.

    Raises:
        ConfigError: two of them have the same name.
    """
    given = [c for c in configurations if not c.is_baseline]
    plain = next((c for c in configurations if c.is_baseline), None)
    if plain is None:
        config = parse_method({"decoding_type": BASELINE})
        plain = Configuration(BASELINE_NAME, type(config).title, config)
    names = [c.name for c in (plain, *given)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two configurations are named {name}. Give each a name of its own.")
    return plain, *given
