"""Find the fastest method for given prompts among all that fit the target, in about a minute.

The experiment chooses its configurations by successive halving.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.experiments.measurement import WARM_UP_TOKENS
from playground.experiments.plan import Configuration, ExperimentPlan, Halving
from playground.experiments.prompts import typed_item
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.request import read_request
from storage import PLAIN, RunLog, RunQuery

OWNER = "fastest"
"""Of searches: each needs the whole machine, so a new one ends the old."""
BUDGET_S = 60.0
"""Duration of a search."""
MIN_TOKENS, MAX_TOKENS = 16, 48
"""Longest answer on a slow and on a fast target: short ones leave time for more of them."""
MAX_REPEATS = 12


def methods_to_try(catalog: Catalog, target: str) -> dict[str, str]:
    """Presets for a target that draft, are trained and need no download: keys by title.

    On a target with random weights, untrained ones count as well.
    """
    methods: dict[str, str] = {}
    is_random = target in catalog.targets and catalog.targets[target].random is not None
    for title, key in catalog.method_choices(target):
        if key.startswith(TYPE_PREFIX) or (catalog.presets[key].untrained and not is_random):
            continue
        config = catalog.method(key).config
        if config.decoding_type == PLAIN:
            continue
        parts = (config, *config.nested().values())
        weights = filter(None, (getattr(one, "speculative_model", None) for one in parts))
        if all(map(catalog.is_local, weights)):
            methods[title if title not in methods else f"{title} ({key})"] = key
    return methods


def plan_of(catalog: Catalog, log: RunLog, raw: Mapping[str, Any]) -> ExperimentPlan:
    """The plan of a search from the Generate page's values.

    On a slow target, answers are short: the budget suffices for a warm-up and an answer each.

    Raises:
        ConfigError: a setting is wrong, or no method fits.
        PromptError: the prompt is empty.
    """
    request = read_request(catalog, raw)
    names = methods_to_try(catalog, request.target.name)
    if not names:
        raise ConfigError("No method that fits this target is on this machine.")
    methods = [Configuration(name, name, catalog.method(key).config) for name, key in names.items()]
    tok_s = newest_tok_s(log, request.target.name)
    each_s = BUDGET_S / (len(methods) + 1)  # plain decoding answers, too
    fitting = int(each_s * tok_s) - WARM_UP_TOKENS if tok_s else MAX_TOKENS
    longest = min(max(MIN_TOKENS, fitting), MAX_TOKENS, request.limits.max_new_tokens)
    return ExperimentPlan.parse(
        {
            "kind": "fastest",
            "chooser": Halving(budget_s=BUDGET_S),
            "target": request.target,
            "dtype": request.dtype,
            "configurations": methods,
            "items": [typed_item(request.mode, request.system, request.prompt)],
            "repeats": MAX_REPEATS,
            "sampling": request.sampling,
            "limits": request.limits.replace(max_new_tokens=longest),
        }
    )


def newest_tok_s(log: RunLog, target: str) -> float | None:
    """The decoding speed of a target's newest completed run."""
    query = RunQuery(target=target, status="completed", limit=1)
    return next((run.tok_s for run in log.rows(query)), None)
