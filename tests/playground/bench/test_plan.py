"""The order of requests, the baseline, and a plan that survives storage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.errors import ConfigError
from playground.experiments.plan import BASELINE_NAME, ExperimentPlan, Item
from tests.playground.bench.requests import item, plan_of, tiny_plan


def plan(num_items: int = 4) -> ExperimentPlan:
    """Plain decoding and two more on prompts of one and two turns, three times each."""
    turns = [("one", "two")[: 1 + i % 2] for i in range(num_items)]
    items = tuple(item(str(i), *texts) for i, texts in enumerate(turns))
    return tiny_plan(*plan_of("plain", "a", "b").configurations[1:], items=items, repeats=3)


def test_every_request_comes_once_and_plain_decoding_always() -> None:
    made = plan()
    rounds = list(made.rounds())
    assert all(len({(r.item.id, r.turn, r.repeat) for r in one}) == 1 for one in rounds)
    requests = [request for one in rounds for request in one]
    assert len(requests) == made.num_requests == len({r.key for r in requests}) == 6 * 3 * 3
    assert made.reference.is_baseline and made.reference.name == BASELINE_NAME
    own, plain = made.configurations[1], plan_of("bare").configurations[0]
    assert tiny_plan(own, plain).names == ["bare", "a"], "its own plain configuration comes first"


def test_who_begins_rotates_over_prompts_and_repeats() -> None:
    """Each of three configurations is first, second and third equally often."""
    places = Counter(
        (request.configuration, place)
        for requests in plan().rounds()
        for place, request in enumerate(requests)
    )
    assert set(places.values()) == {6}
    by_repeat = {r[0].repeat: r[0].configuration for r in plan(num_items=1).rounds()}
    assert len(set(by_repeat.values())) == 3


def test_a_stored_plan_is_the_same_plan() -> None:
    system = {"role": "system", "content": "y"}
    changes: dict[str, Any] = {
        "items": [Item("s", "1", "c", "chat", ("x",), True, (system,))],
        "sampling": Sampling(temperature=0.5, seed=3),
        "limits": Limits(max_new_tokens=9, stop=("z",)),
    }
    made = ExperimentPlan.parse({**dict(plan()), **changes})
    assert ExperimentPlan.stored(made.to_dict()) == made
    with pytest.raises(ConfigError, match="not a benchmark's"):
        ExperimentPlan.stored({"kind": "benchmark"})
    with pytest.raises(ConfigError, match="no prompt"):
        ExperimentPlan.parse({**dict(made), "items": ()})
    other = made.to_dict()
    other["configurations"][1]["config"]["decoding_type"] = "Gone"
    gone = ExperimentPlan.stored(other)
    assert gone.configurations[1].decoding_type == "Gone" and gone.to_dict() == other
    with pytest.raises(ConfigError, match="There is no method 'Gone'"):
        _ = gone.runnable
