"""What an experiment is to do: prompts × configurations × repeats, and in which order.

    round 1   plain  A  B          for every prompt all configurations answer in turn, and who
    round 2   A  B  plain          begins moves on by one: whatever drifts (heat, other load)
    round 3   B  plain  A          hits all alike

Compare is one prompt or a few on a few configurations, a benchmark whole suites, and a sweep many
trials, each of which is one configuration on a few prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_serializer, field_validator

from engine.config import Limits, Sampling, Settings
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import plural
from engine.model.sources import TargetSpec
from playground.experiments.space import OptunaSearch

BASELINE = "Autoregressive"
"""Decoding type of plain decoding."""
BASELINE_NAME = "Plain decoding"
TYPED = "own prompt"
"""Suite of a prompt that was typed. It is asked as it was meant: a chat prompt is refused by a
target without a chat template, where one of a suite is continued as plain text."""
MAX_REPEATS = 100
Kind = Literal["benchmark", "compare", "fastest", "sweep", "trial"]
"""What an experiment is for; a trial is one point of a sweep."""
Types = Mapping[str, type[MethodConfig]]
"""Methods by decoding type."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt.

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


def stored_config(values: Mapping[str, Any], types: Types, *, where: str = "") -> MethodConfig:
    """A method's settings as the log has them."""
    kind = types.get(str(values.get("decoding_type")))
    if kind is None:
        raise ConfigError(f"There is no method {values.get('decoding_type')!r:.60} here.")
    return kind.parse(values, where=where)


@dataclass(frozen=True, slots=True)
class UnknownMethod:
    """Settings that this version cannot read: their figures are shown, but they cannot run."""

    values: Mapping[str, Any]
    lossless: bool
    reason: str

    @property
    def decoding_type(self) -> str:
        return str(self.values.get("decoding_type", ""))


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method's settings under a name that is unique in its experiment."""

    name: str
    title: str
    settings: MethodConfig | UnknownMethod

    @property
    def config(self) -> MethodConfig:
        """Raises ConfigError: this version does not have the method, or not these settings."""
        if isinstance(self.settings, UnknownMethod):
            raise ConfigError(self.settings.reason)
        return self.settings

    @property
    def decoding_type(self) -> str:
        return self.settings.decoding_type

    @property
    def lossless(self) -> bool:
        return self.settings.lossless

    @property
    def values(self) -> dict[str, Any]:
        """The method's settings as plain JSON."""
        if isinstance(self.settings, UnknownMethod):
            return dict(self.settings.values)
        return self.settings.model_dump(mode="json")

    @property
    def is_baseline(self) -> bool:
        return self.decoding_type == BASELINE

    def to_dict(self) -> dict[str, Any]:
        names = {"name": self.name, "title": self.title, "lossless": self.lossless}
        return {**names, "config": self.values}

    @classmethod
    def stored(cls, values: Mapping[str, Any], types: Types) -> Self:
        """As the log has it; a method that is gone stays readable."""
        name, config = values["name"], values["config"]
        settings: MethodConfig | UnknownMethod
        try:
            settings = stored_config(config, types, where=f"configuration {name}")
        except ConfigError as error:
            settings = UnknownMethod(config, bool(values.get("lossless")), str(error))
        return cls(name, values.get("title") or name, settings)


Key = tuple[str, str, int, int, str]
"""Suite, prompt, turn, repeat, configuration: what makes a request."""


@dataclass(frozen=True, slots=True)
class Request:
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


def extent(prompts: int, turns: int, configurations: int, repeats: int) -> str:
    """How the number of requests comes about, in words: a prompt of two turns is asked twice."""
    texts = plural(prompts, "prompt")
    if turns > prompts:
        texts = f"{turns} turns of {texts}"
    factors = (texts, plural(configurations, "configuration"), plural(repeats, "repeat"))
    return f"{' × '.join(factors)} = {plural(turns * configurations * repeats, 'request')}"


class Workload(Settings):
    """What a target is asked, whatever drafts for it.

    Attributes:
        target: with `dtype`, what answers; its weights may be fetched again on a resume.
        sampling: greedy by default; repeat r samples with `seed + r`.
    """

    model_config = ConfigDict(strict=False, extra="ignore")

    target: TargetSpec
    dtype: str
    items: tuple[Item, ...]
    repeats: int = 1
    sampling: Sampling = Sampling()
    limits: Limits = Limits(max_new_tokens=128)

    @field_validator("items")
    @classmethod
    def _some(cls, items: tuple[Item, ...]) -> tuple[Item, ...]:
        if not items:
            raise ValueError("There is no prompt to run. Choose a suite, or loosen the limits")
        return items

    @field_validator("repeats")
    @classmethod
    def _in_range(cls, repeats: int) -> int:
        if not 1 <= repeats <= MAX_REPEATS:
            raise ValueError(f"repeats must be in [1, {MAX_REPEATS}], got {repeats}")
        return repeats

    @property
    def num_turns(self) -> int:
        """Answers that each configuration gives."""
        return self.repeats * sum(len(item.turns) for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as the log keeps it."""
        return self.model_dump(mode="json")


class EveryConfiguration(Settings):
    """Every configuration answers everything."""

    name: Literal["all"] = "all"


class Halving(Settings):
    """Successive halving: the slower half is dropped after each repeat, until the time is up."""

    name: Literal["halving"] = "halving"
    budget_s: float = Field(60.0, gt=0)


Chooser = Annotated[EveryConfiguration | Halving | OptunaSearch, Field(discriminator="name")]
"""Which configurations answer."""


class ExperimentPlan(Workload):
    """Configurations on a workload; the first is plain decoding, whether asked for or not.

    Turn n + 1 of a prompt follows on plain decoding's answer to turn n in repeat 0, so that all
    configurations get the same conversation.
    """

    kind: Kind = "benchmark"
    chooser: Chooser = EveryConfiguration()
    configurations: tuple[Configuration, ...]

    @field_validator("configurations")
    @classmethod
    def _behind_baseline(
        cls, configurations: tuple[Configuration, ...]
    ) -> tuple[Configuration, ...]:
        plain = next((c for c in configurations if c.is_baseline), None)
        if plain is None:
            config = parse_method({"decoding_type": BASELINE})
            plain = Configuration(BASELINE_NAME, type(config).title, config)
        ordered = (plain, *(c for c in configurations if not c.is_baseline))
        names = [c.name for c in ordered]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two configurations are named {name}. Give each its own name")
        return ordered

    @field_serializer("configurations")
    def _as_dicts(self, configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
        return [configuration.to_dict() for configuration in configurations]

    @property
    def names(self) -> list[str]:
        return [configuration.name for configuration in self.configurations]

    @property
    def reference(self) -> Configuration:
        return self.configurations[0]

    @property
    def num_requests(self) -> int:
        return self.num_turns * len(self.configurations)

    @property
    def num_answers(self) -> int:
        """Answers that it takes in all."""
        return self.num_requests

    @property
    def extent(self) -> str:
        """How the number of requests comes about, in words."""
        turns = sum(len(item.turns) for item in self.items)
        return extent(len(self.items), turns, len(self.configurations), self.repeats)

    def rounds(self) -> Iterator[tuple[Request, ...]]:
        """Requests in order, those of one turn together.

        Where a repeat would begin as the one before it did, everybody moves on by one more.
        """
        names = self.names
        extra = int(self.num_turns // self.repeats % len(names) == 0)
        number = 0
        for repeat in range(self.repeats):
            for item in self.items:
                for turn in range(len(item.turns)):
                    start = (number + extra * repeat) % len(names)
                    rotated = names[start:] + names[:start]
                    yield tuple(Request(item, turn, repeat, name) for name in rotated)
                    number += 1

    def configuration(self, name: str) -> Configuration:
        return next(c for c in self.configurations if c.name == name)

    @property
    def runnable(self) -> Self:
        """The plan itself.

        Raises ConfigError: this version lacks one of its methods.
        """
        for configuration in self.configurations:
            _ = configuration.config
        return self

    @classmethod
    def stored(cls, values: Mapping[str, Any], types: Types | None = None) -> Self:
        """A plan of the log; `types` are the methods that it may name, by default all.

        Raises ConfigError: it is no plan of an experiment.
        """
        known = types or methods()
        try:
            configurations = [Configuration.stored(c, known) for c in values["configurations"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The stored plan is not a benchmark's: {error!r}.") from error
        return cls.parse({**values, "configurations": configurations}, where="the stored plan")
