"""The store of live runs stays within its bounds and never drops a run that goes on."""

from __future__ import annotations

from playground.host.live import LiveRun, LiveRuns


def test_oldest_finished_runs_go_first() -> None:
    store = LiveRuns(max_runs=2)
    runs = [LiveRun("tab") for _ in range(4)]
    for run in runs:
        if run is not runs[0]:
            run.end("completed")
        store.add(run)
    assert store.get(runs[0].id) is runs[0]
    assert store.get(runs[1].id) is None and store.get(runs[2].id) is None
    assert store.get(runs[3].id) is runs[3]


def test_finished_runs_go_after_their_time() -> None:
    now = [0.0]
    store = LiveRuns(ttl_s=10.0, clock=lambda: now[0])
    old, running = LiveRun("tab"), LiveRun("tab")
    old.end("completed")
    store.add(old)
    store.add(running)
    now[0] = 11.0
    store.add(LiveRun("tab"))
    assert store.get(old.id) is None
    assert store.get(running.id) is running


def test_a_run_is_found_by_its_id_in_the_log() -> None:
    store = LiveRuns()
    run = LiveRun("tab", log_id="17")
    store.add(run)
    assert store.get("17") is run
