"""The comparison: only what differs, and spreads as computed here."""

from __future__ import annotations

import json
import math
from statistics import mean, stdev
from typing import Any

import pytest

from engine.drafters import methods
from engine.errors import ConfigError
from playground.runs.compare import Comparison
from playground.runs.settings import Column, differences, flat, words
from storage import RunLog
from tests.playground.test_run_list import timed

NGRAM = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}


def test_runs_of_one_setup_are_its_spread(log: RunLog) -> None:
    speeds = [30.0, 34.0, 41.0]
    ids = [timed(log, s, sampling={"seed": i}, prompt_text="p") for i, s in enumerate(speeds)]
    ids.append(timed(log, 20.0, method={"decoding_type": "Autoregressive"}, prompt_text="p"))
    found = json.loads(json.dumps(Comparison(log, methods()).compare({"ids": ids})))
    ngram, plain = found["setups"]
    assert ngram["runs"] == ids[:3] and ngram["num_prompts"] == 1
    figure = ngram["figures"]["tok_s"]
    assert figure["values"] == speeds and figure["num_runs"] == 3
    assert figure["mean"] == pytest.approx(mean(speeds))
    assert figure["std"] == pytest.approx(stdev(speeds))
    assert ngram["figures"]["speedup"]["mean"] == pytest.approx(mean(speeds) / 20)
    assert plain["figures"]["tok_s"]["std"] is None and plain["figures"]["ttft_s"] == {}


def test_only_settings_that_differ_are_shown(log: RunLog) -> None:
    usual = methods()["NGram"].parse({}).model_dump(mode="json")
    ids = [
        timed(log, 1.0, method={**usual, "max_draft_len": 5}, environment={"versions": {"t": "1"}}),
        timed(log, 1.0, method={**usual, "max_draft_len": 7}, environment={"versions": {"t": "2"}}),
    ]
    found = Comparison(log, methods()).compare({"ids": ids})
    assert found["differences"] == [{"name": "method.max_draft_len", "values": ["5", "7"]}]
    assert found["surroundings"] == [{"name": "environment.versions.t", "values": ["1", "2"]}]
    assert found["lines"]["axes"] == [
        {"name": "method.max_draft_len", "values": [5, 7], "words": None}
    ]
    ids.append(timed(log, 1.0, method={"decoding_type": "Autoregressive"}))
    names = [row["name"] for row in Comparison(log, methods()).compare({"ids": ids})["differences"]]
    assert names == ["method.decoding_type", "method.max_draft_len"], (
        "what plain decoding has no such setting of is no difference while it is at its default"
    )


def test_values_that_differ_between_runs_of_one_setup_are_told() -> None:
    repeats = Column({"sampling.seed": ("0", "1"), "a": ("x",)})
    assert [row["name"] for row in differences([repeats])] == ["sampling.seed"]
    other = Column({"sampling.seed": ("1", "0"), "a": ("y",)})
    assert [row["name"] for row in differences([repeats, other])] == ["a"]
    fewer = Column({"sampling.seed": ("0",)})
    rows = {row["name"]: row["values"] for row in differences([repeats, fewer])}
    assert rows == {"sampling.seed": ["0, 1", "0"], "a": ["x", "–"]}


def test_figures_that_are_no_numbers_are_left_out(log: RunLog) -> None:
    ids = [timed(log, speed) for speed in (10.0, math.nan, math.inf)]
    (setup,) = Comparison(log).compare({"ids": ids})["setups"]
    assert setup["figures"]["tok_s"]["values"] == [10.0, None, None]
    assert setup["figures"]["tok_s"]["num_runs"] == 1


@pytest.mark.parametrize("asked", [None, {}, {"ids": "a"}, {"ids": []}, {"ids": ["nope", "no"]}])
def test_fewer_than_two_runs_are_no_comparison(log: RunLog, asked: Any) -> None:
    with pytest.raises(ConfigError):
        Comparison(log).compare(asked)


def test_too_many_runs_are_refused(log: RunLog) -> None:
    with pytest.raises(ConfigError, match="At most 200"):
        Comparison(log).compare({"ids": [f"r{i}" for i in range(201)]})


def test_settings_are_flat_and_short() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert [words(v) for v in (None, True, False, 0.1, 3, "x")] == [
        "none",
        "on",
        "off",
        "0.1",
        "3",
        "x",
    ]
    tree, other = [[0], [0, 0]], [[0], [1]]
    assert words(tree).startswith("2 paths #") and words(tree) != words(other)
    long = "x" * 300
    assert len(words(long)) < 100 and words(long) != words(long + "y")
