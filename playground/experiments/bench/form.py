"""What the Benchmark page offers, and the plan from what its form sends; it trusts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from engine.config import Limits, Sampling, Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.bench.groups import group_title, in_order
from playground.experiments.bench.plan import BASELINE, Configuration, Plan, make_plan
from playground.experiments.bench.suites import choose_items, items_of
from playground.host.catalog import Catalog, Method
from playground.host.request import DTYPES, check_form, read_dtype
from playground.web.controls import controls_of, settings_from
from presets import PromptSuite

MAX_CONFIGURATIONS = 12
MAX_REQUESTS = 200_000
MAX_NAME = 60
FIRST_SUITE = "quick"
FIRST_METHODS = ("ngram", "suffix")
Suites = Mapping[str, PromptSuite]


class Extent(Settings):
    """How much of the suites is run, and how often."""

    limit_per_category: int | None = Field(
        None, ge=1, le=10_000, description="most prompts of each kind of task; empty = all"
    )
    repeats: int = Field(
        2, ge=1, le=20, description="everything is run so often; more show the noise"
    )


def menus(catalog: Catalog, files: Suites) -> dict[str, Any]:
    """Everything that does not depend on target and method."""
    return {
        "targets": [list(choice) for choice in catalog.target_choices()],
        "dtypes": list(DTYPES),
        "suites": [suite_entry(key, suite) for key, suite in {**catalog.suites, **files}.items()],
        "first_suite": FIRST_SUITE if FIRST_SUITE in catalog.suites else next(iter(catalog.suites)),
        "first_methods": [name for name in FIRST_METHODS if name in catalog.presets],
        "extent": controls_of(Extent()),
        "limits": controls_of(Limits(max_new_tokens=128), skip=("stop",)),
        "sampling": controls_of(Sampling()),
    }


def suite_entry(key: str, suite: PromptSuite) -> dict[str, Any]:
    """A suite as the form lists it."""
    items = items_of(suite)
    groups = in_order({item.group for item in items})
    return {
        "key": key,
        "title": suite.title,
        "description": suite.description,
        "num_prompts": len(items),
        "groups": [[group, group_title(group)] for group in groups],
    }


def method_menu(catalog: Catalog, target: object) -> list[list[str]]:
    """Methods that fit a target, plain decoding left out: title and key."""
    name = catalog.target(target).name
    return [
        [title, key]
        for title, key in catalog.method_choices(name)
        if catalog.method(key).config.decoding_type != BASELINE
    ]


def method_fields(catalog: Catalog, key: object) -> dict[str, Any]:
    """A method's settings as the form draws them."""
    method = catalog.method(key)
    return {
        "title": method.title,
        "summary": method.summary,
        "lossless": method.config.lossless,
        "fields": controls_of(method.config),
    }


def plan_of_form(catalog: Catalog, files: Suites, sent: object) -> Plan:
    """The plan that a form asks for.

    Raises:
        ConfigError: naming what is wrong.
    """
    form = check_form({"values": sent})
    extent = settings_from(Extent, form.get("extent", {}), where="extent")
    limits = {"max_new_tokens": 128, **_mapping(form, "limits")}
    plan = make_plan(
        catalog.target(form.get("target")),
        read_dtype(form.get("dtype")),
        _configurations(catalog, form.get("configurations")),
        choose_items(
            _suites({**catalog.suites, **files}, form.get("suites")),
            categories=_texts("categories", form.get("categories", [])),
            limit_per_category=extent.limit_per_category,
        ),
        repeats=extent.repeats,
        sampling=settings_from(Sampling, form.get("sampling", {}), where="sampling"),
        limits=settings_from(Limits, limits, where="limits"),
    )
    if plan.num_requests > MAX_REQUESTS:
        raise ConfigError(
            f"A benchmark may have {MAX_REQUESTS} requests, this one has {plan.num_requests}. "
            "Limit the prompts of each kind."
        )
    return plan


def outlook(plan: Plan) -> dict[str, Any]:
    """What a plan would run, before it is started."""
    return {
        "num_prompts": len(plan.items),
        "num_configurations": len(plan.configurations),
        "num_repeats": plan.repeats,
        "num_requests": plan.num_requests,
    }


def _mapping(form: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = form.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} must be a mapping of settings, got {type(found).__name__}.")
    return dict(found)


def _texts(name: str, raw: object) -> list[str]:
    if not isinstance(raw, list) or not all(isinstance(text, str) for text in raw):
        raise ConfigError(f"{name} must be a list of names, got {raw!r:.80}.")
    return list(raw)


def _suites(known: Suites, raw: object) -> list[PromptSuite]:
    keys = list(dict.fromkeys(_texts("suites", raw)))
    for key in keys:
        if key not in known:
            raise ConfigError(f"suites must be some of {', '.join(known)}, got {key!r:.60}.")
    if not keys:
        raise ConfigError("No suite is ticked. Tick one, or add a file of prompts.")
    return [known[key] for key in keys]


def _configurations(catalog: Catalog, raw: object) -> list[Configuration]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_CONFIGURATIONS:
        raise ConfigError(
            f"A benchmark takes 1 to {MAX_CONFIGURATIONS} configurations beside plain decoding. "
            "Add a method."
        )
    return [_configuration(catalog, item) for item in raw]


def _configuration(catalog: Catalog, raw: object) -> Configuration:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"A configuration must be a mapping, got {raw!r:.80}.")
    method = catalog.method(raw.get("method"))
    name = raw.get("name")
    if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME:
        raise ConfigError(f"A configuration's name must have 1 to {MAX_NAME} characters.")
    if not name.isprintable():
        raise ConfigError("A configuration's name must be printable.")
    return Configuration(name.strip(), method.title, config_of(method, raw.get("settings", {})))


def config_of(method: Method, changed: object) -> MethodConfig:
    """The method's settings with those that the form changed."""
    if not isinstance(changed, Mapping):
        raise ConfigError(f"The settings must be a mapping, got {type(changed).__name__}.")
    if "decoding_type" in changed:
        raise ConfigError("decoding_type is set by the method picker, not by a setting.")
    kept = {k: v for k, v in method.config.model_dump().items() if k not in changed}
    return settings_from(type(method.config), {**kept, **changed})
