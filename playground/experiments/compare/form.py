"""What the Compare page's form holds: as a plan, and again from a link to runs or a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from engine.config import Limits, Sampling, Settings, setting
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, one_of
from playground.experiments.plan import (
    BASELINE,
    BASELINE_NAME,
    Configuration,
    ExperimentPlan,
    stored_config,
)
from playground.experiments.prompts import first_turns, typed_item
from playground.experiments.report.report import stored_experiment
from playground.host.catalog import TYPE_PREFIX, Catalog, Method
from playground.host.controls import changed_controls, group_of, settings_from
from playground.host.request import (
    DTYPES,
    FormValues,
    GenerateRequest,
    read_request,
    read_run_id,
)
from playground.host.stream import stored_run
from storage import RunLog

MAX_CONFIGURATIONS = 4
"""Besides plain decoding."""
PLACEHOLDER = "x"


class CompareOptions(Settings):
    """How often and on how much a comparison runs."""

    repeats: int = setting(
        3,
        "Repeats",
        "runs of each prompt; more repeats narrow the interval",
        ge=1,
        le=10,
    )
    num_prompts: int = setting(
        6,
        "Prompts of the suite",
        "number of prompts from a suite, taken from its categories in turn",
        ge=1,
        le=20,
    )


class CompareForm(Settings):
    """What the Compare page's form holds.

    Attributes:
        suite: empty for the typed prompt.
        slots: the picked methods with their settings forms, of which the first `count` run.
        form: has the groups sampling, limits and compare, which all configurations share.
    """

    target: str
    dtype: str
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
        """What is to be run.

        Raises:
            ConfigError: a setting is unknown or out of range, or there is nothing to compare.
            PromptError: the prompt is empty or too long to look at.
        """
        form = FormValues.of(self.form).values
        options = settings_from(CompareOptions, form.get("compare", {}), where="compare")
        requests = [self._request(catalog, form, *slot) for slot in self.slots[: self.count]]
        first = requests[0]
        items = [typed_item(first)]
        if self.suite:
            suite = catalog.suites[one_of("suite", self.suite, catalog.suites)]
            items = first_turns(suite, options.num_prompts)
        return ExperimentPlan.parse(
            {
                "kind": "compare",
                "target": first.target,
                "dtype": first.dtype,
                "configurations": configurations([(r.title, r.config) for r in requests]),
                "items": items,
                "repeats": options.repeats,
                "sampling": first.sampling,
                "limits": first.limits,
            }
        )

    def _request(
        self,
        catalog: Catalog,
        shared: Mapping[str, Any],
        method: str,
        own: Mapping[str, Any] | None,
    ) -> GenerateRequest:
        """One configuration, checked by the same rules as a run of the Generate page."""
        values = {key: shared.get(key, {}) for key in ("sampling", "limits")}
        values["method"] = FormValues.of(own).values.get("method", {})
        same = {key: getattr(self, key) for key in ("target", "dtype", "mode", "system")}
        prompt = PLACEHOLDER if self.suite else self.prompt
        values_of_run = {**same, "prompt": prompt, "method": method, "form": {"values": values}}
        return read_request(catalog, values_of_run)


def configurations(given: Sequence[tuple[str, MethodConfig]]) -> list[Configuration]:
    """The configurations behind plain decoding; methods that stand twice are told apart."""
    drafting = [(title, c) for title, c in given if c.decoding_type != BASELINE]
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
    names = [_name(title, c, [o for t, o in drafting if t == title]) for title, c in drafting]
    plain = Configuration(BASELINE_NAME, BASELINE_NAME, parse_method({"decoding_type": BASELINE}))
    configurations = [plain]
    for i, (name, (_, config)) in enumerate(zip(names, drafting, strict=True)):
        own = f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        configurations.append(Configuration(own, own, config))
    return configurations


def _name(title: str, config: MethodConfig, alike: Sequence[MethodConfig]) -> str:
    """The title, with the first setting that tells the configurations of that title apart."""
    if len(alike) == 1:
        return title
    others = [other.model_dump(mode="json") for other in alike]
    for key, value in config.model_dump(mode="json").items():
        short = isinstance(value, bool | int | float | str) and len(str(value)) <= 24
        if short and len({str(other.get(key)) for other in others}) == len(others):
            return f"{title} · {key} {value}"
    return title


# ---- the form from a link, and how it is drawn


def method_form(method: Method, held: dict[str, Any] | None = None) -> dict[str, Any]:
    """A folded form of a method's settings; `held` are settings of another value."""
    note = method.summary
    group = group_of("method", "Settings", method.config, is_open=False, note=note, values=held)
    return {"groups": [group], "values": {} if held is None else {"method": held}}


def run_form(
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    options: CompareOptions | None = None,
) -> dict[str, Any]:
    """The form of everything that all configurations share."""
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
    """Where the pickers start: one method of each kind, those made for the target first.

    Of these the fastest and then the ones without weights come first, as in `Catalog.first_method`.
    """
    presets = {key: catalog.presets[key] for _, key in choices if key in catalog.presets}
    made = {key for key, preset in presets.items() if preset.target}
    fastest = {key for key, preset in presets.items() if preset.first}
    keys = [key for _, key in choices]
    kinds: dict[str, str] = {}
    for key in sorted(
        keys, key=lambda key: (key not in fastest, key not in made, catalog.is_trained(key))
    ):
        decoding_type = catalog.method(key).config.decoding_type
        if decoding_type != BASELINE:
            kinds.setdefault(decoding_type, key)
    ordered = list(kinds.values()) or [choices[0][1]]
    return (ordered * MAX_CONFIGURATIONS)[:MAX_CONFIGURATIONS]


def slot_of(catalog: Catalog, config: MethodConfig, target: str) -> tuple[str, dict[str, Any]]:
    """A configuration as the form holds it: the nearest method on offer, and what differs."""
    near: list[tuple[int, str, Method]] = []
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
    first = runs[0]
    configs = [stored_config(run.method, catalog.types) for run in runs]
    return CompareForm(
        target=_known_target(catalog, first.target),
        dtype=first.dtype if first.dtype in DTYPES else "auto",
        mode="chat" if first.messages else "raw",
        system=next((m["content"] for m in first.messages if m["role"] == "system"), ""),
        prompt=first.prompt_text,
        slots=_slots(catalog, configs, first.target),
        form=run_form(Sampling.parse(first.sampling), Limits.parse(first.limits)),
    )


def from_comparison(catalog: Catalog, log: RunLog, compare_id: str) -> CompareForm:
    """`?compare=ID`: the form as it was for that comparison."""
    plan = stored_experiment(log, compare_id, catalog.types)[1]
    first, suite = plan.items[0], plan.items[0].suite
    suite = suite if suite in catalog.suites else ""
    options = {"repeats": min(plan.repeats, 10)}
    if suite:
        options["num_prompts"] = min(len(plan.items), 20)
    system = next((m["content"] for m in first.history if m["role"] == "system"), "")
    form = run_form(plan.sampling, plan.limits, CompareOptions.parse(options))
    return CompareForm(
        target=_known_target(catalog, plan.target.name),
        dtype=plan.dtype if plan.dtype in DTYPES else "auto",
        mode="raw" if first.raw else "chat",
        system=system,
        prompt="" if suite else first.turns[0],
        suite=suite,
        slots=_slots(catalog, [c.config for c in plan.configurations], plan.target.name),
        form=form,
    )


def _known_target(catalog: Catalog, target: str) -> str:
    return target if target in catalog.targets else next(iter(catalog.targets))


def _slots(
    catalog: Catalog, configs: Sequence[MethodConfig], target: str
) -> list[tuple[str, dict[str, Any] | None]]:
    """The configurations besides plain decoding, each once."""
    target = _known_target(catalog, target)
    slots: list[tuple[str, dict[str, Any] | None]] = []
    for config in configs:
        if config.decoding_type != BASELINE:
            slot = slot_of(catalog, config, target)
            slots += [] if slot in slots else [slot]
    if not slots:
        (start, *_) = first_methods(catalog, catalog.method_choices(target))
        slots = [(start, method_form(catalog.method(start)))]
    return slots[:MAX_CONFIGURATIONS]
