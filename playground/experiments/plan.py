"""The plan of an experiment: prompts × configurations × repeats, and their order.

    round 1   plain  A  B          all configurations answer every prompt, one after another, and
    round 2   A  B  plain          the first to answer rotates: drift (heat, other load) affects
    round 3   B  plain  A          all of them equally

Compare runs a few prompts on a few configurations, a benchmark whole suites, and a sweep many
trials, each of which is one configuration on a few prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_serializer, field_validator, model_validator

from engine.config import Limits, Sampling, Settings
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.formats import plural
from engine.model.sources import TargetSpec
from playground.experiments.space import OptunaSearch, Space
from playground.host.catalog import MethodTypes, stored_config
from storage import PLAIN

BASELINE_NAME = "Plain decoding"
TYPED = "own prompt"
"""Suite of a typed prompt. A target without a chat template refuses it as a chat prompt; a prompt
of any other suite is then continued as plain text."""
MAX_REPEATS = 100
METHOD = "trial"
"""Configuration name of the method in the runs of a trial; plain decoding keeps its own."""
Kind = Literal["benchmark", "compare", "fastest", "sweep", "trial"]
"""What an experiment is for; a trial is one point of a sweep."""


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


@dataclass(frozen=True, slots=True)
class UnknownMethod:
    """Settings that this version cannot parse: they cannot run, but their figures are shown."""

    values: Mapping[str, Any]
    lossless: bool
    reason: str

    @property
    def decoding_type(self) -> str:
        return str(self.values.get("decoding_type", ""))

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return dict(self.values)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method's settings under a name that is unique in its experiment."""

    name: str
    title: str
    settings: MethodConfig | UnknownMethod

    @property
    def config(self) -> MethodConfig:
        """Raises ConfigError: this version lacks the method, or one of its settings."""
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
        return self.settings.model_dump(mode="json")

    @property
    def is_baseline(self) -> bool:
        return self.decoding_type == PLAIN

    @classmethod
    def stored(cls, values: Mapping[str, Any], types: MethodTypes) -> Self:
        """From the log; a method that no longer exists becomes an `UnknownMethod`."""
        name, config = values["name"], values["config"]
        settings: MethodConfig | UnknownMethod
        try:
            settings = stored_config(config, types, where=f"configuration {name}")
        except ConfigError as error:
            settings = UnknownMethod(config, bool(values.get("lossless")), str(error))
        return cls(name, values.get("title") or name, settings)


Key = tuple[str, str, int, int, str]
"""Suite, prompt, turn, repeat, configuration: they identify a request."""


@dataclass(frozen=True, slots=True)
class Request:
    item: Item
    turn: int
    repeat: int
    configuration: str

    @property
    def key(self) -> Key:
        return self.item.suite, self.item.id, self.turn, self.repeat, self.configuration


class EveryConfiguration(Settings):
    """Every configuration answers everything."""

    name: Literal["all"] = "all"


class Halving(Settings):
    """Successive halving: the slower half is dropped after each repeat, until the time is up."""

    name: Literal["halving"] = "halving"
    budget_s: float = Field(60.0, gt=0)


ChooserSettings = Annotated[
    EveryConfiguration | Halving | OptunaSearch, Field(discriminator="name")
]
"""How the configurations that continue are chosen."""


class ExperimentPlan(Settings):
    """What an experiment measures; the first configuration is always plain decoding.

    Turn n + 1 of a prompt follows plain decoding's answer to turn n in repeat 0, so that all
    configurations get the same conversation.

    Attributes:
        target: its weights may be fetched again on a resume.
        sampling: greedy by default; repeat r samples with `seed + r`.
    """

    model_config = ConfigDict(strict=False, extra="ignore")

    target: TargetSpec
    dtype: str
    items: tuple[Item, ...]
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)
    sampling: Sampling = Sampling()
    limits: Limits = Limits(max_new_tokens=128)
    kind: Kind = "benchmark"
    chooser: ChooserSettings = EveryConfiguration()
    configurations: tuple[Configuration, ...]

    @field_validator("items")
    @classmethod
    def _not_empty(cls, items: tuple[Item, ...]) -> tuple[Item, ...]:
        if not items:
            raise ValueError("There is no prompt to run. Choose a suite, or loosen the limits")
        return items

    @field_validator("configurations")
    @classmethod
    def _with_baseline_first(
        cls, configurations: tuple[Configuration, ...]
    ) -> tuple[Configuration, ...]:
        plain = next((c for c in configurations if c.is_baseline), None)
        if plain is None:
            config = parse_method({"decoding_type": PLAIN})
            plain = Configuration(BASELINE_NAME, BASELINE_NAME, config)
        ordered = (plain, *(c for c in configurations if not c.is_baseline))
        names = [c.name for c in ordered]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two configurations are named {name}. Give each its own name")
        return ordered

    @field_serializer("configurations")
    def _as_dicts(self, configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
        return [
            {"name": c.name, "title": c.title, "lossless": c.lossless, "config": c.values}
            for c in configurations
        ]

    @property
    def names(self) -> list[str]:
        return [configuration.name for configuration in self.configurations]

    @property
    def reference(self) -> Configuration:
        return self.configurations[0]

    @property
    def num_turns(self) -> int:
        """Number of answers of each configuration."""
        return self.repeats * sum(len(item.turns) for item in self.items)

    @property
    def num_requests(self) -> int:
        return self.num_turns * len(self.configurations)

    @property
    def extent(self) -> str:
        """The number of requests as a product; a prompt of two turns makes two requests.

        A search has as many as its time allows.
        """
        prompts, turns = plural(len(self.items), "prompt"), self.num_turns // self.repeats
        texts = f"{turns} turns of {prompts}" if turns > len(self.items) else prompts
        configurations = plural(len(self.configurations), "configuration")
        if isinstance(self.chooser, Halving):
            return f"{texts} × {configurations}, the slower half dropped after each repeat"
        factors = f"{texts} × {configurations} × {plural(self.repeats, 'repeat')}"
        return f"{factors} = {plural(self.num_requests, 'request')}"

    def rounds(self) -> Iterator[tuple[Request, ...]]:
        """Requests in order, those of one turn together.

        Where two repeats would begin with the same configuration, the rotation moves on by one.
        """
        names = self.names
        extra = int(self.num_turns // self.repeats % len(names) == 0)
        turns = [(item, turn) for item in self.items for turn in range(len(item.turns))]
        for number, (repeat, (item, turn)) in enumerate(product(range(self.repeats), turns)):
            start = (number + extra * repeat) % len(names)
            rotated = names[start:] + names[:start]
            yield tuple(Request(item, turn, repeat, name) for name in rotated)

    def configuration(self, name: str) -> Configuration:
        return next(c for c in self.configurations if c.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, the kind first: the log tells sweeps from other experiments by it."""
        return {"kind": self.kind, **self.model_dump(mode="json")}

    @property
    def runnable(self) -> Self:
        """The plan itself.

        Raises ConfigError: this version lacks one of its methods.
        """
        for configuration in self.configurations:
            _ = configuration.config
        return self

    @classmethod
    def stored(cls, values: Mapping[str, Any], types: MethodTypes | None = None) -> Self:
        """A plan of the log; `types` are the methods that it may name, by default all.

        Raises ConfigError: it is not the plan of an experiment.
        """
        types = types or methods()
        try:
            configurations = [Configuration.stored(c, types) for c in values["configurations"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The stored plan is not a benchmark's: {error!r}.") from error
        return cls.parse({**values, "configurations": configurations}, where="the stored plan")


class SweepPlan(ExperimentPlan):
    """An experiment whose configurations are those of one method, chosen by Optuna or a grid.

    Its second configuration is the method as it was when the sweep began; its name is the
    method's key, for links back to it.
    """

    kind: Kind = "sweep"
    chooser: OptunaSearch

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if len(self.configurations) != 2:
            raise ValueError("Plain decoding has no settings to sweep. Choose another method")
        if not isinstance(self.swept.settings, UnknownMethod):
            space = self.space
            if self.chooser.mode == "grid":
                space.grid()
        return self

    @property
    def swept(self) -> Configuration:
        return self.configurations[1]

    @cached_property
    def space(self) -> Space:
        """Raises ConfigError: this version lacks the method."""
        return Space(self.swept.config, self.chooser.varied)

    @property
    def num_trials(self) -> int:
        """Number of planned trials; a small space may be exhausted earlier."""
        if self.chooser.mode == "grid":
            return self.space.num_grid or 0
        most = self.space.num_points
        return self.chooser.trials if most is None else min(self.chooser.trials, most)

    @property
    def num_requests(self) -> int:
        """Number of answers of all trials, including plain decoding's."""
        return 2 * self.num_trials * self.num_turns

    @property
    def about(self) -> str:
        """The plan in one line."""
        space = " × ".join(f"{vary.field} {vary}" for vary in self.chooser.varied)
        target = self.target.title or self.target.name
        suites = " + ".join(dict.fromkeys(item.suite for item in self.items))
        prompts = f"{self.num_turns} answers of {self.limits.max_new_tokens} tokens, {suites}"
        return f"{target} · {self.swept.title} · {self.chooser.mode} · {space} · {prompts}"

    def trial(self, config: MethodConfig) -> ExperimentPlan:
        """The plan of one trial: the method at a point, and plain decoding."""
        if all(vary.field != "drafting" for vary in self.chooser.varied):
            config = config.replace(drafting="as set")  # as an engine with these settings drafts
        own = Configuration(METHOD, self.swept.title, config)
        trial = {"kind": "trial", "chooser": EveryConfiguration(), "configurations": [own]}
        return ExperimentPlan.parse({**dict(self), **trial})
