"""Sweeps lie beside the run log, never among its tables, and survive the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import InMemoryStorage

from engine.drafters import methods
from engine.errors import ConfigError
from playground.experiments.sweep.run import run_sweep
from playground.experiments.sweep.store import (
    STATUS,
    SweepStore,
    close_storage,
    open_storage,
    sqlite_file,
)
from storage import RunLog, StorageError
from tests.playground.sweeps.scripted import Scripted, open_store, plan
from tests.storage.conftest import path, url

__all__ = ["path", "url"]


@pytest.fixture
def beside(url: str) -> Iterator[tuple[RunLog, SweepStore]]:
    """A run log, on PostgreSQL too where there is a server, and its sweeps."""
    log = RunLog.open(url)
    store = SweepStore.beside(log)
    yield log, store
    store.close()
    log.close()


def revision(address: sa.URL) -> str:
    """What the database's own table of versions says."""
    engine = sa.create_engine(address)
    with engine.connect() as connection:
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    return str(found)


def test_run_log_and_sweeps_keep_their_own_versions(
    beside: tuple[RunLog, SweepStore], url: str
) -> None:
    log, store = beside
    before = revision(log.url)
    store.create(plan(), "s")
    again = RunLog.open(url)
    assert revision(log.url) == before
    tables = set(sa.inspect(engine := sa.create_engine(log.url)).get_table_names())
    assert "runs" in tables and not tables & {"studies", "trials"}
    engine.dispose()
    other = SweepStore.beside(again)
    assert [head.name for head in other.heads()] == ["s"]
    other.close()
    again.close()


def test_of_several_that_claim_a_sweep_at_once_one_gets_it(
    beside: tuple[RunLog, SweepStore], url: str
) -> None:
    stores = [SweepStore.beside(beside[0]) for _ in range(4)]
    for name in ("a", "b", "c"):
        stores[0].create(plan(), name)
        ready = threading.Barrier(len(stores))

        def claim(store: SweepStore, name: str = name, ready: threading.Barrier = ready) -> bool:
            sweep = store.load(name)
            ready.wait()
            try:
                sweep.claim()
            except ConfigError as error:
                assert "is running already" in str(error)
                return False
            return True

        with ThreadPoolExecutor(len(stores)) as pool:
            assert sorted(pool.map(claim, stores)) == [False, False, False, True]
    for store in stores:
        store.close()


def test_a_stored_plan_is_the_plan(beside: tuple[RunLog, SweepStore]) -> None:
    _, store = beside
    made = plan("max_draft_len=1:16:3", "lookup=pool,transformers", objective="mat", prune=True)
    store.create(made, "s")
    read = store.load("s").plan
    assert read.to_dict() == made.to_dict()
    assert read.space.grid() == made.space.grid() and read.items == made.items


def test_trials_are_there_in_another_process_view(tmp_path: Path, filed: SweepStore) -> None:
    run_sweep(filed.create(plan(trials=3), "s"), Scripted())
    log, other = open_store(tmp_path)
    assert other.load("s").trials() == filed.load("s").trials()
    assert [head.status for head in other.heads()] == ["completed"]
    other.close()
    log.close()


def test_a_name_is_free_again_where_a_process_died_before_it_wrote_the_plan(
    beside: tuple[RunLog, SweepStore],
) -> None:
    log, store = beside
    left = open_storage(log.url)
    optuna.create_study(storage=left, study_name="s").set_user_attr(STATUS, "stopped")
    close_storage(left)
    assert store.heads() == []
    store.create(plan(), "s")
    assert [head.name for head in store.heads()] == ["s"]
    with pytest.raises(ConfigError, match="already exists"):
        store.create(plan(), "s")


def test_names_are_unique_and_found_again(store: SweepStore) -> None:
    store.create(plan(), "s")
    with pytest.raises(ConfigError, match="already exists"):
        store.create(plan(), "s")
    assert store.free_name("s") == "s-2" and store.free_name("t") == "t"
    with pytest.raises(ConfigError, match="No sweep is named 'u'. The newest: s"):
        store.load("u")
    for name in ("", " ", "x" * 81, "a\nb"):
        with pytest.raises(ConfigError, match="name must have"):
            store.create(plan(), name)


def test_forgetting_takes_all_trials_along(store: SweepStore) -> None:
    run_sweep(store.create(plan(), "s"), Scripted())
    store.delete("s")
    assert store.heads() == []
    run_sweep(store.create(plan(trials=2), "s"), Scripted())
    assert len(store.load("s").trials()) == 2


def test_a_sweep_over_a_method_that_is_gone_says_so(store: SweepStore) -> None:
    store.create(plan(), "s")
    types = {name: cls for name, cls in methods().items() if name != "NGram"}
    poorer = SweepStore(store._storage, types)
    with pytest.raises(ConfigError, match="There is no method 'NGram' here"):
        poorer.load("s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "joy"}, "objective must be one of tok_s, speedup, mat"),
        ({"mode": "random"}, "mode must be search or grid"),
        ({"trials": 0}, r"trials must be in \[1, 10000\], got 0"),
        ({"items": ()}, "no prompt"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(
    store: SweepStore, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        store.create(plan(**changes), "s")
    assert store.heads() == []


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
    place = open_storage(sa.URL.create("sqlite", database=str(folder / "runs.db")))
    SweepStore(place).create(plan(), "s")
    close_storage(place)
    assert (folder / "runs.sweeps.db").is_file()


def test_in_memory_and_unknown_databases() -> None:
    assert isinstance(open_storage(sa.make_url("sqlite://")), InMemoryStorage)
    with pytest.raises(StorageError, match="not in mysql"):
        open_storage(sa.make_url("mysql://host/db"))


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs.sweeps.db").write_text("no database at all, only words, " * 20)
    with pytest.raises(StorageError, match=r"The sweeps beside .*cannot be used"):
        open_storage(sa.URL.create("sqlite", database=str(tmp_path / "runs.db")))


def test_a_broken_database_is_one_sentence_later_too(tmp_path: Path, filed: SweepStore) -> None:
    sweep = filed.create(plan(), "s")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'runs.sweeps.sqlite3'}")
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE trials"))
    engine.dispose()
    with pytest.raises(StorageError, match="no such table: trials"):
        sweep.trials()
    with pytest.raises(StorageError, match="no such table: trials"):
        run_sweep(sweep, Scripted())
