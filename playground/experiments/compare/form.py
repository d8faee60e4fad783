"""What a comparison is to do, read from what the Compare page holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from engine.config import Settings, setting
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, one_of
from playground.experiments.plan import (
    BASELINE,
    BASELINE_NAME,
    Configuration,
    ExperimentPlan,
)
from playground.experiments.suites import first_turns, typed_item
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import FormValues, GenerateRequest, read_request

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
