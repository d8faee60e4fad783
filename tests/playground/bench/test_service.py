"""What the Benchmark page asks: forms, jobs of the engine, reports, and a killed server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from engine.errors import ConfigError
from playground.experiments import cluster
from playground.experiments.experiment import Experiment
from playground.experiments.forms import BenchmarkForm
from playground.experiments.measurement import Progress
from playground.experiments.plan import ExperimentPlan
from playground.experiments.service import Experiments, ExperimentState
from playground.host.runner import EngineHost
from playground.web.experiment import ExperimentPage
from storage import RunLog, StorageError
from tests.playground.asks import WAIT_S, busy, until
from tests.playground.bench.requests import runs_of
from tests.storage.conftest import errors_at_once


@pytest.fixture
def service(host: EngineHost) -> Experiments:
    return Experiments(host)


def asked(settings: Any = None, **changes: Any) -> dict[str, Any]:
    """A form over the two starter prompts."""
    form = {
        "target": "tiny",
        "dtype": "float32",
        "suites": ["starter"],
        "configurations": [{"method": "scripted", "name": "scripted", "settings": settings or {}}],
        "extent": {"repeats": "1"},
        "limits": {"max_new_tokens": "8", "ignore_eos": True},
    }
    return {**form, **changes}


def plan_of(service: Experiments, form: dict[str, Any]) -> ExperimentPlan:
    return BenchmarkForm.parse(form).plan(service.catalog, service.suites)


def begin(service: Experiments, form: dict[str, Any]) -> str:
    """A benchmark that was started; its id."""
    return service.start(plan_of(service, form)).id


def finished(service: Experiments, benchmark_id: str) -> ExperimentState:
    """The benchmark, once this server is done with it."""
    until(lambda: service.look(benchmark_id).task is None)
    return service.look(benchmark_id)


def on_the_engine(log: RunLog, event: str, refuse: Callable[..., None]) -> None:
    """Call this at every such event of the database on the thread that measures."""

    def listen(*told: Any) -> None:
        if threading.current_thread().name == "engine":
            refuse(*told)

    sa.event.listen(log._database.engine, event, listen)


def test_a_report_that_cannot_be_drawn_ends_no_benchmark(
    service: Experiments, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.experiments.experiment.REPORT_INTERVAL_S", 0.0)
    refused: list[str] = []

    def refuse(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        if "FROM artifacts" in statement:
            refused.append(statement)
            raise StorageError("The run log did not answer within 10 s. Ask for less.")

    on_the_engine(log, "before_cursor_execute", refuse)
    shown = finished(service, begin(service, asked()))
    assert shown.status == "completed", shown.results.benchmark.summary
    assert shown.results.report.num_done == 4 and refused


@contextmanager
def paused_after(
    service: Experiments, host: EngineHost, num_requests: int, form: dict[str, Any]
) -> Iterator[Experiment]:
    """A benchmark that goes on from its next answer only once the block ends."""
    reached, go = threading.Event(), threading.Event()

    def pause(progress: Progress) -> None:
        if progress.last is not None and len(experiment.requests) == num_requests:
            reached.set()
            go.wait()

    with busy(host):
        experiment = service.start(plan_of(service, form))
        experiment.on_progress = pause
    assert reached.wait(WAIT_S)
    try:
        yield experiment
    finally:
        go.set()


def test_a_report_grows_and_resuming_does_exactly_what_stopping_left(
    service: Experiments, host: EngineHost, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.experiments.experiment.REPORT_INTERVAL_S", 0.0)
    with paused_after(service, host, 3, asked(extent={"repeats": "3"})) as experiment:
        key = experiment.id
        assert service.look(key).results.report.num_done == 3
        with pytest.raises(ConfigError, match="running already"):
            service.resume(key)
        service.stop(key)
    shown = finished(service, key)
    kept = {request.key: request.run_id for request in shown.results.requests}
    assert shown.status == "cancelled" and len(kept) == 4
    with pytest.raises(ConfigError, match="Another process runs"):
        service.stop(key)
    service.resume(key)
    shown = finished(service, key)
    whole = {request.key: request.run_id for request in shown.results.requests}
    assert shown.status == "completed" and kept.items() <= whole.items()
    num_completed = sum(run.status == "completed" for run in runs_of(log, key))
    assert len(whole) == shown.results.report.num_done == num_completed == 12


def test_one_that_is_stopped_in_the_queue_is_resumed_once_however_many_ask(
    service: Experiments, host: EngineHost
) -> None:
    with busy(host):
        key = begin(service, asked())
        job = service.look(key).task
        assert job is not None and job.status_text.startswith("waiting for the engine, 1 ahead · ")
        service.stop(key)
        shown = finished(service, key)
        assert shown.status == "cancelled" and shown.results.report.num_done == 0
        faults = errors_at_once(lambda _: service.resume(key))
        assert [type(fault) for fault in faults] == [ConfigError] * 7
        job = service.look(key).task
        assert job is not None and not job.cancelled()
    shown = finished(service, key)
    assert (shown.status, shown.results.report.num_done) == ("completed", 4)


def test_a_second_benchmark_waits_for_the_first(service: Experiments, host: EngineHost) -> None:
    with busy(host):
        keys = [begin(service, asked()) for _ in range(2)]
    assert [finished(service, key).status for key in keys] == ["completed"] * 2


def test_what_breaks_is_said_and_kept(service: Experiments) -> None:
    key = begin(service, asked({"fail_at": "1"}))
    shown = finished(service, key)
    assert shown.status == "failed" and "Something broke" in shown.error
    service.resume(key)
    assert finished(service, key).status == "failed", "it can be resumed, in vain"


A = {"method": "scripted", "name": "a"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target": "x"}, "target must be one of"),
    ({"suites": []}, "No suite is selected"),
    ({"suites": ["x"]}, "suites must be one of"),
    ({"configurations": []}, "configurations must have at least 1"),
    ({"configurations": [{"method": "x", "name": "y"}]}, "method must be one of"),
    ({"configurations": [{**A, "name": " "}]}, "name must have 1 to 60"),
    ({"configurations": [{**A, "name": "a\nb"}]}, "printable"),
    ({"configurations": [{**A, "settings": {"max_draft_len": "99"}}]}, "max_draft_len must be"),
    ({"configurations": [A, A]}, "Two configurations are named a"),
    ({"extent": {"repeats": "0"}}, "repeats must be"),
    ({"extent": {"colour": "0"}}, "colour is not a setting"),
    ({"limits": {"max_new_tokens": "many"}}, "max_new_tokens must be"),
    ({"sampling": {"temperature": "-1"}}, "temperature must be"),
]


def test_a_wrong_form_is_one_sentence(service: Experiments) -> None:
    for changes, words in WRONG:
        with pytest.raises(ConfigError, match=words):
            begin(service, asked(**changes))
    assert service.newest() == ()


@pytest.mark.parametrize("benchmark_id", ["nothing", "", "x" * 99, "\x00"])
def test_an_unknown_benchmark_is_one_sentence(service: Experiments, benchmark_id: str) -> None:
    for ask in (service.look, service.resume, service.stop):
        with pytest.raises(ConfigError):
            ask(benchmark_id)
    with pytest.raises(ConfigError, match="name must be one of"):
        service.file(benchmark_id, "../secrets")


def test_ray_is_refused_where_it_is_not_installed_or_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = SimpleNamespace(clusters=("local",))
    pool = lambda place, num: ExperimentPage.pool(page, place, num)  # type: ignore[arg-type] # noqa: E731
    assert pool("", None) is None
    with pytest.raises(ConfigError, match=r"Start the server with --ray ADDRESS to offer"):
        pool("ray://elsewhere:10001", None)
    with pytest.raises(ConfigError, match="Workers must be in"):
        pool("local", 0)
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '.*\[ray\]'"), cluster.connected("local"):
        pass


def test_tabs_that_poll_read_a_plan_once(
    service: Experiments, host: EngineHost, log: RunLog
) -> None:
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        statements.append(statement)

    shown = finished(service, key := begin(service, asked()))
    assert shown.status == "completed" and "error" not in shown.results.benchmark.summary
    assert shown.results.report.groups == ("chat", "code")
    assert len(service.file(key, "requests.csv").splitlines()) == 5
    fresh = Experiments(host)
    sa.event.listen(log._database.engine, "before_cursor_execute", note)
    assert errors_at_once(lambda _: [fresh.look(key) for _ in range(5)]) == []
    assert sum('"plan"' in statement for statement in statements) == 1
    assert [head.id for head in fresh.newest()] == [key]
    assert '"plan"' not in statements[-1].partition("FROM")[0]
