"""The forms of the Benchmark, Sweep and Compare pages: plans from them, and forms from links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from engine.config import Limits, Sampling, Settings, setting
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, validate_choice
from engine.model.chat_template import system_text
from playground.experiments.plan import Configuration, ExperimentPlan, SweepPlan
from playground.experiments.prompts import choose_items, first_turns, typed_item
from playground.experiments.report.report import stored_experiment
from playground.experiments.space import OptunaSearch, SearchSettings
from playground.host.catalog import TYPE_PREFIX, Catalog, stored_config
from playground.host.controls import changed_by, from_controls, values_of
from playground.host.request import (
    DTYPES,
    MAX_PROMPT_CHARS,
    MAX_SYSTEM_CHARS,
    Mode,
    read_dtype,
    require_prompt,
)
from presets import PromptSuite
from storage import PLAIN, RunDetail, RunLog

MAX_REQUESTS = 200_000
MAX_PER_BENCHMARK, MAX_CONFIGURATIONS = 12, 4
"""Configurations of a benchmark and of a comparison, besides plain decoding."""
MAX_NAME = 60
MAX_LIMIT = 1000
LIMITS = Limits(max_new_tokens=128)
"""Initial limits of a benchmark and of a comparison."""
ABOUT_REPEATS = "runs of each prompt; more repeats narrow the interval"


class ExperimentForm(Settings):
    """Fields of all forms."""

    target: str
    dtype: str

    def shared(self, catalog: Catalog) -> dict[str, Any]:
        """The part of a plan that all forms share."""
        return {"target": catalog.target(self.target), "dtype": read_dtype(self.dtype)}


class ConfigurationForm(Settings):
    """A method's key, and those values of its controls that differ from its own settings.

    Attributes:
        name: None = the method's title.
    """

    method: str
    name: str | None = None
    settings: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _readable(cls, name: str | None) -> str | None:
        if name is not None and not (0 < len(name.strip()) <= MAX_NAME and name.isprintable()):
            raise ValueError(
                f"A configuration's name must have 1 to {MAX_NAME} printable characters"
            )
        return name and name.strip()

    def read(self, catalog: Catalog) -> Configuration:
        """Raises ConfigError: there is no such method, or it refuses a setting."""
        method = catalog.method(self.method)
        config = changed_by(method.config, self.settings)
        return Configuration(self.name or method.title, method.title, config)


class ConfigurationsForm(ExperimentForm):
    """What benchmarks and comparisons share."""

    configurations: list[ConfigurationForm] = Field(min_length=1, max_length=MAX_PER_BENCHMARK)
    limits: Annotated[Limits, from_controls(LIMITS)] = LIMITS
    sampling: Annotated[Sampling, from_controls(Sampling())] = Sampling()

    def shared(self, catalog: Catalog) -> dict[str, Any]:
        return {
            **super().shared(catalog),
            "configurations": [one.read(catalog) for one in self.configurations],
            "limits": self.limits,
            "sampling": self.sampling,
        }


# ---- benchmarks


class Extent(Settings):
    """How many prompts of the suites are run, and how often."""

    limit_per_category: int | None = setting(
        None,
        "Prompts of each kind",
        "maximum number of prompts of each kind of task; empty = all",
        ge=1,
        le=10_000,
    )
    repeats: int = setting(2, "Repeats", ABOUT_REPEATS, ge=1, le=20)


class BenchmarkForm(ConfigurationsForm):
    suites: list[str]
    extent: Annotated[Extent, from_controls(Extent())] = Extent()

    def plan(self, catalog: Catalog, suites: Mapping[str, PromptSuite]) -> ExperimentPlan:
        """`suites` are those on offer; raises ConfigError, naming what is wrong."""
        keys = list(dict.fromkeys(self.suites))
        if not keys:
            raise ConfigError("No suite is selected. Select one, or add a file of prompts.")
        plan = ExperimentPlan.parse(
            {
                **self.shared(catalog),
                "items": choose_items(
                    [suites[validate_choice("suites", key, suites)] for key in keys],
                    limit_per_category=self.extent.limit_per_category,
                ),
                "repeats": self.extent.repeats,
            }
        )
        if plan.num_requests > MAX_REQUESTS:
            raise ConfigError(
                f"A benchmark may have {MAX_REQUESTS} requests; this one has {plan.num_requests}. "
                "Limit the prompts of each kind."
            )
        return plan


# ---- sweeps


class SweepExtent(SearchSettings):
    """How many combinations are measured, and on what."""

    limit: int = setting(
        1, "Prompts of each kind", "how many prompts of each kind of task", ge=1, le=MAX_LIMIT
    )
    max_new_tokens: int = setting(
        64, "Tokens per answer", "maximum number of new tokens per answer"
    )


class SweepForm(ExperimentForm, SweepExtent):
    """Ranges are written as on the command line."""

    method: str
    settings: dict[str, Any] = {}
    vary: list[str] = []
    suite: str = "quick"

    def plan(self, catalog: Catalog) -> SweepPlan:
        """Raises ConfigError: naming what is wrong."""
        method = catalog.method(self.method)
        suite = catalog.suites[validate_choice("suite", self.suite, catalog.suites)]
        search = {name: getattr(self, name) for name in SearchSettings.model_fields}
        config = changed_by(method.config, self.settings)
        return SweepPlan.parse(
            {
                **self.shared(catalog),
                "chooser": OptunaSearch.parse({**search, "varied": self.vary}),
                "configurations": [Configuration(self.method, method.title, config)],
                "items": choose_items([suite], limit_per_category=self.limit),
                "limits": Limits.parse({"max_new_tokens": self.max_new_tokens}),
            }
        )


# ---- comparisons


class CompareOptions(Settings):
    """Repeats and prompts of a comparison."""

    repeats: int = setting(3, "Repeats", ABOUT_REPEATS, ge=1, le=10)
    num_prompts: int = setting(
        6,
        "Prompts of the suite",
        "number of prompts from a suite, taken from its categories in turn",
        ge=1,
        le=20,
    )


class CompareForm(ConfigurationsForm):
    """Values of the Compare page's form.

    Attributes:
        suite: empty for the typed prompt.
    """

    mode: Mode
    system: str = Field("", max_length=MAX_SYSTEM_CHARS)
    prompt: str = Field("", max_length=MAX_PROMPT_CHARS)
    suite: str = ""
    compare: Annotated[CompareOptions, from_controls(CompareOptions())] = CompareOptions()

    def plan(self, catalog: Catalog) -> ExperimentPlan:
        """The plan, checked by the same rules as a run of the Generate page.

        Raises:
            ConfigError: a setting is unknown or out of range, or there is nothing to compare.
            PromptError: the prompt is empty.
        """
        if self.suite:
            suite = catalog.suites[validate_choice("suite", self.suite, catalog.suites)]
            items = first_turns(suite, self.compare.num_prompts)
        else:
            require_prompt(self.mode, self.prompt)
            items = [typed_item(self.mode, self.system, self.prompt)]
        shared = self.shared(catalog)
        shared["configurations"] = with_own_names(shared["configurations"])
        of_comparison = {"kind": "compare", "items": items, "repeats": self.compare.repeats}
        return ExperimentPlan.parse({**shared, **of_comparison})


def with_own_names(configurations: Sequence[Configuration]) -> list[Configuration]:
    """The configurations that draft, each named by its title and what sets it apart."""
    drafting = [one for one in configurations if not one.is_baseline]
    if not 1 <= len(drafting) <= MAX_CONFIGURATIONS:
        raise ConfigError(
            f"A comparison takes 1 to {MAX_CONFIGURATIONS} methods that draft besides plain "
            f"decoding, got {len(drafting)}. Add or remove some."
        )
    for i, one in enumerate(drafting):
        if one.config in [other.config for other in drafting[:i]]:
            raise ConfigError(
                f"Two configurations of {one.title} are the same. Change a setting of one, or "
                "compare fewer."
            )
    names = [
        _full_title(one, [other.config for other in drafting if other.title == one.title])
        for one in drafting
    ]
    named = []
    for i, (name, one) in enumerate(zip(names, drafting, strict=True)):
        own = f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        named.append(Configuration(own, own, one.config))
    return named


def _full_title(one: Configuration, alike: Sequence[MethodConfig]) -> str:
    """The title, followed by the first setting whose value differs in all configurations of it."""
    if len(alike) == 1:
        return one.title
    others = [other.model_dump(mode="json") for other in alike]
    for key, value in one.values.items():
        short = isinstance(value, bool | int | float | str) and len(str(value)) <= 24
        if short and len({str(other.get(key)) for other in others}) == len(others):
            return f"{one.title} · {key} {value}"
    return one.title


# ---- the form from a link


def first_methods(catalog: Catalog, choices: list[tuple[str, str]]) -> list[str]:
    """The best method of each kind to begin with, those made for the target first.

    Within these, the fastest and then those without weights, as in `Catalog.first_method`.
    """

    def rank(key: str) -> tuple[bool, bool, bool]:
        preset = catalog.presets.get(key)
        is_first, is_made = (preset.first, bool(preset.target)) if preset else (False, False)
        return not is_first, not is_made, catalog.is_trained(key)

    kinds: dict[str, str] = {}
    for key in sorted((key for _, key in choices), key=rank):
        kinds.setdefault(catalog.method(key).config.decoding_type, key)
    kinds.pop(PLAIN, None)
    return list(kinds.values()) or [choices[0][1]]


def closest_method(catalog: Catalog, config: MethodConfig, target: str) -> str:
    """Key of the method offered for the target whose settings differ the least; presets first.

    Raises ConfigError: none of this decoding type is offered.
    """
    near: list[tuple[int, bool, str]] = []
    values = values_of(config)
    for _, key in catalog.method_choices(target):
        start = catalog.method(key).config
        if start.decoding_type == config.decoding_type:
            own = values_of(start)
            num_changes = sum(name not in own or own[name] != v for name, v in values.items())
            near.append((num_changes, key.startswith(TYPE_PREFIX), key))
    if not near:
        raise ConfigError(f"{config.decoding_type} is not offered for the target {target}.")
    return min(near, key=lambda one: one[:2])[2]


def from_run(catalog: Catalog, run: RunDetail) -> CompareForm:
    """`?compare=RUN`: the prompt and the settings of a run."""
    configs = [stored_config(run.method, catalog.types)]
    return CompareForm.parse(
        {
            **_setup(catalog, run.target, run.dtype, configs, run.messages),
            "mode": "chat" if run.messages else "raw",
            "prompt": run.prompt_text,
            "sampling": Sampling.parse(run.sampling),
            "limits": Limits.parse(run.limits),
        }
    )


def from_comparison(catalog: Catalog, log: RunLog, compare_id: str) -> CompareForm:
    """`?compare=ID`: the form that started the comparison."""
    plan = stored_experiment(log, compare_id, catalog.types)[1]
    first, suite = plan.items[0], plan.items[0].suite
    suite = suite if suite in catalog.suites else ""
    num_prompts = {"num_prompts": min(len(plan.items), 20)} if suite else {}
    configs = [c.config for c in plan.configurations]
    return CompareForm.parse(
        {
            **_setup(catalog, plan.target.name, plan.dtype, configs, first.history),
            "mode": "raw" if first.raw else "chat",
            "prompt": "" if suite else first.turns[0],
            "suite": suite,
            "compare": {"repeats": min(plan.repeats, 10), **num_prompts},
            "sampling": plan.sampling,
            "limits": plan.limits,
        }
    )


def _setup(
    catalog: Catalog,
    target: str,
    dtype: str,
    configs: Sequence[MethodConfig],
    messages: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Target, dtype, system prompt and the configurations that draft, each once."""
    target = target if target in catalog.targets else next(iter(catalog.targets))
    configurations: list[ConfigurationForm] = []
    for config in configs:
        if config.decoding_type != PLAIN:
            key = closest_method(catalog, config, target)
            form = ConfigurationForm(method=key, settings=values_of(config))
            configurations += [] if form in configurations else [form]
    if not configurations:
        (start, *_) = first_methods(catalog, catalog.method_choices(target))
        configurations = [ConfigurationForm(method=start)]
    return {
        "target": target,
        "dtype": dtype if dtype in DTYPES else "auto",
        "system": system_text(messages),
        "configurations": configurations[:MAX_CONFIGURATIONS],
    }
