"""Sweeps are rows of the run log, their trials lie beside it; both survive the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.storages import InMemoryStorage

from engine.drafters import methods
from engine.errors import ConfigError
from playground.experiments.report.report import stored_experiment
from playground.experiments.sweep.store import SweepStore, open_storage, sqlite_file
from storage import RunLog, StorageError
from tests.playground.sweeps.scripted import (
    open_store,
    plan,
    state_of,
    swept,
)
from tests.playground.sweeps.test_killed import FORKS, WAIT_S
from tests.storage.conftest import path, url

__all__ = ["path", "url"]
NUM_PROCESSES, NUM_FILES = 3, 8


def revision(address: sa.URL) -> str:
    """What the database's own table of versions says."""
    engine = sa.create_engine(address)
    with engine.connect() as connection:
        version = connection.execute(
            sa.text("SELECT version_num FROM alembic_version")
        ).scalar_one()
    engine.dispose()
    return str(version)


def test_run_log_and_trials_keep_their_own_versions(url: str) -> None:
    with RunLog.open(url) as log:
        before = revision(log.url)
        store = SweepStore(log)
        swept(store, trials=2, name="s")
        store.close()
        assert revision(log.url) == before
        tables = set(sa.inspect(engine := sa.create_engine(log.url)).get_table_names())
        assert "runs" in tables and not tables & {"studies", "trials"}
        engine.dispose()
    with RunLog.open(url) as again:
        store = SweepStore(again)
        assert [head.name for head in store.heads()] == ["s"]
        assert len(store.load("s").trials()) == 2
        store.close()


def test_sweeps_are_no_benchmarks(store: SweepStore) -> None:
    sweep_id, log = swept(store, trials=1, name="s").row.id, store.log
    with pytest.raises(ConfigError, match="No experiment"):
        stored_experiment(log, sweep_id)
    benchmark_id = log.benchmarks.begin("b", {"kind": "benchmark", "text": '"kind":"sweep"'})
    assert [head.id for head in log.benchmarks.list()] == [benchmark_id]
    assert list(log.facets().benchmarks) == [benchmark_id]
    assert [head.name for head in store.heads()] == ["s"]
    with pytest.raises(ConfigError, match="No sweep is named"):
        store.load(benchmark_id)


def test_sweeps_are_found_by_id_and_the_newest_by_its_name(store: SweepStore) -> None:
    sweep = swept(store, trials=1, name="s")
    assert store.load("s").row.id == store.load(sweep.row.id).row.id == sweep.row.id
    newer = swept(store, trials=1, name="s").row.id
    assert newer != sweep.row.id and store.load("s").row.id == newer
    with pytest.raises(ConfigError, match="No sweep is named 'u'. The newest: s"):
        store.load("u")
    for name in (" ", "x" * 81, "a\nb"):
        with pytest.raises(ConfigError, match="name must have"):
            swept(store, name=name)


def test_forgetting_takes_all_trials_along(store: SweepStore) -> None:
    swept(store, name="s")
    store.delete("s")
    assert store.heads() == ()
    assert len(swept(store, trials=2, name="s").trials()) == 2


def test_a_sweep_over_a_method_that_is_gone_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        swept(store, trials=1, name="s")
        types = {name: cls for name, cls in methods().items() if name != "NGram"}
        poorer = SweepStore(store.log, types)
        with pytest.raises(ConfigError, match="There is no method 'NGram' here"):
            state_of(poorer.load("s"))
        poorer.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "joy"}, "objective must be 'tok_s', 'speedup' or 'mat', got 'joy'"),
        ({"mode": "random"}, "mode must be 'search' or 'grid'"),
        ({"trials": 0}, "trials must be greater than or equal to 1, got 0"),
        ({"items": ()}, "no prompt"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**changes)


# ---- the place


@pytest.mark.parametrize(
    ("log", "sweeps"),
    [
        ("runs.sqlite3", "runs.sweeps.sqlite3"),
        ("a.b.db", "a.b.sweeps.db"),
        ("x", "x.sweeps.sqlite3"),
    ],
)
def test_the_file_is_named_after_the_log(log: str, sweeps: str) -> None:
    assert sqlite_file(Path("/d") / log) == Path("/d") / sweeps


def test_odd_paths_work(tmp_path: Path) -> None:
    folder = tmp_path / "100% {odd} 'name'"
    folder.mkdir()
    with open_store(folder) as store:
        swept(store, trials=1)
    assert (folder / "runs.sweeps.sqlite3").is_file()


def test_in_memory_and_unknown_databases() -> None:
    assert isinstance(open_storage(sa.make_url("sqlite://")), InMemoryStorage)
    with pytest.raises(StorageError, match="not in mysql"):
        open_storage(sa.make_url("mysql://host/db"))


def test_a_broken_database_is_one_sentence(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        sweep = swept(store, trials=1)
        engine = sa.create_engine(f"sqlite:///{tmp_path / 'runs.sweeps.sqlite3'}")
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE trials"))
        engine.dispose()
        with pytest.raises(StorageError, match="no such table: trials"):
            sweep.trials()
        with pytest.raises(StorageError, match="no such table: trials"):
            swept(store)
    (tmp_path / "runs.sweeps.db").write_text("no database at all, only words, " * 20)
    with pytest.raises(StorageError, match=r"The sweeps beside .*cannot be used"):
        open_storage(sa.URL.create("sqlite", database=str(tmp_path / "runs.db")))


def open_all(folder: Path, gate: Any) -> None:
    """What each process does: open every file at the moment at which the others do."""
    for number in range(NUM_FILES):
        gate.wait(WAIT_S)
        open_storage(sa.make_url(f"sqlite:///{folder / f'{number}.sqlite3'}")).remove_session()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    gate = FORKS.Barrier(NUM_PROCESSES)
    processes = [
        FORKS.Process(target=open_all, args=(tmp_path, gate), daemon=True)
        for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
