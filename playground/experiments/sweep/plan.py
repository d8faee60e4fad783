"""What a sweep is to do: a method, what varies in it, what is measured on which prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from engine.config import Limits, setting
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.plan import (
    Configuration,
    ExperimentPlan,
    Kind,
    UnknownMethod,
    Workload,
)
from playground.experiments.prompts import choose_items
from playground.experiments.space import (
    MAX_VARIED,
    Objective,
    OptunaSearch,
    SearchSettings,
    Space,
)
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import check_size, config_of, read_dtype

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
        """How many trials it plans; a small space may be exhausted before."""
        if self.chooser.mode == "grid":
            return self.space.num_grid or 0
        most = self.space.num_points
        return self.chooser.trials if most is None else min(self.chooser.trials, most)

    @property
    def num_answers(self) -> int:
        """Answers of all trials, plain decoding's beside them included."""
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
        """What one trial is: the method at a point, beside plain decoding."""
        workload = {name: getattr(self, name) for name in Workload.model_fields}
        if all(vary.field != "drafting" for vary in self.chooser.varied):
            config = config.replace(drafting="as set")  # as an engine drafts that is given them
        own = Configuration(METHOD, self.swept.title, config)
        return ExperimentPlan.parse({**workload, "kind": "trial", "configurations": [own]})

    def with_trials(self, trials: int) -> Self:
        """The same plan with another number of trials."""
        return self.parse({**dict(self), "chooser": self.chooser.replace(trials=trials)})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, its kind first: by that the log tells sweeps from other experiments."""
        return {"kind": self.kind, **super().to_dict()}


class SweepForm(SearchSettings):
    """What the Sweep page's form holds; ranges are written as on the command line."""

    target: str
    dtype: str
    method: str
    settings: dict[str, Any] = {}
    vary: list[str] = Field(max_length=MAX_VARIED)
    suite: str = "quick"
    limit: int = setting(
        1, "Prompts of each kind", "how many prompts of each kind of task", le=MAX_LIMIT
    )
    max_new_tokens: int = setting(
        64, "Tokens per answer", "maximum number of new tokens per answer"
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
        search = {name: getattr(self, name) for name in SearchSettings.model_fields}
        own = Configuration(self.method, method.title, config_of(method, self.settings))
        return SweepPlan.parse(
            {
                "target": catalog.target(self.target),
                "dtype": read_dtype(self.dtype),
                "chooser": OptunaSearch.parse({**search, "varied": self.vary}),
                "configurations": [own],
                "items": choose_items([catalog.suites[self.suite]], limit_per_category=self.limit),
                "limits": settings_from(Limits, {"max_new_tokens": self.max_new_tokens}),
            }
        )


def plan_of_form(catalog: Catalog, sent: Mapping[str, Any]) -> SweepPlan:
    """The plan that a form asks for."""
    check_size(sent)
    return SweepForm.parse(sent).plan(catalog)
