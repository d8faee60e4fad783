"""What a sweep is to do: a method, what varies in it, what is measured on which prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from engine.config import Limits, Sampling
from engine.drafters import methods
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.experiments.bench.plan import BASELINE, Types
from playground.experiments.bench.suites import Item
from playground.experiments.sweeps.space import Space, Vary

Objective = Literal["tok_s", "speedup", "mat"]
Mode = Literal["search", "grid"]
MAX_TRIALS = 10_000
OBJECTIVES: dict[Objective, tuple[str, str]] = {
    "tok_s": (
        "tok/s",
        "speedup of the trial × tok/s of plain decoding in the sweep's first trial: what drifts "
        "between trials divides out",
    ),
    "speedup": (
        "speedup",
        "tok/s over the tok/s of plain decoding, both run in turn on every prompt of the trial",
    ),
    "mat": ("MAT", "1 + accepted draft tokens / steps, before any cut by EOS or length"),
}
"""What a sweep may maximise: its name, and its formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A whole sweep; enough to go on with it in another process.

    Attributes:
        method: key of the method that the settings started from, for links back to it.
        trials: how many a search measures; a grid measures all of its points.
        prune: stop a trial after some prompts when it is below the median of the others there.
    """

    target: TargetSpec
    dtype: str
    method: str
    title: str
    space: Space
    objective: Objective
    mode: Mode
    trials: int
    prune: bool
    seed: int
    items: tuple[Item, ...]
    suite: str
    repeats: int
    sampling: Sampling
    limits: Limits

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming what is wrong.
        """
        if self.objective not in get_args(Objective):
            allowed = ", ".join(get_args(Objective))
            raise ConfigError(f"objective must be one of {allowed}, got {self.objective!r:.60}.")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be search or grid, got {self.mode!r:.60}.")
        if not 1 <= self.trials <= MAX_TRIALS:
            raise ConfigError(f"trials must be in [1, {MAX_TRIALS}], got {self.trials}.")
        if self.space.base.decoding_type == BASELINE:
            raise ConfigError("Plain decoding has no settings to sweep. Choose another method.")
        if not self.items:
            raise ConfigError("There is no prompt to run. Choose a suite, or fewer restrictions.")
        if self.mode == "grid":
            self.space.grid()

    @property
    def num_trials(self) -> int:
        """How many trials it plans; a small space may be exhausted before."""
        if self.mode == "grid":
            return self.space.num_grid
        most = self.space.num_points
        return self.trials if most is None else min(self.trials, most)

    @property
    def num_pairs(self) -> int:
        """Answers that each of the two methods gives in a trial."""
        return self.repeats * sum(len(item.turns) for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, stored with the sweep."""
        same = ("dtype", "method", "title", "objective", "mode", "trials", "prune", "seed")
        return {
            **{key: getattr(self, key) for key in (*same, "suite", "repeats")},
            "target": self.target.model_dump(mode="json", exclude_defaults=True),
            "base": self.space.base.model_dump(mode="json"),
            "varied": [vary.model_dump(mode="json") for vary in self.space.varied],
            "items": [item.to_dict() for item in self.items],
            "sampling": self.sampling.model_dump(mode="json"),
            "limits": self.limits.model_dump(mode="json"),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], types: Types | None = None) -> Self:
        """A stored plan; `types` are the methods that it may name, all of the engine by default.

        Raises:
            ConfigError: it was written by a version that knew other settings.
        """
        rest = dict(values)
        try:
            kind = (types or methods()).get(rest["base"]["decoding_type"])
            if kind is None:
                raise ConfigError(
                    f"No method is called {rest['base']['decoding_type']!r:.60} here."
                )
            base = kind.parse(rest.pop("base"), where="the stored sweep")
            varied = [Vary.parse(vary) for vary in rest.pop("varied")]
            return cls(
                target=TargetSpec.parse(rest.pop("target")),
                space=Space(base, varied),
                items=tuple(map(Item.from_dict, rest.pop("items"))),
                sampling=Sampling.parse(rest.pop("sampling")),
                limits=Limits.parse(rest.pop("limits")),
                **rest,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The stored plan is not one of a sweep: {error!r}.") from error
