"""What the Compare page's form holds after a link: the settings of runs, or of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.compare.form import MAX_CONFIGURATIONS, CompareForm, CompareOptions
from playground.experiments.compare.report import Comparison
from playground.experiments.plan import BASELINE, stored_config
from playground.host.catalog import TYPE_PREFIX, Catalog, Method
from playground.host.controls import changed_controls, group_of
from playground.host.request import DTYPES, read_run_id
from playground.host.stream import stored_run
from storage import RunLog


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
    plan = Comparison.read(log, compare_id, catalog.types).plan
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
