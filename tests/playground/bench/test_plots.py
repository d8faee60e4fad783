"""Figures of a report: what they show is the report's own numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from playground.experiments.report.plots import PLOTS, report_figure
from playground.experiments.report.report import make_report
from playground.plots import GREY
from tests.playground.bench.requests import measured, plan_of

REQUESTS = [
    measured(),
    measured(prompt="2", group="maths"),
    measured("a", decode_s=0.2, num_steps=2, num_accepted=2, at_least=(2, 1)),
    measured("a", prompt="2", group="maths", decode_s=0.16, num_steps=1, num_accepted=3),
    measured("b", decode_s=0.8, num_steps=4, num_accepted=0),
    measured("c", decode_s=0.05),  # 8× at MAT 4: plain decoding was timed badly
]
REPORT = make_report(plan_of("plain", "a", "b", "c"), REQUESTS)


def drawn(kind: str) -> dict[str, Any]:
    figure: dict[str, Any] = json.loads(report_figure(REPORT, REQUESTS, kind).to_json())
    return {trace["name"]: trace for trace in figure["data"]}


@pytest.mark.parametrize("kind", PLOTS)
def test_every_figure_is_plain_json_also_of_nothing(kind: str) -> None:
    assert drawn(kind)
    empty = make_report(plan_of("plain", "a"), [])
    assert empty.groups == () and empty.section("a").latency is None
    assert report_figure(empty, [], kind).to_json()


def test_speedups_stand_by_kind_of_task_with_their_spread() -> None:
    bars = drawn("speedup")
    assert list(bars) == ["a", "b", "c"] and bars["a"]["x"] == ["chat", "maths", "overall"]
    assert bars["a"]["y"] == pytest.approx([2, 2.5, 0.8 / 0.36])
    assert bars["c"]["y"] == [None] * 3, "no bar without a baseline"
    assert bars["b"]["y"] == [pytest.approx(0.5), None, pytest.approx(0.5)]


@pytest.mark.parametrize("num_methods", [1, 5, 13])
def test_the_legend_has_room_of_its_own_below_the_plot(num_methods: int) -> None:
    names = [f"suffix-draft-smollm2-{n}" for n in range(num_methods)]
    report = make_report(plan_of("plain", *names), [measured(), *(measured(n) for n in names)])
    layout = report_figure(report, REQUESTS, "speedup").layout
    legend = layout.legend
    assert (legend.yref, legend.y, legend.yanchor) == ("container", 0, "bottom")
    assert layout.height - legend.maxheight == 280, "the plot is as high with any number of methods"
    assert legend.maxheight > 19 * num_methods / 3, "three names beside each other at 640 px"
    assert report_figure(report, REQUESTS, "latency").layout.height == 280, "it has no legend"


def test_positions_split_and_latency_are_the_reports() -> None:
    assert drawn("positions")["a"]["y"] == pytest.approx([200 / 3, 100 / 3])
    split = drawn("split")
    assert split["verify"]["y"] == ["plain", "a", "b", "c"]
    assert split["verify"]["x"] == pytest.approx([100, 800 / 3, 100, 400])
    boxes = drawn("latency")
    assert boxes["a"]["y"] == pytest.approx([300, 260])
    assert boxes["plain"]["marker"]["color"] == GREY != boxes["a"]["marker"]["color"]


def test_requests_are_binned_by_their_mean_context_length() -> None:
    requests = [
        measured(num_prompt_tokens=126),  # half of its answer takes it into the second bin
        measured(),
        measured("a"),
        measured("a", num_prompt_tokens=130, decode_s=0.2),
        measured("a", num_prompt_tokens=190, decode_s=0.6, num_accepted=1),
    ]
    report = make_report(plan_of("plain", "a"), requests)
    data = {kind: report_figure(report, [], kind).data for kind in ("context", "mat_by_context")}
    plain, own = data["context"]
    assert list(plain.x) == [7.5, 128.5] and list(own.x) == [7.5, 162.5]
    assert own.y == pytest.approx([10, 8 / 0.8])
    (mats,) = data["mat_by_context"]
    assert mats.name == "a" and mats.y == pytest.approx([4, 1 + 4 / 2])
