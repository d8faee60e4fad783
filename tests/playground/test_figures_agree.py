"""One stored run, and every surface that shows its figures: all of them say the same digits."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.figures import FIGURES
from playground.experiments.report.export import requests_csv, speedup_csv
from playground.experiments.report.page import page_html
from playground.experiments.report.report import Results, make_report
from playground.experiments.statistics import FinishedRequest
from playground.host.live import LiveRuns
from playground.host.runner import EngineHost
from playground.host.stream import RunStream
from playground.runs.compare import compare_runs
from playground.runs.details import facts
from playground.runs.query import TableQuery
from playground.runs.reading import History
from playground.runs.table import RunTable
from playground.runs.transfer import Kind, export_runs
from playground.web.report import summary_html
from storage import (
    RunDetail,
    RunLog,
    RunSummary,
    StepRow,
)
from tests.commands import invoke
from tests.playground.api.test_openai import CHAT
from tests.playground.bench.requests import plan_of
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import save_tiny_llama
from tests.storage.conftest import request

PLAN = plan_of("Plain", "Scripted")
NAMES = ("mat", "tok_s", "ttft_s", "itl_ms", "draft_acceptance", "num_new_tokens", "num_steps")


class OneRun:
    """A run that a client asked for, what it was answered, and its figures worked out by hand."""

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        self.host: EngineHost = served.host
        self.log: RunLog = served.log
        with served.client() as http:
            answer = http.post("/v1/chat/completions", json=body).raise_for_status()
            self.answer: dict[str, Any] = answer.json()
            (row,) = self.log.find().rows
            live = self.host.runs.get(row.id)
            assert live is not None and live.over.wait(60)
        self.live = live
        detail = self.log.get(row.id)
        assert detail is not None and detail.status == "completed"
        self.detail: RunDetail = detail
        self.steps: tuple[StepRow, ...] = self.log.steps(row.id)
        self.expected = by_hand(self.detail, self.steps)


def by_hand(run: RunDetail, steps: tuple[StepRow, ...]) -> dict[str, Any]:
    """The definitions, over the steps as they are stored."""
    accepted, ttft_s = [len(step.accepted) for step in steps], run.ttft_s or 0.0
    drafted = sum(len(step.tokens) - 1 for step in steps)
    seconds = [s.draft_s + s.verify_s + s.accept_s + s.other_s for s in steps]
    itl_s = [t / s.num_committed for t, s in zip(seconds, steps, strict=True) if s.num_committed]
    return {
        "mat": 1 + sum(accepted) / len(steps),
        "tok_s": (len(run.output_ids) - 1) / (steps[-1].at_s - ttft_s),
        "ttft_s": ttft_s,
        "itl_ms": 1000 * sum(itl_s) / len(itl_s),
        "draft_acceptance": sum(accepted) / drafted,
        "num_new_tokens": len(run.output_ids),
        "num_steps": len(steps),
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRun]:
    with serving_tiny(tmp_path_factory.mktemp("figures")) as served:
        yield OneRun(served, CHAT)


def request_of(one: OneRun) -> FinishedRequest:
    return FinishedRequest.of(replace(one.detail, **request("Scripted")))


def named(*values: Any) -> dict[str, Any]:
    """Figures in the order of `NAMES`."""
    return dict(zip(NAMES, values, strict=True))


def picked(figures: Any) -> dict[str, Any]:
    return {name: figures[name] for name in NAMES}


def from_stream(one: OneRun) -> dict[str, Any]:
    message = RunStream([one.live]).next()
    assert message is not None
    return picked(json.loads(message["batches"])[one.live.id]["figures"])


def from_reopened_panel(one: OneRun) -> dict[str, Any]:
    return picked(History(LiveRuns(), one.log).since(one.detail.id, 0)["figures"])


def from_json_export(one: OneRun) -> dict[str, Any]:
    return picked(json.loads(exported(one, "json"))["runs"][0])


def from_csv_export(one: OneRun) -> dict[str, Any]:
    (row,) = csv.DictReader(io.StringIO(exported(one, "csv")))
    return {name: type(one.expected[name])(row[name]) for name in NAMES}


def exported(one: OneRun, kind: Kind) -> str:
    stream = io.StringIO()
    list(export_runs(one.log, [one.detail.id], stream, kind))
    return stream.getvalue()


def from_command_line(one: OneRun) -> dict[str, Any]:
    url = one.log.url.render_as_string(hide_password=False)
    return picked(json.loads(invoke("runs", "list", "--json", "--db", url).stdout)[0])


def from_compared_runs(one: OneRun) -> dict[str, Any]:
    log = SimpleNamespace(details=lambda ids: [one.detail for _ in ids])
    (configuration,) = compare_runs(log, ["1", "2"], {}).configurations  # type: ignore[arg-type]
    spreads = {name: configuration.spreads[name] for name in NAMES if name != "num_steps"}
    shown = {name: spread and spread.mean for name, spread in spreads.items()}
    return {**shown, "num_steps": one.expected["num_steps"]}


def from_report(one: OneRun) -> dict[str, Any]:
    section = make_report(PLAN, [request_of(one)]).section("Scripted")
    assert section.ttft_ms is not None
    one_row, ttft_s = section.overall, section.ttft_ms / 1000
    latency = ttft_s, section.itl_ms, section.draft_acceptance
    return named(one_row.mat, one_row.tok_s, *latency, one_row.num_new_tokens, one_row.num_steps)


def from_openai(one: OneRun) -> dict[str, Any]:
    timings, tokens = one.answer["timings"], one.answer["usage"]["completion_tokens"]
    spec = one.answer["metrics"]["speculative_decoding"]
    latency = timings["prompt_ms"] / 1000, one.expected["itl_ms"], spec["draft_acceptance_rate"]
    rates = spec["mean_acceptance_length"], timings["predicted_per_second"]
    return named(*rates, *latency, tokens, spec["num_spec_steps"])


def from_race(one: OneRun) -> dict[str, Any]:
    events = History(LiveRuns(), one.log).since(one.detail.id, 0)["events"]
    tokens, at_s = sum(len(event[1]) for event in events), [event[7] for event in events]
    raced = {"num_new_tokens": tokens, "tok_s": (tokens - 1) / (at_s[-1] - at_s[0])}
    return {**one.expected, **raced, "ttft_s": at_s[0], "num_steps": len(at_s) - 1}


SURFACES: list[Callable[[OneRun], dict[str, Any]]] = [
    *(from_stream, from_reopened_panel, from_json_export, from_csv_export, from_command_line),
    *(from_compared_runs, from_report, from_openai, from_race),
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.__name__[5:])
def test_every_surface_has_the_figures_of_the_stored_run(
    one: OneRun, surface: Callable[[OneRun], dict[str, Any]]
) -> None:
    assert one.expected["mat"] > 1.2 and one.expected["num_steps"] > 5
    for name, value in surface(one).items():
        # A unit's factor of 1,000, there and back, may move the last bit; no digit is ever shown.
        assert value == pytest.approx(one.expected[name], rel=1e-14), name


def test_all_texts_of_a_figure_are_the_same(one: OneRun) -> None:
    history = History(LiveRuns(), one.log)
    figures = history.since(one.detail.id, 0)["figures"]
    texts, num_steps = figures["texts"], one.expected["num_steps"]
    said = {name: FIGURES[name].text(one.expected[name]) for name in NAMES}
    view = RunTable(one.log).view(TableQuery(), FIGURES)
    row = dict(zip((head["key"] for head in view["heads"]), view["rows"][0]["cells"], strict=True))
    assert {name: row[name] for name in NAMES} == said, "the table of runs"
    shown = ("mat", "tok_s", "draft_acceptance")
    assert {name: texts[name] for name in shown} == {name: said[name] for name in shown}
    assert texts["ttft_s"] == f"{said['ttft_s']} ms" and texts["itl_ms"] == f"{said['itl_ms']} ms"
    assert texts["num_new_tokens"] == f"{said['num_new_tokens']} / {said['num_steps']}"
    rate = f"{said['tok_s']} tok/s · MAT {said['mat']} · "
    assert rate in texts["steps"], "the timeline"
    assert history.steps(one.detail.id, 0, num_steps - 1)["text"] == texts["steps"]
    general = dict(facts(one.detail)["run"])
    assert (general["new tokens"], general["steps"]) == (said["num_new_tokens"], said["num_steps"])
    url = one.log.url.render_as_string(hide_password=False)
    line = invoke("runs", "list", "--db", url).stdout
    assert f"{said['tok_s']} tok/s  MAT  {said['mat']}" in line


def test_reports_write_the_figures_as_the_panel_does(one: OneRun) -> None:
    texts = History(LiveRuns(), one.log).since(one.detail.id, 0)["figures"]["texts"]
    request = request_of(one)
    report = make_report(PLAN, [request])
    row: Any = SimpleNamespace(name="c")
    results = Results(row, PLAN, (request,), report, {})
    for name, html in {"page": summary_html(results), "file": page_html(results)}.items():
        for figure in ("tok_s", "mat", "ttft_s", "itl_ms", "time_split", "draft_acceptance"):
            assert f">{texts[figure].partition(';')[0]}<" in re.sub(r"\s+<", "<", html), (
                name,
                figure,
            )
    (line,) = csv.DictReader(io.StringIO(requests_csv(results)))
    *_, overall = csv.DictReader(io.StringIO(speedup_csv(results)))
    for row in (line, overall):
        assert {n: float(row[n]) for n in ("mat", "tok_s")} == {
            n: one.expected[n] for n in ("mat", "tok_s")
        }
    parts = figures_of_split(one)
    assert {name: float(line[name]) for name in parts} == pytest.approx(parts, rel=1e-12)


def figures_of_split(one: OneRun) -> dict[str, float]:
    """Seconds by part over all steps; other is what is left without roll-back."""
    names = ("draft_s", "verify_s", "accept_s", "rollback_s")
    parts = {name: sum(getattr(step, name) for step in one.steps) for name in names}
    rest_s = sum(step.other_s - step.rollback_s for step in one.steps)
    return {**parts, "other_s": rest_s}


def test_some_steps_add_up_to_what_they_brought(one: OneRun) -> None:
    some = one.steps[2:5]
    tokens, seconds = sum(s.num_committed for s in some), some[-1].at_s - one.steps[1].at_s
    text = History(LiveRuns(), one.log).steps(one.detail.id, 2, 4)["text"]
    assert text.startswith(f"3 steps: {tokens} tokens in ")
    assert f" · {FIGURES['tok_s'].text(tokens / seconds)} tok/s · MAT " in text
    assert text == History(one.host.runs, one.log).steps(one.live.id, 2, 4)["text"]
    assert History(LiveRuns(), one.log).steps(one.detail.id, 900, 950) == {"text": ""}


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "line"])
def test_the_command_prints_what_it_stores(tmp_path: Path, as_json: bool) -> None:
    asked = ["--prompt-ids", "1,2,3,1,2,3", "--method", "NGram", "--max-new-tokens", "20"]
    said, (run, _) = generated(tmp_path, *asked, *(["--json"] if as_json else []))
    if as_json:
        assert picked(json.loads(said.stdout)["metrics"]) == picked(asdict(run))
        return
    assert f" · MAT {FIGURES['mat'].text(run.mat)} · " in said.stderr
    assert f" · {FIGURES['tok_s'].text(run.tok_s)} tok/s · " in said.stderr


def generated(tmp_path: Path, *options: str) -> tuple[Any, tuple[RunSummary, dict[str, Any]]]:
    """What the command printed, and the run that it stored with the figures of its panel."""
    url, tiny = str(tmp_path / "runs.db"), str(save_tiny_llama(tmp_path / "tiny"))
    asked = ["generate", "--target", tiny, "--db", url, "--ignore-eos", "--dtype", "float32"]
    said = invoke(*asked, *options)
    with RunLog.open(url) as log:
        (run,) = log.find().rows
        return said, (run, History(LiveRuns(), log).since(run.id, 0)["figures"])


def test_what_is_accepted_beyond_the_end_is_said_wherever_it_is_counted(tmp_path: Path) -> None:
    """One step accepts 16 tokens of a text that ends after two: MAT is 17."""
    tiny = str(tmp_path / "tiny")  # as its own draft model: all is accepted
    asked = ["--prompt-ids", "1,2,3", "--method", "Draft_Target", "--max-new-tokens", "2"]
    asked += ["--set", f"speculative_model={tiny}", "--set", "max_draft_len=16"]
    said, (_, figures) = generated(tmp_path, *asked)
    told = "MAT counts 16 tokens beyond the end of the text"
    assert "2 tokens in 1 step (length)" in said.stderr and "MAT 17.00" in said.stderr
    assert told in said.stderr and figures["texts"]["time_split"].endswith(told)
    assert (figures["num_accepted"], figures["num_beyond_end"]) == (16, 16)
