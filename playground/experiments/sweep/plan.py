"""What a sweep is to do: a method, what varies in it, what is measured on which prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self, get_args

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from engine.config import Limits, Settings
from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.plan import (
    BASELINE,
    Configuration,
    ExperimentPlan,
    Types,
    Workload,
    stored_config,
)
from playground.experiments.suites import choose_items
from playground.experiments.sweep.space import MAX_VARIED, Space, Vary, parse_vary
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import check_size, config_of, read_dtype

Objective = Literal["tok_s", "speedup", "mat"]
Mode = Literal["search", "grid"]
MAX_TRIALS = 10_000
MAX_LIMIT = 1000
METHOD = "trial"
"""Configuration name of the method in the runs of a trial; plain decoding keeps its own."""
OBJECTIVES: dict[Objective, tuple[str, str]] = {
    "tok_s": (
        "tok/s",
        "speedup of the trial × tok/s of plain decoding in the sweep's first trial, so that "
        "drift between trials cancels out",
    ),
    "speedup": (
        "speedup",
        "tok/s over the tok/s of plain decoding, both run in turn on every prompt of the trial",
    ),
    "mat": ("MAT", "1 + accepted draft tokens / steps, before any cut by EOS or length"),
}
"""What a sweep may maximise: its name, and its formula."""


class SweepPlan(Workload):
    """A whole sweep; enough to go on with it in another process.

    Attributes:
        method: key of the method that the settings started from, for links back to it.
        suite: what the prompts are called.
        trials: how many a search measures; a grid measures all of its points.
        prune: stop a trial after some prompts when it is below the median of the others there.
    """

    method: str
    title: str
    base: SerializeAsAny[MethodConfig]
    varied: tuple[Vary, ...]
    objective: Objective
    mode: Mode
    trials: int
    prune: bool
    seed: int
    suite: str

    @field_validator("objective", "mode", mode="before")
    @classmethod
    def _known(cls, name: object, field: Any) -> object:
        allowed = get_args(Objective if field.field_name == "objective" else Mode)
        if name not in allowed:
            listed = f"one of {', '.join(allowed)}" if len(allowed) > 2 else " or ".join(allowed)
            raise ValueError(f"{field.field_name} must be {listed}, got {name!r:.60}")
        return name

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if not 1 <= self.trials <= MAX_TRIALS:
            raise ValueError(f"trials must be in [1, {MAX_TRIALS}], got {self.trials}")
        space = self.space
        if self.base.decoding_type == BASELINE:
            raise ValueError("Plain decoding has no settings to sweep. Choose another method")
        if self.mode == "grid":
            space.grid()
        return self

    @cached_property
    def space(self) -> Space:
        return Space(self.base, self.varied)

    @property
    def num_trials(self) -> int:
        """How many trials it plans; a small space may be exhausted before."""
        if self.mode == "grid":
            return self.space.num_grid or 0
        most = self.space.num_points
        return self.trials if most is None else min(self.trials, most)

    def trial(self, config: MethodConfig) -> ExperimentPlan:
        """What one trial is: the method at a point, beside plain decoding."""
        workload = {name: getattr(self, name) for name in Workload.model_fields}
        own = Configuration(METHOD, self.title, config)
        return ExperimentPlan.parse({**workload, "kind": "trial", "configurations": [own]})

    @classmethod
    def stored(cls, values: Mapping[str, Any], types: Types | None = None) -> Self:
        """A plan of the log; `types` are the methods that it may name, by default all."""
        try:
            base = stored_config(values["base"], types or methods(), where="the stored sweep")
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The stored plan is not a sweep's: {error!r}.") from error
        return cls.parse({**values, "base": base}, where="the stored sweep")


class SweepForm(Settings):
    """What the Sweep page's form holds; ranges are written as on the command line."""

    target: str
    dtype: str
    method: str
    settings: dict[str, Any] = {}
    vary: list[str] = Field(max_length=MAX_VARIED)
    objective: str = "tok_s"
    mode: Mode = Field(
        "search", title="Search or grid", description="a grid measures every combination"
    )
    trials: int = Field(
        20, strict=False, title="Trials", description="how many combinations a search measures"
    )
    prune: bool = Field(
        False,
        title="Stop poor trials early",
        description="stop a trial early when it falls below the median of the others",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**31,
        strict=False,
        title="Seed of the search",
        description="the same seed tries the same combinations",
    )
    suite: str = "quick"
    limit: int = Field(
        1,
        le=MAX_LIMIT,
        strict=False,
        title="Prompts of each kind",
        description="how many prompts of each kind of task",
    )
    max_new_tokens: int = Field(
        64,
        strict=False,
        title="Tokens per answer",
        description="maximum number of new tokens per answer",
    )

    @field_validator("vary")
    @classmethod
    def _some(cls, vary: list[str]) -> list[str]:
        if not vary:
            raise ValueError("Tick at least one setting to vary")
        return vary

    def plan(self, catalog: Catalog) -> SweepPlan:
        """Raises ConfigError: naming what is wrong."""
        method = catalog.method(self.method)
        if self.suite not in catalog.suites:
            known = ", ".join(catalog.suites)
            raise ConfigError(f"suite must be one of {known}, got {self.suite!r:.60}.")
        suite = catalog.suites[self.suite]
        return SweepPlan.parse(
            {
                "target": catalog.target(self.target),
                "dtype": read_dtype(self.dtype),
                "method": self.method,
                "title": method.title,
                "base": config_of(method, self.settings),
                "varied": [parse_vary(text) for text in self.vary],
                "objective": self.objective,
                "mode": self.mode,
                "trials": self.trials,
                "prune": self.prune,
                "seed": self.seed,
                "items": choose_items([suite], limit_per_category=self.limit),
                "suite": suite.title,
                "limits": settings_from(Limits, {"max_new_tokens": self.max_new_tokens}),
            }
        )


def plan_of_form(catalog: Catalog, sent: Mapping[str, Any]) -> SweepPlan:
    """The plan that a form asks for."""
    check_size(sent)
    return SweepForm.parse(sent).plan(catalog)
