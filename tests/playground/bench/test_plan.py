"""The order of requests, the baseline, and a plan that survives storage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.experiments.plan import BASELINE_NAME, Configuration, ExperimentPlan, Item

TARGET = TargetSpec(name="t", hub="a/b")


def configuration(name: str, **config: Any) -> Configuration:
    return Configuration(name, name, parse_method({"decoding_type": "NGram", **config}))


def plan(*names: str, items: int = 4, repeats: int = 3) -> ExperimentPlan:
    prompts = [Item("s", str(i), "c", "chat", ("one", "two")[: 1 + i % 2]) for i in range(items)]
    return make_plan("float32", [configuration(n) for n in names], prompts, repeats=repeats)


def make_plan(
    dtype: str, configurations: list[Configuration], items: list[Item], **more: Any
) -> ExperimentPlan:
    same = {"target": TARGET, "dtype": dtype, "configurations": configurations, "items": items}
    return ExperimentPlan.parse({**same, **more})


def test_every_request_comes_once_and_plain_decoding_always() -> None:
    made = plan("a", "b")
    rounds = list(made.rounds())
    assert all(len({(r.item.id, r.turn, r.repeat) for r in one}) == 1 for one in rounds)
    requests = [request for one in rounds for request in one]
    assert len(requests) == made.num_requests == len({r.key for r in requests}) == 6 * 3 * 3
    assert made.reference.is_baseline and made.reference.name == BASELINE_NAME
    names = ("suite", "prompt", "turn", "repeat", "configuration")
    for request in requests:
        assert tuple(request.labels[name] for name in names) == tuple(map(str, request.key))


def test_who_begins_rotates_over_prompts_and_repeats() -> None:
    """Each of three configurations is first, second and third equally often."""
    places = Counter(
        (request.configuration, place)
        for requests in plan("a", "b").rounds()
        for place, request in enumerate(requests)
    )
    assert set(places.values()) == {6}
    by_repeat = {r[0].repeat: r[0].configuration for r in plan("a", "b", items=1).rounds()}
    assert len(set(by_repeat.values())) == 3


def test_a_named_plain_configuration_is_the_baseline() -> None:
    plain = Configuration("bare", "Bare", parse_method({"decoding_type": "Autoregressive"}))
    made = make_plan("auto", [configuration("a"), plain], [Item("s", "1", "c", "c", ("x",))])
    assert [c.name for c in made.configurations] == ["bare", "a"]


def test_two_configurations_of_one_type_need_two_names() -> None:
    assert len(plan("a", "b").configurations) == 3
    with pytest.raises(ConfigError, match="Two configurations are named a"):
        plan("a", "a")
    with pytest.raises(ConfigError, match="named Plain decoding"):
        plan(BASELINE_NAME)


@pytest.mark.parametrize(
    ("changes", "words"), [({"items": 0}, "no prompt"), ({"repeats": 0}, "repeats must be")]
)
def test_a_plan_of_nothing_is_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan("a", **changes)


def test_a_stored_plan_is_the_same_plan() -> None:
    made = make_plan(
        "bfloat16",
        [configuration("a", max_draft_len=3)],
        [Item("s", "1", "c", "chat", ("x",), True, ({"role": "system", "content": "y"},))],
        repeats=2,
        sampling=Sampling(temperature=0.5, seed=3),
        limits=Limits(max_new_tokens=9, stop=("z",)),
    )
    assert ExperimentPlan.stored(made.to_dict()) == made
    with pytest.raises(ConfigError, match="not a benchmark's"):
        ExperimentPlan.stored({"kind": "benchmark"})
    other = made.to_dict()
    other["configurations"][1]["config"]["decoding_type"] = "Gone"
    gone = ExperimentPlan.stored(other)
    assert gone.configurations[1].decoding_type == "Gone" and gone.to_dict() == other
    with pytest.raises(ConfigError, match="There is no method 'Gone'"):
        _ = gone.runnable


def test_the_number_of_requests_is_explained_turns_and_all() -> None:
    assert plan("a", "b", items=4, repeats=2).extent == (
        "6 turns of 4 prompts × 3 configurations × 2 repeats = 36 requests"
    )
    single = plan("a", items=1, repeats=1).extent
    assert single == "1 prompt × 2 configurations × 1 repeat = 2 requests"
