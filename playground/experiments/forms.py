"""The forms of the Benchmark, Sweep and Compare pages: plans from them, and forms from links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, field_validator

from engine.config import Limits, Sampling, Settings, setting
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, validate_choice
from playground.experiments.plan import Configuration, ExperimentPlan, SweepPlan, stored_config
from playground.experiments.prompts import choose_items, first_turns, typed_item
from playground.experiments.report.report import stored_experiment
from playground.experiments.space import MAX_VARIED, OptunaSearch, SearchSettings
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.controls import changed_controls, group_of, settings_from
from playground.host.request import (
    DTYPES,
    FormValues,
    check_size,
    config_of,
    read_dtype,
    read_request,
    read_run_id,
)
from playground.host.stream import stored_run
from presets import MethodPreset, PromptSuite
from storage import PLAIN, RunLog

MAX_REQUESTS = 200_000
MAX_PER_BENCHMARK, MAX_CONFIGURATIONS = 12, 4
"""Configurations of a benchmark and of a comparison, besides plain decoding."""
MAX_NAME = 60
MAX_LIMIT = 1000
PLACEHOLDER = "x"


def repeats_setting(default: int, *, le: int) -> Any:
    about = "runs of each prompt; more repeats narrow the interval"
    return setting(default, "Repeats", about, ge=1, le=le)


class ExperimentForm(Settings):
    """Fields of all forms; settings are raw values of their controls."""

    target: str
    dtype: str

    @classmethod
    def of(cls, sent: Mapping[str, Any]) -> Self:
        """Raises ConfigError: it is too large, or a value is missing or wrong."""
        check_size(sent)
        return cls.parse(sent)

    def shared(self, catalog: Catalog) -> dict[str, Any]:
        """The part of a plan that all forms share."""
        return {"target": catalog.target(self.target), "dtype": read_dtype(self.dtype)}


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
    repeats: int = repeats_setting(2, le=20)


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


class BenchmarkForm(ExperimentForm):
    suites: list[str]
    categories: list[str] = []
    configurations: list[ConfigurationForm] = Field(min_length=1, max_length=MAX_PER_BENCHMARK)
    extent: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling: dict[str, Any] = {}

    def plan(self, catalog: Catalog, suites: Mapping[str, PromptSuite]) -> ExperimentPlan:
        """`suites` are those on offer; raises ConfigError, naming what is wrong."""
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
                **self.shared(catalog),
                "configurations": configurations,
                "items": choose_items(
                    [suites[validate_choice("suites", key, suites)] for key in keys],
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


# ---- sweeps


class SweepForm(ExperimentForm, SearchSettings):
    """Ranges are written as on the command line."""

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
    def _not_empty(cls, vary: list[str]) -> list[str]:
        if not vary:
            raise ValueError("Tick at least one setting to vary")
        return vary

    def plan(self, catalog: Catalog) -> SweepPlan:
        """Raises ConfigError: naming what is wrong."""
        method = catalog.method(self.method)
        suite = catalog.suites[validate_choice("suite", self.suite, catalog.suites)]
        search = {name: getattr(self, name) for name in SearchSettings.model_fields}
        own = Configuration(self.method, method.title, config_of(method, self.settings))
        return SweepPlan.parse(
            {
                **self.shared(catalog),
                "chooser": OptunaSearch.parse({**search, "varied": self.vary}),
                "configurations": [own],
                "items": choose_items([suite], limit_per_category=self.limit),
                "limits": settings_from(Limits, {"max_new_tokens": self.max_new_tokens}),
            }
        )


# ---- comparisons


class CompareOptions(Settings):
    """Repeats and prompts of a comparison."""

    repeats: int = repeats_setting(3, le=10)
    num_prompts: int = setting(
        6,
        "Prompts of the suite",
        "number of prompts from a suite, taken from its categories in turn",
        ge=1,
        le=20,
    )


class CompareForm(ExperimentForm):
    """Values of the Compare page's form.

    Attributes:
        suite: empty for the typed prompt.
        slots: the picked methods with their settings forms, of which the first `count` run.
        form: has the groups sampling, limits and compare, which all configurations share.
    """

    mode: str
    system: str = ""
    prompt: str = ""
    suite: str = ""
    count: int = Field(MAX_CONFIGURATIONS, ge=1, le=MAX_CONFIGURATIONS)
    slots: list[tuple[str, dict[str, Any] | None]] = Field(
        min_length=1, max_length=MAX_CONFIGURATIONS
    )
    form: dict[str, Any] | None = None

    def plan(self, catalog: Catalog) -> ExperimentPlan:
        """The plan, checked by the same rules as a run of the Generate page.

        Raises:
            ConfigError: a setting is unknown or out of range, or there is nothing to compare.
            PromptError: the prompt is empty.
        """
        form = FormValues.of(self.form).values
        options = settings_from(CompareOptions, form.get("compare", {}), where="compare")
        methods = []
        for key, own in self.slots[: self.count]:
            method = catalog.method(key)
            changes = FormValues.of(own).values.get("method", {})
            methods.append((method.title, config_of(method, changes)))
        shared = {key: form.get(key, {}) for key in ("sampling", "limits")}
        values: dict[str, Any] = {name: getattr(self, name) for name in ("target", "dtype", "mode")}
        values |= {"system": self.system, "prompt": PLACEHOLDER if self.suite else self.prompt}
        values |= {"method": self.slots[0][0], "form": {"values": shared}}
        request = read_request(catalog, values)
        items = [typed_item(request)]
        if self.suite:
            suite = catalog.suites[validate_choice("suite", self.suite, catalog.suites)]
            items = first_turns(suite, options.num_prompts)
        return ExperimentPlan.parse(
            {
                "kind": "compare",
                "target": request.target,
                "dtype": request.dtype,
                "configurations": configurations(methods),
                "items": items,
                "repeats": options.repeats,
                "sampling": request.sampling,
                "limits": request.limits,
            }
        )


def configurations(methods: Sequence[tuple[str, MethodConfig]]) -> list[Configuration]:
    """Configurations of the methods that draft, each under a name of its own."""
    drafting = [(title, c) for title, c in methods if c.decoding_type != PLAIN]
    if not drafting:
        raise ConfigError(
            "Choose at least one method that drafts: plain decoding always runs as well."
        )
    for i, (title, config) in enumerate(drafting):
        if config in [other for _, other in drafting[:i]]:
            raise ConfigError(
                f"Two configurations of {title} are the same. Change a setting of one, or compare "
                "fewer."
            )
    names = [_full_title(title, c, [o for t, o in drafting if t == title]) for title, c in drafting]
    configurations = []
    for i, (name, (_, config)) in enumerate(zip(names, drafting, strict=True)):
        own = f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        configurations.append(Configuration(own, own, config))
    return configurations


def _full_title(title: str, config: MethodConfig, alike: Sequence[MethodConfig]) -> str:
    """The title, followed by the first setting whose value differs in all configurations of it."""
    if len(alike) == 1:
        return title
    others = [other.model_dump(mode="json") for other in alike]
    for key, value in config.model_dump(mode="json").items():
        short = isinstance(value, bool | int | float | str) and len(str(value)) <= 24
        if short and len({str(other.get(key)) for other in others}) == len(others):
            return f"{title} · {key} {value}"
    return title


# ---- the form from a link, and how it is drawn


def method_form(method: MethodPreset, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """A collapsed form of a method's settings; `values` are those that were changed."""
    note = method.description
    group = group_of("method", "Settings", method.config, is_open=False, note=note, values=values)
    return {"groups": [group], "values": {} if values is None else {"method": values}}


def run_form(
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    options: CompareOptions | None = None,
) -> dict[str, Any]:
    """The form of the settings that all configurations share."""
    parts = (
        ("compare", "Comparison", CompareOptions(), options),
        ("limits", "Limits", Limits(max_new_tokens=128), limits),
        ("sampling", "Sampling", Sampling(), sampling),
    )
    groups = [group_of(name, title, fresh) for name, title, fresh, _ in parts]
    values = {
        name: changed_controls(given, fresh) for name, _, fresh, given in parts if given is not None
    }
    return {"groups": groups, "values": values}


def first_methods(catalog: Catalog, choices: list[tuple[str, str]]) -> list[str]:
    """Start values of the pickers: one method of each kind, those made for the target first.

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
    ordered = list(kinds.values()) or [choices[0][1]]
    return (ordered * MAX_CONFIGURATIONS)[:MAX_CONFIGURATIONS]


def slot_of(catalog: Catalog, config: MethodConfig, target: str) -> tuple[str, dict[str, Any]]:
    """A picker's value and form for a configuration: the closest method offered, and changes."""
    near: list[tuple[int, str, MethodPreset]] = []
    for _, key in catalog.method_choices(target):
        method = catalog.method(key)
        if method.config.decoding_type == config.decoding_type:
            near.append((len(changed_controls(config, method.config)), key, method))
    if not near:
        raise ConfigError(f"{config.decoding_type} is not offered for the target {target}.")
    _, key, method = min(near, key=lambda item: (item[0], item[1].startswith(TYPE_PREFIX)))
    return key, method_form(method, changed_controls(config, method.config))


def from_runs(catalog: Catalog, log: RunLog, link: str) -> CompareForm:
    """`?runs=a,b`: the configurations of these runs, and the prompt of the first."""
    ids = [read_run_id(part.strip()) for part in link.split(",")[: 2 * MAX_CONFIGURATIONS]]
    runs = [stored_run(log, run_id) for run_id in ids]
    first, configs = runs[0], [stored_config(run.method, catalog.types) for run in runs]
    return CompareForm(
        **_setup(catalog, first.target, first.dtype, configs, first.messages),
        mode="chat" if first.messages else "raw",
        prompt=first.prompt_text,
        form=run_form(Sampling.parse(first.sampling), Limits.parse(first.limits)),
    )


def from_comparison(catalog: Catalog, log: RunLog, compare_id: str) -> CompareForm:
    """`?compare=ID`: the form that started the comparison."""
    plan = stored_experiment(log, compare_id, catalog.types)[1]
    first, suite = plan.items[0], plan.items[0].suite
    suite = suite if suite in catalog.suites else ""
    options = {"repeats": min(plan.repeats, 10)}
    if suite:
        options["num_prompts"] = min(len(plan.items), 20)
    configs = [c.config for c in plan.configurations]
    return CompareForm(
        **_setup(catalog, plan.target.name, plan.dtype, configs, first.history),
        mode="raw" if first.raw else "chat",
        prompt="" if suite else first.turns[0],
        suite=suite,
        form=run_form(plan.sampling, plan.limits, CompareOptions.parse(options)),
    )


def _setup(
    catalog: Catalog,
    target: str,
    dtype: str,
    configs: Sequence[MethodConfig],
    messages: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """Target, dtype, system prompt and the slots of the configurations that draft, each once."""
    target = target if target in catalog.targets else next(iter(catalog.targets))
    slots: list[tuple[str, dict[str, Any] | None]] = []
    for config in configs:
        if config.decoding_type != PLAIN:
            slot = slot_of(catalog, config, target)
            slots += [] if slot in slots else [slot]
    if not slots:
        (start, *_) = first_methods(catalog, catalog.method_choices(target))
        slots = [(start, method_form(catalog.method(start)))]
    return {
        "target": target,
        "dtype": dtype if dtype in DTYPES else "auto",
        "system": next((m["content"] for m in messages if m["role"] == "system"), ""),
        "slots": slots[:MAX_CONFIGURATIONS],
    }
