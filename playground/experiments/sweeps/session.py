"""Begins and goes on with sweeps, for the command line and the page alike."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from engine.errors import ConfigError
from engine.model.target import Target
from playground.experiments.bench.session import check_same_target
from playground.experiments.sweeps.plan import SweepPlan
from playground.experiments.sweeps.store import PLAN, Sweep, SweepStore
from playground.host.environment import environment

ENVIRONMENT = "environment"
"""Attribute of a sweep's study: where its first trial ran."""


def default_name(plan: SweepPlan, now: datetime) -> str:
    """`ngram-tok_s-1121-0627`."""
    kind = plan.space.base.decoding_type.lower().replace("_", "-")
    return f"{kind}-{plan.objective}-{now:%m%d-%H%M}"


def begin(store: SweepStore, plan: SweepPlan, name: str = "") -> Sweep:
    """Write a sweep down; without a name it gets one of its own.

    Raises:
        ConfigError: it cannot be run, or the name is taken.
    """
    return store.create(name or store.free_name(default_name(plan, datetime.now())), plan)


def reopen(store: SweepStore, name: str, trials: int | None = None) -> Sweep:
    """A sweep to go on with; `trials` raises how many a search measures.

    Raises:
        ConfigError: there is none of this name, it is running, or it has more trials already.
    """
    sweep = store.load(name)
    sweep.check_free()
    if trials is None:
        return sweep
    if sweep.plan.mode == "grid":
        raise ConfigError(f"Sweep {name} is a grid; it has all of its trials. Leave --trials out.")
    if trials < sweep.plan.trials:
        raise ConfigError(
            f"trials must be at least {sweep.plan.trials}, as in the sweep so far, got {trials}."
        )
    plan = dataclasses.replace(sweep.plan, trials=trials)
    plan.check()
    sweep.write(PLAN, plan.to_dict())
    return store.load(name)


def check_target(sweep: Sweep, target: Target) -> None:
    """Note where the sweep runs; refuse to go on with it on other weights or in another dtype.

    Raises:
        ConfigError: naming what differs.
    """
    stored = sweep.attributes.get(ENVIRONMENT)
    if stored is None:
        sweep.write(ENVIRONMENT, environment(target))
    else:
        check_same_target({"environment": stored}, target)
