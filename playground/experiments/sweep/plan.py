"""The plan of a sweep: a method, its varied settings, the objective and the prompts."""

from __future__ import annotations

from functools import cached_property
from typing import Self

from pydantic import model_validator

from engine.drafters.method import MethodConfig
from playground.experiments.plan import (
    Configuration,
    EveryConfiguration,
    ExperimentPlan,
    Kind,
    UnknownMethod,
)
from playground.experiments.space import (
    Objective,
    OptunaSearch,
    Space,
)

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
"""Title and formula of each objective that a sweep may maximise."""


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
    def num_answers(self) -> int:
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

    def with_trials(self, trials: int) -> Self:
        """The same plan with another number of trials."""
        return self.parse({**dict(self), "chooser": self.chooser.replace(trials=trials)})
