"""No surface gives a speedup that a steady clock cannot show, and all ask one function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters import methods
from engine.metrics import EQUAL_MARGIN
from playground.experiments.plan import BASELINE_NAME, METHOD
from playground.experiments.report.report import make_report
from playground.experiments.statistics import Pair, Totals
from playground.experiments.sweep.trials import Trial, with_figures
from playground.export import offered_runs
from playground.host.plain import PlainStep
from playground.host.result import compare_with_plain
from playground.host.speedup import Doubt, doubt_of
from playground.runs.query import TableQuery
from playground.runs.table import RunTable
from storage import RunLog
from tests.playground.bench.requests import measured, plan_of
from tests.playground.sweeps.scripted import plan as sweep_plan
from tests.playground.test_menu import experiment, label_of
from tests.playground.test_run_list import SURE
from tests.storage.conftest import finish, timed_run

seconds = st.floats(1e-3, 10.0)
SWEEP = sweep_plan()


@st.composite
def timed_pairs(draw: st.DrawFn) -> list[Pair]:
    """Answers of one text by both sides, on a machine that is as fast as it likes at any time."""
    pairs = []
    for prompt in range(draw(st.integers(1, 4))):
        steps, accepted = draw(st.integers(1, 12)), draw(st.integers(0, 6))
        tokens = draw(st.integers(1, steps + accepted))
        at: dict[str, Any] = {"prompt": str(prompt), "num_new_tokens": tokens + 1}
        own = measured(
            "x",
            num_steps=steps,
            num_accepted=accepted,
            decode_s=draw(seconds),
            split_s=(draw(seconds), draw(seconds), 0.0, 0.0, 0.0),
            **at,
        )
        split_s = (0.0, draw(seconds), 0.0, 0.0, 0.0)
        plain = measured(num_steps=tokens, decode_s=draw(seconds), split_s=split_s, **at)
        pairs.append((own, plain))
    return pairs


def of_report(pairs: list[Pair]) -> Iterator[float | None]:
    report = make_report(plan_of("plain", "x"), [one for pair in pairs for one in pair])
    section = report.section("x")
    for cell in (section.overall, *section.groups.values()):
        yield cell.speedup.ratio if cell.speedup else None
    if section.why:
        yield from (section.why.measured, section.why.formula)


def of_sweep(pairs: list[Pair]) -> Iterator[float | None]:
    requests = [
        replace(one, configuration=name)
        for pair in pairs
        for one, name in zip(pair, (METHOD, BASELINE_NAME), strict=True)
    ]
    trial = with_figures(Trial(1, {"max_draft_len": 4}, "measured"), SWEEP, requests)
    assert trial.section is not None
    yield from (trial.value("speedup"), trial.told("speedup"))


def of_generate(pairs: list[Pair]) -> Iterator[float | None]:
    own, plain = (Totals.of(side) for side in zip(*pairs, strict=True))
    metrics = {
        "num_steps": own.num_steps,
        "num_new_tokens": own.num_committed + 1,
        "tok_s": own.tok_s,
        "time_split": dict.fromkeys(("draft_s", "verify_s", "accept_s", "other_s"), 0.0),
    }
    compared = compare_with_plain(
        metrics, PlainStep(1 / (plain.tok_s or 1.0), 0.0, "around", drift=1.0)
    )
    yield compared.speedup if compared else None


@pytest.mark.parametrize("surface", [of_report, of_sweep, of_generate])
@given(pairs=timed_pairs())
def test_no_speedup_above_mat_is_given(
    surface: Callable[[list[Pair]], Iterator[float | None]], pairs: list[Pair]
) -> None:
    mat = Totals.of([own for own, _ in pairs]).mat
    assert mat is not None
    for speedup in surface(pairs):
        assert speedup is None or speedup <= mat * (1 + EQUAL_MARGIN) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("steps_s", "evidence", "doubt"),
    [
        ((0.010, 0.010), {}, None),
        ((None, 0.010), {}, None),
        ((0.0096, 0.010), {}, "cheap step"),
        ((0.0096, 0.010), {"drift": None, "noise": 2.0}, "cheap step"),
        ((0.02, 0.010), {"drift": None}, "apart"),
        ((0.02, 0.010), {"drift": 1.2}, "drift"),
        ((0.02, 0.010), {"drift": 0.8}, "drift"),
        ((0.02, 0.010), {"noise": 1.6}, "noise"),
        ((0.02, 0.010), {"drift": 1.1, "noise": 1.4}, None),
    ],
)
def test_each_reason_is_told_from_the_others(
    steps_s: tuple[float | None, float], evidence: dict[str, Any], doubt: Doubt | None
) -> None:
    assert doubt_of(*steps_s, **evidence) == doubt


def test_menus_and_the_table_of_runs_give_the_number_where_it_is_trusted(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(log, timed_run(log, 200.0, num=8), SURE)
    experiment(log, 12.5)

    def shown() -> list[str]:
        table = RunTable(log, methods())
        views = [table.view(TableQuery.parse({"group": group})) for group in (None, "run")]
        return [label_of(log), str(offered_runs(log)), *map(str, views)]

    *of_experiment, of_runs = shown()
    assert ["1.25×" in text for text in of_experiment] == [True] * 3 and "2.10×" in of_runs
    for module in list(sys.modules.values()):
        if getattr(module, "doubt_of", None) is doubt_of:
            monkeypatch.setattr(module, "doubt_of", lambda *_, **__: "drift")
    assert ["×" in text for text in shown()] == [False] * 4, "wherever they call it from"
