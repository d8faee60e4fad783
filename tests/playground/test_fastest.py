"""Finding the fastest: bounded, stoppable, kept as a benchmark, honest where nothing pays."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError, PromptError
from playground.experiments.experiment import Experiment
from playground.experiments.fastest import OWNER, methods_to_try, plan_of
from playground.experiments.measurement import Progress
from playground.experiments.plan import BASELINE_NAME as PLAIN
from playground.experiments.plan import ExperimentPlan, Halving
from playground.experiments.report.report import Report, make_report, read_results
from playground.experiments.service import Experiments
from playground.experiments.statistics import FinishedRequest
from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.web.report import summary_html
from presets import MethodPreset
from storage import RunLog
from tests.playground.asks import ask
from tests.playground.compare.test_explain import plain as plain_request
from tests.playground.compare.test_explain import run as own_request
from tests.playground.tiny import ScriptedConfig
from tests.storage.conftest import timed_run


def with_methods(catalog: Catalog, **configs: ScriptedConfig) -> Catalog:
    """Only these methods, under their names, and plain decoding."""
    own = {
        name: MethodPreset(name=name, title=name, config=config) for name, config in configs.items()
    }
    return replace(catalog, presets={"plain": catalog.presets["plain"], **own})


def searched(host: EngineHost, plan: ExperimentPlan, *, budget_s: float = 60.0) -> Experiment:
    """A search that is over."""
    plan = ExperimentPlan.parse({**dict(plan), "chooser": Halving(budget_s=budget_s)})
    search = Experiments(host).start(plan, owner=OWNER)
    assert search.over.wait(120), search.status_text
    assert search.state == "completed", search.error
    return search


def test_what_fits_and_needs_no_download_is_tried() -> None:
    shipped = Catalog.shipped()
    tried = set(methods_to_try(shipped, "smollm2-135m-instruct").values())
    assert {"ngram", "suffix-draft-smollm2-135m", "eagle2-smollm2-135m"} <= tried
    assert "plain" not in tried and "medusa-vicuna-7b" not in tried
    assert "medusa-vicuna-7b" not in methods_to_try(shipped, "vicuna-7b-v1.3").values()
    assert "pard-smollm2-135m" not in tried, "untrained: to look at"
    for name, target in shipped.targets.items():
        assert target.random is None or methods_to_try(shipped, name), name


def test_the_prompt_at_hand_is_tried(host: EngineHost) -> None:
    plan = plan_of(host.catalog, host.log, ask(prompt="Mine.", system="Be short."))
    assert [item.turns for item in plan.items] == [("Mine.",)]
    assert plan.items[0].history == ({"role": "system", "content": "Be short."},)
    assert [c.name for c in plan.configurations] == [PLAIN, "Scripted tree"]
    assert plan.limits.max_new_tokens == 24
    with pytest.raises(PromptError):
        plan_of(host.catalog, host.log, ask(prompt="  "))
    with pytest.raises(ConfigError):
        plan_of(host.catalog, host.log, ask(method="none"))
    with pytest.raises(ConfigError, match="No method"):
        plan_of(with_methods(host.catalog), host.log, ask(method="plain"))


@pytest.mark.slow
def test_search_ends_with_the_fastest_and_is_a_benchmark(host: EngineHost, log: RunLog) -> None:
    catalog = with_methods(
        host.catalog,
        slow=ScriptedConfig(delay_ms=60.0),
        slower=ScriptedConfig(delay_ms=90.0),
        broken=ScriptedConfig(fail_at=0),
        good=ScriptedConfig(delay_ms=0.0),
        near=ScriptedConfig(delay_ms=30.0),
    )
    search = searched(host, plan_of(catalog, host.log, ask(method="plain")))
    results = read_results(log, search.id, types=catalog.types)
    report = results.report
    answers = {one.name: one.overall.num_requests for one in report.configurations}
    assert list(answers)[:2] == [PLAIN, "good"]
    assert answers["good"] > 2 and answers["slower"] == 1 and answers["broken"] == 0
    assert "slower" in report.dropped and "good" not in report.dropped
    assert report.recommendation
    table = summary_html(results, catalog.resolve)
    for text in (">1 answer<small>dropped<", ">0 answers<small>failed<", ">none</td>"):
        assert text in table
    assert results.benchmark.name.startswith("Fastest method · Say hello")
    assert results.benchmark.status == "completed"


def test_time_ends_it_with_what_is_known(host: EngineHost) -> None:
    """Twelve answers of `a` take ten seconds."""
    catalog = with_methods(host.catalog, a=ScriptedConfig(delay_ms=100.0), b=ScriptedConfig())
    search = searched(host, plan_of(catalog, host.log, ask(method="plain")), budget_s=2.0)
    assert search.chooser.remaining_s == 0
    assert len(search.requests) < search.plan.num_requests


def test_every_method_answers_once_however_slow_the_target(host: EngineHost) -> None:
    catalog = with_methods(
        host.catalog, **{name: ScriptedConfig(delay_ms=20.0) for name in ("a", "b", "c")}
    )
    search = searched(host, plan_of(catalog, host.log, ask(method="plain")), budget_s=0.05)
    assert {r.configuration for r in search.requests} == {PLAIN, "a", "b", "c"}


def test_answers_on_a_slow_target_have_fewer_tokens(host: EngineHost, log: RunLog) -> None:
    methods = {name: ScriptedConfig() for name in "abcde"}
    catalog = with_methods(host.catalog, **methods)
    request = ask(method="plain", limits={"max_new_tokens": "200"})

    def num_tokens(tok_s: float) -> int:
        timed_run(log, tok_s)
        return plan_of(catalog, log, request).limits.max_new_tokens

    assert plan_of(catalog, log, request).limits.max_new_tokens == 48, "of unknown speed"
    assert [num_tokens(tok_s) for tok_s in (100.0, 5.0, 0.1)] == [48, 26, 16]


def test_a_stopped_search_says_how_many_methods_were_not_tried(host: EngineHost) -> None:
    search = told(host, "a", "b", "c", "d", seconds={}, repeats=1)
    requests = [one for one in search.requests if one.configuration in (PLAIN, "a")]
    report = make_report(search.plan, requests, planned=60, faults={"b": "It broke."})
    assert report.headline.startswith("Preliminary (2 answers, 2 of 4 methods not tried): ")
    assert report.recommendation == ""


def told(
    host: EngineHost, *methods: str, seconds: dict[str, float], repeats: int = 2
) -> Experiment:
    """A search that was told of some answers each; seconds are those of decoding."""
    catalog = with_methods(
        host.catalog, **{m: ScriptedConfig(delay_ms=float(i)) for i, m in enumerate(methods)}
    )
    search = Experiment(host.log, plan_of(catalog, host.log, ask(method="plain")))
    search.begin()
    for repeat in range(repeats):
        for name in (PLAIN, *methods):
            made: Any = plain_request if name == PLAIN else own_request
            request: FinishedRequest = made(
                configuration=name, repeat=repeat, decode_s=seconds.get(name, 0.1)
            )
            if name != PLAIN:
                request = replace(request, num_accepted=request.num_accepted - 4 * repeat)
            answer(search, request)
    return search


def answer(search: Experiment, request: FinishedRequest) -> None:
    search.chooser.add(request)
    search.update(Progress(1, 9, "", None, last=request))


def told_report(host: EngineHost, *methods: str, **more: Any) -> Report:
    search = told(host, *methods, **more)
    return make_report(search.plan, search.requests)


def test_what_is_left_answers_twice_before_time_ends_it(host: EngineHost) -> None:
    search = told(host, "a", "b", "c", seconds={"c": 0.4}, repeats=1)
    chooser = search.chooser
    assert not chooser.all_answered(1)
    second = replace(search.requests[1], repeat=1)
    answer(search, second)
    assert not chooser.all_answered(1), "b has answered once"
    answer(search, replace(second, configuration="b"))
    assert chooser.all_answered(1), "c was dropped"


def test_a_method_that_fails_late_does_not_bring_back_those_that_were_dropped(
    host: EngineHost,
) -> None:
    """a is kept after the first repeat, c and d are dropped; then a fails."""
    speeds = {"a": 0.05, "b": 0.06, "c": 0.3, "d": 0.4}
    search = told(host, *speeds, seconds=speeds, repeats=1)
    assert search.chooser.running == ["a", "b"]
    search.chooser.faults["a"] = "out of memory"
    answer(search, replace(search.requests[0], repeat=1))
    answer(search, replace(search.requests[2], repeat=1))
    report = make_report(search.plan, search.requests, faults=search.chooser.faults)
    assert search.chooser.running == ["a", "b"] and sorted(report.dropped) == ["c", "d"]
    early = {"d": "it failed before it answered"}
    answered = [one for one in search.requests if one.configuration != "d"]
    report = make_report(search.plan, answered, faults=early)
    assert report.dropped == ("c", "d"), "the faster half of those that did answer is kept"


def test_the_leader_is_the_fastest_that_pays_however_certain_it_is(host: EngineHost) -> None:
    report = told_report(host, "a", "b", seconds={"a": 0.2, "b": 0.4})
    assert report.leader == PLAIN
    assert report.recommendation == "Recommended: stay with plain decoding."
    assert report.headline.startswith("Plain decoding is the fastest here. Next, a reaches 0.50×")
    fast = {"a": 0.05, "b": 0.4}
    report = told_report(host, "a", "b", seconds=fast, repeats=1)
    assert report.leader == "a" and report.fastest is None
    assert report.recommendation == "Worth a try: a."
    assert report.headline.startswith("a reaches 2.00× plain decoding (1 prompt × 1 repeat). These")
    report = told_report(host, "a", "b", seconds=fast)
    assert report.leader == report.fastest == "a"
    assert report.recommendation == "Recommended: a."
    assert report.headline.startswith(
        "a is the fastest: 2.00× plain decoding (exploratory 95% interval 2.00 … 2.00×, best of 2; "
        "1 prompt × 2 repeats). "
    )
    a = report.section("a")
    why, mat = a.why, a.overall.mat
    assert why is not None and why.because.startswith("Faster: ")
    assert f" {mat:.2f} tokens a step" in why.because, "one MAT for the table and the reason"


def test_what_is_faster_than_its_mat_is_neither_recommended_nor_dropped(host: EngineHost) -> None:
    """c comes out at 5× with 2.5 tokens a step: it is to be timed again."""
    report = told_report(host, "a", "b", "c", seconds={"a": 0.06, "b": 0.4, "c": 0.02})
    speedup = report.section("c").overall.speedup
    assert speedup is not None and speedup.doubt == "cheap step" and speedup.text == "–"
    assert "c" not in report.dropped and report.leader == "a"
    assert "No speedup is given for c: a step took less time" in report.headline
    alone = told_report(host, "c", seconds={"c": 0.02})
    assert alone.leader == PLAIN and alone.recommendation == ""
    assert alone.headline.startswith("No speedup is given for c")


def test_a_search_that_runs_says_what_it_tries_and_recommends_nothing(host: EngineHost) -> None:
    search = told(host, "a", "b", "c", seconds={"c": 0.4}, repeats=1)
    results = read_results(host.log, search.id, search.requests, host.catalog.types)
    assert results.report.headline.startswith("Preliminary (4 answers): ")
    assert results.report.recommendation == ""
    table = summary_html(results)
    assert re.search(r'data-row="c".*>1 answer<small>dropped</small>', table, re.S)
    assert "engines" not in table, "looking at engines takes time from what is timed"
