"""The comparison: only what differs, and spreads as computed here."""

from __future__ import annotations

import math
from statistics import harmonic_mean

import pytest

import presets
from engine.drafters import methods
from engine.errors import ConfigError
from playground.runs.compare import compare_runs, differences
from playground.runs.settings import flatten, non_default, short
from playground.web.runs import comparison_html
from storage import RunLog
from tests.storage.conftest import detail, timed_run, weighted_std


def test_runs_of_one_configuration_are_its_spread(log: RunLog) -> None:
    speeds = [30.0, 34.0, 41.0]
    ids = [timed_run(log, s, sampling={"seed": i}, prompt_text="p") for i, s in enumerate(speeds)]
    ids.append(timed_run(log, 20.0, method={"decoding_type": "Autoregressive"}, prompt_text="p"))
    ngram, plain = compare_runs(log, ids, methods()).configurations
    assert ngram.run_ids == tuple(ids[:3]) and ngram.num_prompts == 1
    tok_s = ngram.spreads["tok_s"]
    assert tok_s is not None
    pooled = harmonic_mean(speeds)  # they have as many tokens each
    spread = weighted_std(speeds, [10 / speed for speed in speeds])
    assert tok_s.mean == pytest.approx(pooled) and tok_s.std == pytest.approx(spread)
    alone = plain.spreads["tok_s"]
    assert alone is not None and alone.std is None and plain.spreads["ttft_s"] is None


def test_only_settings_that_differ_are_shown(log: RunLog) -> None:
    usual = methods()["NGram"].parse({}).model_dump(mode="json")
    ids = []
    for length, version in ((5, "1"), (7, "2")):
        method, environment = {**usual, "max_draft_len": length}, {"versions": {"t": version}}
        ids.append(timed_run(log, 1.0, method=method, environment=environment))
    found = compare_runs(log, ids, methods())
    assert found.differences == {"method.max_draft_len": ["5", "7"]}
    assert found.machine == {"versions.t": ["1", "2"]}
    ids.append(timed_run(log, 1.0, method={"decoding_type": "Autoregressive"}))
    found = compare_runs(log, ids, methods())
    assert list(found.differences) == ["method.decoding_type", "method.max_draft_len"], (
        "what plain decoding has no such setting of is no difference while it is at its default"
    )


def test_values_that_differ_between_runs_of_one_configuration_are_told() -> None:
    repeats = {"sampling.seed": ("0", "1"), "a": ("x",)}
    assert list(differences([repeats])) == ["sampling.seed"]
    other = {"sampling.seed": ("1", "0"), "a": ("y",)}
    assert list(differences([repeats, other])) == ["a"]
    fewer = {"sampling.seed": ("0",)}
    assert differences([repeats, fewer]) == {"sampling.seed": ["0, 1", "0"], "a": ["x", "–"]}


def test_figures_that_are_no_numbers_are_left_out(log: RunLog) -> None:
    ids = [timed_run(log, speed) for speed in (10.0, math.nan, math.inf)]
    (only,) = compare_runs(log, ids, {}).configurations
    spread = only.spreads["tok_s"]
    assert spread is not None and (spread.mean, spread.std) == (10.0, None)


def test_too_few_or_too_many_runs_are_refused(log: RunLog) -> None:
    for ids, message in ((["nope", "no"], "at least two"), (["r"] * 201, "At most 200")):
        with pytest.raises(ConfigError, match=message):
            compare_runs(log, ids, {})


def test_the_table_of_a_comparison_is_text(log: RunLog) -> None:
    ids = [timed_run(log, s, method_title="<b>", prompt_text=f"<i>{s}") for s in (1.0, 2.0)]
    html = comparison_html(compare_runs(log, ids, methods()))
    assert "<i>" not in html and "&lt;b&gt;" in html and "1.3 ± 0.7" in html


def test_a_method_within_a_method_is_told_by_its_type_and_own_settings(log: RunLog) -> None:
    config = presets.methods()["suffix-draft-smollm2-135m"].config
    run = detail(log, timed_run(log, 1.0, method=config.model_dump(mode="json")))
    flat = {
        "model": "Draft_Target",
        "model.speculative_model": "draft-smollm2-135m",
        "model.max_draft_len": 5,
        "model.use_draft_probs": False,
    }
    assert config.changed_flat == flat
    told = non_default(run, methods()).split(" · ")
    assert told == [f"{name} {short(value)}" for name, value in flat.items()]


def test_settings_are_flat_and_short() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    texts = [short(v) for v in (None, True, False, 0.1, 3, "x")]
    assert texts == ["none", "on", "off", "0.1", "3", "x"]
    tree, other = [[0], [0, 0]], [[0], [1]]
    assert short(tree).startswith("2 paths #") and short(tree) != short(other)
    long = "x" * 300
    assert len(short(long)) < 100 and short(long) != short(long + "y")
