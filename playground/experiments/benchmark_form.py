"""What the Benchmark page's form holds, and the plan that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from engine.config import Limits, Sampling, Settings, setting
from engine.errors import ConfigError, one_of
from playground.experiments.plan import Configuration, ExperimentPlan
from playground.experiments.prompts import choose_items
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import check_size, config_of, read_dtype
from presets import PromptSuite

MAX_CONFIGURATIONS = 12
MAX_REQUESTS = 200_000
MAX_NAME = 60


class Extent(Settings):
    """How much of the suites is run, and how often."""

    limit_per_category: int | None = setting(
        None,
        "Prompts of each kind",
        "maximum number of prompts of each kind of task; empty = all",
        ge=1,
        le=10_000,
    )
    repeats: int = setting(
        2,
        "Repeats",
        "runs of each prompt; more repeats narrow the interval",
        ge=1,
        le=20,
    )


class ConfigurationForm(Settings):
    method: str
    name: str
    settings: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _readable(cls, name: str) -> str:
        if not 0 < len(name.strip()) <= MAX_NAME:
            raise ValueError(f"A configuration's name must have 1 to {MAX_NAME} characters")
        if not name.isprintable():
            raise ValueError("A configuration's name must be printable")
        return name.strip()


class BenchmarkForm(Settings):
    """What the Benchmark page's form holds; settings as their controls hold them."""

    target: str
    dtype: str
    suites: list[str]
    categories: list[str] = []
    configurations: list[ConfigurationForm]
    extent: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling: dict[str, Any] = {}

    @field_validator("configurations")
    @classmethod
    def _some(cls, configurations: list[ConfigurationForm]) -> list[ConfigurationForm]:
        if not 1 <= len(configurations) <= MAX_CONFIGURATIONS:
            raise ValueError(
                f"A benchmark takes 1 to {MAX_CONFIGURATIONS} configurations besides plain "
                "decoding. Add a method"
            )
        return configurations

    def plan(self, catalog: Catalog, suites: Mapping[str, PromptSuite]) -> ExperimentPlan:
        """Raises ConfigError: naming what is wrong."""
        keys = list(dict.fromkeys(self.suites))
        if not keys:
            raise ConfigError("No suite is selected. Select one, or add a file of prompts.")
        extent = settings_from(Extent, self.extent, where="extent")
        configurations = []
        for one in self.configurations:
            method = catalog.method(one.method)
            config = config_of(method, one.settings)
            configurations.append(Configuration(one.name, method.title, config))
        plan = ExperimentPlan.parse(
            {
                "target": catalog.target(self.target),
                "dtype": read_dtype(self.dtype),
                "configurations": configurations,
                "items": choose_items(
                    [suites[one_of("suites", key, suites)] for key in keys],
                    categories=self.categories,
                    limit_per_category=extent.limit_per_category,
                ),
                "repeats": extent.repeats,
                "sampling": settings_from(Sampling, self.sampling, where="sampling"),
                "limits": settings_from(Limits, {"max_new_tokens": 128, **self.limits}),
            }
        )
        if plan.num_requests > MAX_REQUESTS:
            raise ConfigError(
                f"A benchmark may have {MAX_REQUESTS} requests; this one has {plan.num_requests}. "
                "Limit the prompts of each kind."
            )
        return plan


def plan_of_form(
    catalog: Catalog, form: Mapping[str, Any], suites: Mapping[str, PromptSuite]
) -> ExperimentPlan:
    """The plan that the Benchmark page's form asks for; `suites` are those on offer."""
    check_size(form)
    return BenchmarkForm.parse(form).plan(catalog, suites)
