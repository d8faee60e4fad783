"""Sweeps are rows of the run log, their trials its artifacts; both survive the process."""

from __future__ import annotations

import pytest

from engine.drafters import methods
from engine.errors import ConfigError
from playground.experiments.report.report import stored_experiment
from playground.experiments.sweep.report import SweepStore
from tests.playground.sweeps.scripted import swept
from tests.storage.conftest import begun_benchmark


def test_sweeps_are_no_benchmarks(store: SweepStore) -> None:
    sweep_id, log = swept(store, trials=1, name="s").row.id, store.log
    with pytest.raises(ConfigError, match="No experiment"):
        stored_experiment(log, sweep_id)
    benchmark_id = begun_benchmark(log, "b", {"kind": "benchmark", "text": '"kind":"sweep"'})
    assert [head.id for head in log.benchmarks.list()] == [benchmark_id]
    assert list(log.facets().benchmarks) == [benchmark_id]
    assert [head.name for head in store.log.benchmarks.list(9, sweeps=True)] == ["s"]
    with pytest.raises(ConfigError, match="No sweep is named"):
        store.load(benchmark_id)


def test_sweeps_are_found_by_id_or_name_and_deleted_with_their_trials(store: SweepStore) -> None:
    sweep = swept(store, trials=1, name="s")
    assert store.load("s").row.id == store.load(sweep.row.id).row.id == sweep.row.id
    newer = swept(store, trials=1, name="s").row.id
    assert newer != sweep.row.id and store.load("s").row.id == newer
    with pytest.raises(ConfigError, match="No sweep is named 'u'. The newest: s"):
        store.load("u")
    for name in (" ", "x" * 81, "a\nb"):
        with pytest.raises(ConfigError, match="name must have"):
            swept(store, name=name)
    store.delete("s")
    assert store.load("s").row.id == sweep.row.id and store.trials(newer) == ()


def test_a_sweep_over_a_method_that_is_gone_says_so(store: SweepStore) -> None:
    swept(store, trials=1, name="s")
    types = {name: cls for name, cls in methods().items() if name != "NGram"}
    with pytest.raises(ConfigError, match="There is no method 'NGram' here"):
        SweepStore(store.log, types).load("s").to_dict()
