"""The page's sweeps run on the real engine, beside other runs, and outlive the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import ConfigError
from playground.experiments.forms import SweepForm
from playground.experiments.measurement import Progress
from playground.experiments.service import Experiments
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.host.task import ClosingError
from storage import RunLog, RunQuery
from tests.playground.asks import busy, finished, until
from tests.playground.asks import start as generate


@pytest.fixture
def service(host: EngineHost) -> Iterator[Experiments]:
    service = Experiments(host)
    yield service
    service.close()


def asked(*vary: str, **changes: Any) -> dict[str, Any]:
    """What the page's form sends."""
    return {
        "target": "tiny",
        "dtype": "float32",
        "method": "ngram",
        "settings": {},
        "vary": list(vary or ("max_draft_len=1:2",)),
        "objective": "speedup",
        "mode": "grid",
        "trials": "4",
        "suite": "starter",
        "limit": "1",
        "max_new_tokens": "8",
        **changes,
    }


def begin(service: Experiments, form: dict[str, Any], **more: Any) -> str:
    """Start what the page's form asks for; returns its id."""
    return service.start(SweepForm.parse(form).plan(service.catalog), **more).id


def look(service: Experiments, name: str) -> dict[str, Any]:
    """What is exported of a sweep."""
    state: dict[str, Any] = json.loads(service.look(name, sweep=True).results.json_text())
    return state


def ended(service: Experiments, name: str) -> dict[str, Any]:
    """The sweep, once it runs no more."""
    until(lambda: service.job(name) is None and service.look(name, sweep=True).status != "running")
    return look(service, name)


def test_a_sweep_measures_every_point_on_the_engine_and_logs_its_runs(
    service: Experiments, log: RunLog
) -> None:
    name = begin(service, asked("max_draft_len=5:7", settings={"lookup": "transformers"}))
    state = ended(service, name)
    assert state["status"] == "completed", state["fault"]
    assert [row["outcome"] for row in state["trials"]] == ["measured"] * 3
    plain, *sections = state["report"]["configurations"]
    assert plain["reference"] and plain["overall"]["num_requests"] == 6
    for section in sections:
        assert section["verdict"]["num_identical"] == section["verdict"]["num_compared"] == 2
        assert section["overall"]["speedup"]["num_pairs"] == 2
    sweep = service.look(name, sweep=True).results
    assert sweep.config(3) == NGramConfig(max_draft_len=7, lookup="transformers")
    runs = log.find(RunQuery(limit=100)).rows
    assert len(runs) == 12, "three points, two prompts, by the method and by plain decoding"
    assert len({run.trial for run in runs}) == 3
    first = [run for run in reversed(runs) if run.trial == runs[-1].trial]
    kinds = [run.decoding_type for run in first]
    assert kinds == ["Autoregressive", "NGram", "NGram", "Autoregressive"], "in turn"
    own = [run for run in log.details([r.id for r in first]) if run.decoding_type == "NGram"]
    steps, accepted = (sum(r.metrics[n] for r in own) for n in ("num_steps", "num_accepted"))
    assert sections[0]["overall"]["mat"] == pytest.approx(1 + accepted / steps)


def test_a_page_that_polls_reads_runs_only_when_there_are_new_ones(
    service: Experiments, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = begin(service, asked())
    ended(service, name)
    read, details = list[str](), log.details
    monkeypatch.setattr(log, "details", lambda ids: details([read.append(i) or i for i in ids]))
    first = service.look(name, sweep=True)
    assert service.look(name, sweep=True).results is first.results and not read
    deleted, *kept = [request.run_id for request in first.results.requests]
    log.set_deleted([deleted])
    again = service.look(name, sweep=True)
    assert again.version != first.version
    assert [request.run_id for request in again.results.requests] == kept
    assert len(read) <= 1, "the environment's run"
    log.set_deleted([deleted], deleted=False)
    assert service.look(name, sweep=True).results.report == first.results.report
    log.benchmarks.resume(name)
    shown = service.look(name, sweep=True).results
    read.clear()
    log.set_deleted(kept)
    assert service.look(name, sweep=True).results is shown and not read, "no trial has ended"


def test_other_runs_come_in_between_trials(
    service: Experiments, host: EngineHost, log: RunLog
) -> None:
    others: list[LiveRun] = []

    def ask(progress: Progress) -> None:
        if " · 1 of 2 answered" in progress.message and not others:
            others.append(generate(host, limits={"max_new_tokens": "4"}))

    with busy(host):
        sweep = service.start(SweepForm.parse(asked()).plan(host.catalog))
        sweep.on_progress = ask
    assert ended(service, sweep.id)["status"] == "completed"
    assert finished(others[0]).state == "completed"
    runs = log.rows(RunQuery(descending=False))
    assert [run.experiment_id is None for run in runs] == [False] * 4 + [True] + [False] * 4


def test_one_sweep_runs_at_a_time_and_what_is_refused_changes_nothing(
    service: Experiments, host: EngineHost
) -> None:
    name = begin(service, asked("max_draft_len=1:4", mode="search", trials="1"))
    ended(service, name)
    assert not service.look(name, sweep=True).can_resume
    with busy(host):
        other = begin(service, asked(method="scripted"))
        with pytest.raises(ConfigError, match=r"Sweep scripted-speedup-\S+ is running"):
            begin(service, asked())
        with pytest.raises(ConfigError, match="is running"):
            service.resume(name)
        with pytest.raises(ConfigError, match="is running"):
            service.resume(other)
        service.stop(other)
        ended(service, other)
    with pytest.raises(ConfigError, match="Another process runs"):
        service.stop(other)
    assert [head.id for head in service.newest(sweeps=True)] == [other, name]


def test_a_method_that_breaks_is_told_and_the_rest_goes_on(service: Experiments) -> None:
    state = ended(service, begin(service, asked("fail_at=1,none", method="scripted")))
    assert state["status"] == "completed", state["fault"]
    failed, fine = state["trials"]
    assert (failed["outcome"], fine["outcome"]) == ("failed", "measured")
    assert "Something broke in task" in failed["reason"]


def test_a_closed_service_takes_nothing_on_and_leaves_nothing_running(
    service: Experiments, host: EngineHost
) -> None:
    name = begin(service, asked())
    ended(service, name)
    host.close()
    with pytest.raises(ClosingError):
        begin(service, asked())
    assert [head.status for head in service.newest(sweeps=True)] == ["completed"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vary": []}, "must vary 1 to 16 settings, got 0"),
    ({"vary": "max_draft_len=1:2"}, "vary must be a valid list"),
    ({"method": "plain"}, "no settings to sweep"),
    ({"suite": "/etc/passwd"}, "suite must be one of starter"),
    ({"objective": "joy"}, "objective must be"),
    ({"trials": "0"}, "trials must be greater than"),
    ({"limit": "-1"}, "limit must be"),
    ({"max_new_tokens": "0"}, "max_new_tokens must be"),
    ({"dtype": "float8"}, "dtype must be one of"),
]


def test_a_wrong_form_is_one_sentence(host: EngineHost) -> None:
    for changes, words in WRONG:
        with pytest.raises(ConfigError, match=words):
            SweepForm.parse(asked(**changes)).plan(host.catalog)
    nothings: list[Any] = [None, [], "x", 7, {"vary": {"a": {}}}]
    for sent in nothings:
        with pytest.raises(ConfigError):
            SweepForm.parse(sent).plan(host.catalog)
