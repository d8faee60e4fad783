"""What is PostgreSQL's alone: passwords, lost servers, limits, many writers at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery, StorageError
from storage.records import OutOfReachError
from tests.playground.asks import until
from tests.postgres import Server
from tests.storage.conftest import detail, finish, new_run, started, step


def write_many(url: str, mine: str, num_runs: int) -> None:
    """Runs of 12 steps; every process writes the same prompts and targets, in its own time."""
    with RunLog.open(url) as log:
        for number in range(num_runs):
            labels = {"writer": mine}
            new = new_run(prompt_text=f"prompt {number}", target=f"t{number % 7}", labels=labels)
            run_id = log.begin(new)
            log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.1)
            for first in range(0, 12, 4):
                steps = [step(first + i) for i in range(4)]
                log.add_steps(run_id, steps, {"num_steps": first + 4})
            finish(log, run_id, {"tok_s": 1.0}, output_ids=[5])


@pytest.fixture
def pg(postgres: Server) -> Iterator[str]:
    with postgres.database("empty_log") as url:
        yield url


@pytest.fixture
def pg_log(pg: str) -> Iterator[RunLog]:
    with RunLog.open(pg) as log:
        yield log


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hunter2@127.0.0.1:1/runs",
        "postgresql://127.0.0.1:1/runs?user=me&password=hunter2",
        "postgres://me:hunt@er2@127.0.0.1:port/runs",
        "nosuchdb://me:hunter2@host/runs",
    ],
)
def test_a_password_is_never_printed(url: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as refused:
        RunLog.open(url)
    assert "hunt" not in str(refused.value) and "er2" not in str(refused.value)


def test_the_usual_ways_to_write_the_url_open_it(pg: str) -> None:
    for scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        RunLog.open(pg.replace("postgresql+psycopg", scheme)).close()


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(OutOfReachError, match="be reached: .*refused.*Check that its server"):
        RunLog.open("postgresql://127.0.0.1:1/runs")


def test_reading_cannot_write(pg_log: RunLog) -> None:
    with pytest.raises(StorageError, match="read-only"):
        with pg_log._database.transaction(reading=True) as connection:
            connection.execute(sa.text("DELETE FROM runs"))


def test_names_of_any_length_and_with_nul_come_back(pg_log: RunLog) -> None:
    names = {"target": "x" * 900, "device": "https://" + "y" * 300, "dtype": "a\x00b \\u0041"}
    run = detail(pg_log, pg_log.begin(new_run(**names)))
    assert {name: getattr(run, name) for name in names} == names
    assert pg_log.find(RunQuery(dtype=names["dtype"])).total == 1


@pytest.mark.slow
def test_many_processes_write_one_log_while_it_is_read(pg: str, pg_log: RunLog) -> None:
    processes, num_runs, num_steps = 8, 200, 12
    imports = f"from {__name__} import write_many"
    writers = [
        started(imports, f"write_many({pg!r}, 'w{i}', {num_runs})") for i in range(processes)
    ]
    slowest = 0.0
    while any(writer.poll() is None for writer in writers):
        asked = time.monotonic()
        pg_log.experiments.page(RunQuery())
        pg_log.distinct_values("label")
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.2)
    said = [writer.communicate()[1] for writer in writers]
    assert said == [""] * processes
    rows = list(pg_log.details(pg_log.ids(RunQuery())))
    kept = sum(len(pg_log.steps(run.id)) for run in rows)
    assert len(rows) == processes * num_runs and kept == len(rows) * num_steps
    assert {run.num_steps for run in rows} == {num_steps}
    print(f"{kept} steps of {len(rows)} runs; slowest page {1000 * slowest:.0f} ms")


# ---- a server that goes away


def test_steps_wait_for_a_server_that_was_stopped(own: Server, mortal: str) -> None:
    with RunLog.open(mortal) as log, ThreadPoolExecutor(1) as thread:
        run_id = log.begin(new_run())
        log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
        log.add_steps(run_id, [step(0)])
        own.stop()
        writing = thread.submit(log.add_steps, run_id, [step(1), step(2)])
        with pytest.raises(OutOfReachError):
            log.find()
        until(lambda: log.out_of_reach)
        own.start()
        writing.result()
        assert not log.out_of_reach
        own.stop()  # between two writes: nobody notices
        own.start()
        finish(log, run_id, output_ids=[5])
        assert detail(log, run_id).status == "completed"
        assert [row.index for row in log.steps(run_id)] == [0, 1, 2]


def test_a_write_whose_answer_was_lost_is_not_repeated(pg_log: RunLog) -> None:
    run_id = pg_log.begin(new_run())

    def lose(connection: sa.Connection) -> None:
        sa.event.remove(pg_log._database.engine, "commit", lose)
        connection.connection.driver_connection.commit()  # type: ignore[union-attr]
        raise OutOfReachError("the answer is lost")

    sa.event.listen(pg_log._database.engine, "commit", lose)
    pg_log.add_steps(run_id, [step(0), step(1)], {"num_steps": 2})
    assert detail(pg_log, run_id).num_steps == len(pg_log.steps(run_id)) == 2
