"""What the Sweep page offers, and the plan from what its form sends. Trusts nothing it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.bench.plan import BASELINE
from playground.experiments.bench.suites import choose_items
from playground.experiments.sweeps.fields import knobs_of
from playground.experiments.sweeps.plan import MAX_TRIALS, OBJECTIVES, Objective, SweepPlan
from playground.experiments.sweeps.space import MAX_VARIED, Space, parse_vary
from playground.host.catalog import Catalog
from playground.host.request import DTYPES, check_form, read_count, read_dtype
from playground.web.controls import settings_from

MAX_LIMIT = 1000
MAX_VARY_CHARS = 2000
DEFAULTS: dict[str, Any] = {
    "objective": "tok_s",
    "mode": "search",
    "trials": 20,
    "prune": False,
    "suite": "quick",
    "limit": 1,
    "max_new_tokens": 64,
    "seed": 0,
}
"""What the form starts with; the command line has the same."""


def menus(catalog: Catalog) -> dict[str, Any]:
    """Everything that does not depend on target and method."""
    suites = [[suite.title, name] for name, suite in catalog.suites.items()]
    names = [name for _, name in suites]
    defaults = {**DEFAULTS, "suite": DEFAULTS["suite"] if DEFAULTS["suite"] in names else names[0]}
    return {
        "targets": [list(choice) for choice in catalog.target_choices()],
        "dtypes": list(DTYPES),
        "suites": suites,
        "objectives": [
            {"key": key, "title": title, "formula": formula}
            for key, (title, formula) in OBJECTIVES.items()
        ],
        "defaults": defaults,
    }


def method_menu(catalog: Catalog, target: object) -> list[list[str]]:
    """Methods that fit a target and have something to vary: title and key."""
    name = catalog.target(target).name
    return [
        [title, key]
        for title, key in catalog.method_choices(name)
        if catalog.method(key).config.decoding_type != BASELINE
    ]


def method_fields(catalog: Catalog, key: object) -> dict[str, Any]:
    """A method's settings as the form draws them."""
    method = catalog.method(key)
    fields = [{**asdict(k), "suggested": k.suggested} for k in knobs_of(method.config)]
    return {
        "title": method.title,
        "summary": method.summary,
        "lossless": method.config.lossless,
        "fields": fields,
    }


def plan_of_form(catalog: Catalog, sent: object) -> SweepPlan:
    """The plan that a form asks for.

    Raises:
        ConfigError: naming what is wrong.
    """
    form = check_form({"values": sent})
    method = catalog.method(form.get("method"))
    suite = form.get("suite")
    if not isinstance(suite, str) or suite not in catalog.suites:
        raise ConfigError(f"suite must be one of {', '.join(catalog.suites)}, got {suite!r:.60}.")
    limit = _count("prompts per kind of task", form.get("limit"), MAX_LIMIT)
    limits = {"max_new_tokens": form.get("max_new_tokens"), "ignore_eos": False}
    plan = SweepPlan(
        target=catalog.target(form.get("target")),
        dtype=read_dtype(form.get("dtype")),
        method=str(form.get("method")),
        title=method.title,
        space=Space(_base(method.config, form.get("settings")), [*map(parse_vary, _varied(form))]),
        objective=cast(Objective, form.get("objective")),
        mode="grid" if form.get("mode") == "grid" else "search",
        trials=_count("trials", form.get("trials"), MAX_TRIALS),
        prune=form.get("prune") is True,
        seed=read_count("seed", form.get("seed", 0), most=2**31),
        items=choose_items([catalog.suites[suite]], limit_per_category=limit),
        suite=catalog.suites[suite].title,
        repeats=1,
        sampling=Sampling(),
        limits=settings_from(Limits, limits, where="limits"),
    )
    plan.check()
    return plan


def outlook(plan: SweepPlan) -> dict[str, Any]:
    """What a plan would run, before it is started."""
    return {
        "num_points": plan.space.num_points,
        "num_trials": plan.num_trials,
        "num_pairs": plan.num_pairs,
    }


def _base(config: MethodConfig, settings: object) -> MethodConfig:
    """The method's settings with those of the form."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings must be a mapping, got {type(settings).__name__}.")
    kept = {key: value for key, value in config.model_dump().items() if key not in settings}
    return settings_from(type(config), {**kept, **settings})


def _varied(form: Mapping[str, Any]) -> list[str]:
    """Ranges as text, as on the command line."""
    vary = form.get("vary")
    if not isinstance(vary, list) or len(vary) > MAX_VARIED:
        raise ConfigError(f"vary must be a list of at most {MAX_VARIED} ranges.")
    if not vary:
        raise ConfigError("Tick at least one setting to vary.")
    for text in vary:
        if not isinstance(text, str) or len(text) > MAX_VARY_CHARS:
            raise ConfigError(f"A range must be short text, got {text!r:.60}.")
    return vary


def _count(name: str, raw: object, most: int) -> int:
    """A number from a box, which sends text."""
    if isinstance(raw, str) and raw.strip().isascii() and raw.strip().isdigit():
        raw = int(raw.strip()[:18])
    count = read_count(name, raw, most=most)
    if count < 1:
        raise ConfigError(f"{name} must be in [1, {most}], got {count}.")
    return count
