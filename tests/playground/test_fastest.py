"""Finding the fastest: bounded, stoppable, kept as a benchmark, honest where nothing pays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import gradio as gr
import pytest

from engine.errors import ConfigError
from playground.experiments.experiment import Experiment
from playground.experiments.fastest import Ranking, methods_to_try, plan_of
from playground.experiments.finished import FinishedRequest
from playground.experiments.job import Progress
from playground.experiments.plan import BASELINE_NAME as PLAIN
from playground.experiments.plan import ExperimentPlan, Halving
from playground.experiments.report.report import read_results
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.web.fastest import FastestPanel
from presets import MethodPreset
from storage import RunLog
from tests.playground.asks import ask
from tests.playground.compare.test_explain import plain as plain_request
from tests.playground.compare.test_explain import run as own_request
from tests.playground.tiny import ScriptedConfig


def with_methods(catalog: Catalog, **configs: ScriptedConfig) -> Catalog:
    """Only these methods, under their names, and plain decoding."""
    own = {
        name: MethodPreset(name=name, title=name, config=config) for name, config in configs.items()
    }
    return replace(catalog, presets={"plain": catalog.presets["plain"], **own})


def searched(host: EngineHost, plan: ExperimentPlan, *, budget_s: float = 60.0) -> Experiment:
    """A search that is over."""
    plan = ExperimentPlan.parse({**dict(plan), "chooser": Halving(budget_s=budget_s)})
    search = Experiments(host).start(plan, owner="tab")
    assert search.over.wait(120), search.message
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


def test_prompt_at_hand_is_tried_and_a_suite_without_one(host: EngineHost) -> None:
    plan = plan_of(host.catalog, ask(prompt="Mine.", system="Be short."))
    assert [item.turns for item in plan.items] == [("Mine.",)]
    assert plan.items[0].history == ({"role": "system", "content": "Be short."},)
    assert [c.name for c in plan.configurations] == [PLAIN, "Scripted tree"]
    assert plan.limits.max_new_tokens == 24
    plan = plan_of(host.catalog, ask(prompt="  "))
    assert {item.suite for item in plan.items} == {"starter"}
    with pytest.raises(ConfigError):
        plan_of(host.catalog, ask(method="none"))
    with pytest.raises(ConfigError, match="No method"):
        plan_of(with_methods(host.catalog), ask(method="plain"))


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
    search = searched(host, plan_of(catalog, ask(method="plain")))
    ranking = Ranking(search)
    speedups = {one.name: one.overall.speedup for one in ranking.sections}
    states = {one.name: ranking.state(one) for one in ranking.sections}
    good, slower = speedups["good"], speedups["slower"]
    assert next(iter(states)) == "good" and good is not None and good.num_repeats > 2
    assert states["slower"] == "dropped" and slower is not None and slower.num_repeats == 1
    assert states["broken"] == "failed" and states["good"] == "kept"
    assert "running" not in states.values()
    results = read_results(log, search.id)
    assert results.benchmark.name.startswith("Fastest method · Say hello")
    assert results.benchmark.status == "completed"


def test_time_ends_it_with_what_is_known(host: EngineHost) -> None:
    """Twelve answers of `a` take ten seconds."""
    catalog = with_methods(host.catalog, a=ScriptedConfig(delay_ms=100.0), b=ScriptedConfig())
    search = searched(host, plan_of(catalog, ask(method="plain")), budget_s=2.0)
    assert search.chooser.remaining_s == 0
    assert len(search.requests) < search.plan.num_requests


def told(
    host: EngineHost, *methods: str, seconds: dict[str, float], repeats: int = 2
) -> Experiment:
    """A search that was told of some answers each; seconds are those of decoding."""
    catalog = with_methods(
        host.catalog, **{m: ScriptedConfig(delay_ms=float(i)) for i, m in enumerate(methods)}
    )
    search = Experiment(host.log, plan_of(catalog, ask(method="plain")))
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


def told_ranking(host: EngineHost, *methods: str, **more: Any) -> Ranking:
    return Ranking(told(host, *methods, **more))


def test_what_is_left_answers_twice_before_time_ends_it(host: EngineHost) -> None:
    search = told(host, "a", "b", "c", seconds={"c": 0.4}, repeats=1)
    chooser = search.chooser
    assert not chooser.is_confirmed
    second = replace(search.requests[1], repeat=1)
    answer(search, second)
    assert not chooser.is_confirmed, "b has answered once"
    answer(search, replace(second, configuration="b"))
    assert chooser.is_confirmed, "c was dropped"


def test_the_leader_is_the_fastest_that_pays_however_certain_it_is(host: EngineHost) -> None:
    search = told_ranking(host, "a", "b", seconds={"a": 0.2, "b": 0.4})
    assert search.leader is None
    assert "plain decoding is the fastest here. next, a reaches 0.50×" in search.advice.lower()
    fast = {"a": 0.05, "b": 0.4}
    search = told_ranking(host, "a", "b", seconds=fast, repeats=1)
    assert search.leader is not None and search.leader.name == "a"
    assert search.report.fastest is None, "a single answer recommends nothing"
    assert search.advice.startswith("a reaches 2.00× plain decoding (1 prompt × 1 repeat). These")
    search = told_ranking(host, "a", "b", seconds=fast)
    assert search.leader is not None and search.report.fastest == "a"
    said, mat = search.advice, search.leader.overall.mat
    assert f" {mat:.2f} tokens a step" in said, "one MAT for the table and the reason"
    assert said.startswith(
        "a is the fastest: 2.00× plain decoding (exploratory 95% interval 2.00 … 2.00×, best of 2; "
        "1 prompt × 2 repeats). "
    )
    assert " Faster: " in said and "Tried on your prompt, 24 tokens each, with Tiny" in said


def test_what_is_faster_than_its_mat_is_neither_recommended_nor_dropped(host: EngineHost) -> None:
    """c comes out at 5× with 2.5 tokens a step: it is to be timed again."""
    search = told_ranking(host, "a", "b", "c", seconds={"a": 0.06, "b": 0.4, "c": 0.02})
    c = next(one for one in search.sections if one.name == "c")
    speedup = c.overall.speedup
    assert speedup is not None and speedup.doubt == "cheap step" and speedup.text == "–"
    assert search.state(c) == "running" and search.leader is not None and search.leader.name == "a"
    assert "No speedup is given for c: a step took less time" in search.advice
    alone = told_ranking(host, "c", seconds={"c": 0.02})
    assert alone.leader is None and alone.advice.startswith("No speedup is given for c")


def test_search_is_found_from_any_tab_until_it_is_closed(host: EngineHost) -> None:
    async def drawn() -> FastestPanel:  # Gradio leaves event loops unclosed unless one is running
        with gr.Blocks(analytics_enabled=False):
            panel = FastestPanel(host, Experiments(host))
            panel.button()
            panel.panel()
            panel.listen([], lambda: ask(method="plain"))
        return panel

    panel = asyncio.run(drawn())
    nothing = {panel.column: gr.skip()}
    assert panel.on_page_load() == nothing
    first = panel._start(ask(method="plain"))
    opened = panel.on_page_load()
    assert opened[panel.column].visible and opened[panel.timer].active
    panel._stop()
    assert first.over.wait(120)
    assert panel.timer not in panel.on_page_load(), (
        "a late answer stops no timer that a click started"
    )
    second = panel._start(ask(method="plain"))
    assert panel.refresh()[panel.timer].active, "a page that followed the first follows the second"
    assert panel.hide_finished() == gr.skip(), (
        "a search that goes on stays, whatever target is picked"
    )
    panel._stop()
    assert second.over.wait(120) and not panel.refresh()[panel.timer].active
    assert panel.hide_finished().visible is False, "what was found for another target goes"
    assert panel.on_page_load() == nothing
