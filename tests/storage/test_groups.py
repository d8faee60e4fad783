"""Groups, facets and the totals that speedups are made of, against figures computed here."""

from __future__ import annotations

import math
from statistics import harmonic_mean, stdev

import pytest

from storage import ComparisonKey, DecodeTotals, RunLog, RunQuery
from tests.storage.conftest import begun_benchmark, detail, finish, finished_run, new_run, timed_run


def test_groups_count_and_average_what_the_filters_let_through(log: RunLog) -> None:
    speeds = [30.0, 31.5, 36.0]
    ids = [timed_run(log, speed, sampling={"temperature": 0.0, "seed": 1}) for speed in speeds]
    for speed in (math.nan, math.inf, None):
        timed_run(log, speed, sampling={"temperature": 0.0, "seed": 2})
    timed_run(log, 50.0, method={"decoding_type": "NGram", "max_draft_len": 9})
    log.set_deleted([timed_run(log, 99.0)])
    big, small = log.groups(RunQuery(), "setup_id")
    assert (big.num_runs, small.num_runs) == (6, 1), "the seed is no part of the setup"
    assert big.value == big.example.setup_id != small.value
    assert big.figures["tok_s"].mean == pytest.approx(harmonic_mean(speeds)), "as many tokens each"
    assert big.figures["tok_s"].std == pytest.approx(stdev(speeds))
    assert small.figures["tok_s"].std is None and "ttft_s" not in small.figures
    (only,) = log.groups(RunQuery(ids=tuple(ids[:2])), "setup_id")
    assert only.num_runs == 2


def test_groups_by_label_and_tag_have_the_runs_without(log: RunLog) -> None:
    finished_run(log, labels={"category": "qa"}, tags=("a", "b"))
    finished_run(log, labels={"category": "qa", "turn": "1"}, tags=("a",))
    finished_run(log)
    by_label = {group.value: group.num_runs for group in log.groups(RunQuery(), "label:category")}
    by_tag = {group.value: group.num_runs for group in log.groups(RunQuery(), "tag")}
    assert by_label == {"qa": 2, None: 1}
    assert by_tag == {"a": 2, "b": 1, None: 1}


def test_facets_are_the_different_values(log: RunLog) -> None:
    finished_run(log, target="a", method_title="B", tags=("t",), labels={"turn": "1", "suite": "s"})
    finished_run(log, target="a", method_title="A", labels={"turn": "0"})
    benchmark_id = begun_benchmark(log, "nightly")
    facets = log.facets()
    assert (facets.targets, facets.methods, facets.tags) == (("a",), ("A", "B"), ("t",))
    assert facets.labels == {"suite": ("s",), "turn": ("0", "1")}
    assert facets.benchmarks == {benchmark_id: "nightly"}


def test_totals_are_of_equal_circumstances_only(log: RunLog) -> None:
    plain = {"decoding_type": "Autoregressive"}
    for speed, num in ((20.0, 11), (30.0, 31), (math.nan, 11), (None, 11)):
        timed_run(log, speed, num=num, method=plain, prompt_text="p", dtype="float32")
    timed_run(log, 99.0, method=plain, prompt_text="other", dtype="float32")
    timed_run(log, 99.0, prompt_text="p", dtype="float32")
    failed = log.begin(new_run(method=plain, prompt_text="p", dtype="float32"))
    finish(log, failed, {"tok_s": 1.0, "decode_s": 1.0}, status="failed", error="x")
    prompt_id = detail(log, failed).prompt_id
    totals = log.plain_totals([prompt_id])
    where = ComparisonKey("tiny", prompt_id, "float32", "")
    assert totals == {where: DecodeTotals(num_tokens=40, decode_s=1.5, num_steps=0)}
    assert log.plain_totals([]) == {}
