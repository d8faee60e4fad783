"""The host: one engine for all tabs, stops at once, keeps every run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from playground.host.live import LiveRun
from playground.host.recording import decode_and_record
from playground.host.request import read_request
from playground.host.runner import MAX_WAITING, ClosingError, EngineHost, QueueFullError
from playground.host.stream import History
from storage import RunLog
from tests.playground.asks import ask, busy, finished, start
from tests.storage.conftest import detail

SLOW = {"delay_ms": "20"}


def test_a_run_is_in_the_log_with_every_step(host: EngineHost, log: RunLog) -> None:
    run = finished(start(host))
    assert run.state == "completed", run.error
    stored = detail(log, run.log_id)
    assert run.finish is not None and stored.text == run.finish.text
    assert stored.status == "completed"
    assert list(log.steps(stored.id)) == run.rows.read(0)


@pytest.mark.usefixtures("auto_drafting")
def test_what_the_controller_decides_is_in_the_log(host: EngineHost, log: RunLog) -> None:
    request = replace(read_request(host.catalog, ask()), config=NGramConfig(max_draft_len=4))
    run = finished(host.generate(request, owner="tab"))
    stored = detail(log, run.log_id)
    assert run.state == "completed" and stored.method["drafting"] == "auto"
    assert all(row.decision for row in run.rows.read(0) or ())
    assert stored.metrics["expected_tok_s"] > 0


def test_stop_ends_within_a_step_and_the_run_is_kept(host: EngineHost, log: RunLog) -> None:
    run = start(host, settings={"delay_ms": "100"}, limits={"max_new_tokens": "400"})
    while len(run.rows) < 2:
        time.sleep(0.01)
    host.cancel_owner("tab")
    asked = len(run.rows)
    finished(run)
    assert run.state == "cancelled"
    assert len(run.rows) <= asked + 2
    assert detail(log, run.log_id).status == "cancelled"
    assert len(log.steps(run.log_id or "")) == len(run.rows)


def test_two_tabs_take_turns_in_order(host: EngineHost) -> None:
    first = start(host, owner="one", settings=SLOW)
    second = start(host, owner="two", settings=SLOW)
    third = start(host, owner="three", settings=SLOW)
    while first.state != "running":
        time.sleep(0.005)
    assert (host.ahead_of(second), host.ahead_of(third)) == (1, 2)
    assert second.first is None
    for run in (first, second, third):
        assert finished(run).state == "completed"
    assert first.finish == second.finish == third.finish


def test_stop_ends_a_waiting_run_at_once_and_nobody_waits_for_it(host: EngineHost) -> None:
    with busy(host):
        stopped, behind = start(host, owner="one"), start(host, owner="two")
        assert host.ahead_of(behind) == 2
        host.cancel_owner("one")
        assert stopped.over.is_set() and stopped.state == "cancelled"
        assert (host.ahead_of(behind), host.occupancy) == (1, (1, 1))
    assert finished(behind).state == "completed"
    assert stopped.first is None and stopped.log_id is None and stopped.state == "cancelled"


def test_a_run_that_is_refused_cancels_nothing(host: EngineHost) -> None:
    running = start(host, owner="tab", settings=SLOW, limits={"max_new_tokens": "400"})
    while running.first is None:
        time.sleep(0.005)
    waiting = [start(host, owner=f"tab {number}") for number in range(MAX_WAITING)]
    with pytest.raises(QueueFullError, match="waiting"):
        start(host, owner="tab")
    assert not running.cancel_requested.is_set()
    for run in waiting:
        run.cancel()
    again = start(host, owner="tab")
    assert finished(running).state == "cancelled" and finished(again).state == "completed"


def test_a_run_takes_the_place_of_its_owners_waiting_one_in_a_full_queue(host: EngineHost) -> None:
    with busy(host, full=True):
        before = host.runs.owned_by("busy 3")
        run = start(host, owner="busy 3")
        assert before[0].over.is_set() and host.ahead_of(run) == MAX_WAITING
    assert finished(run).state == "completed"


def test_a_bug_in_the_loop_keeps_the_run_as_failed(
    host: EngineHost, log: RunLog, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished(start(host, settings={"fail_at": "3"}))
    assert run.state == "failed"
    assert run.error is not None and run.id in run.error and "scripted" not in run.error
    assert "scripted failure" in caplog.text
    assert len(run.rows) == 3
    assert detail(log, run.log_id).status == "failed"
    assert len(log.steps(run.log_id or "")) == 3
    assert finished(start(host)).state == "completed"


def test_a_long_prompt_tells_the_tokens_read(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = set[tuple[str, float | None]]()

    def watched(*args: Any, run: LiveRun, prefilled: Any, **more: Any) -> None:
        def reading(num_tokens: int) -> None:
            prefilled(num_tokens)
            told.add((run.activity, run.progress))

        reading(25)
        decode_and_record(*args, run=run, prefilled=reading, **more)

    monkeypatch.setattr("playground.host.runner.decode_and_record", watched)
    assert finished(start(host, mode="raw", prompt="x" * 100)).state == "completed"
    assert told >= {(f"reading the prompt: {n} of 100 tokens", n / 100) for n in (25, 100)}


def test_prompt_longer_than_the_context_is_a_sentence_and_in_the_log(
    host: EngineHost, log: RunLog
) -> None:
    run = finished(start(host, prompt="word " * 400))
    assert run.state == "failed"
    assert run.error is not None and "context" in run.error
    stored = detail(log, run.log_id)
    assert (stored.status, stored.error) == ("failed", run.error)


def test_a_broken_log_ends_the_run_with_a_sentence(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(host.log, "add_steps", refuse)
    run = finished(start(host, limits={"max_new_tokens": "400"}))
    assert run.state == "failed" and run.error is not None and "broke" in run.error
    monkeypatch.undo()
    assert finished(start(host)).state == "completed"


def test_what_is_shown_is_in_the_log(host: EngineHost, log: RunLog) -> None:
    run = start(host, settings={"delay_ms": "5"}, limits={"max_new_tokens": "200"})
    while not run.over.wait(0.02):
        pieces = run.pieces()
        if pieces:
            assert detail(log, run.log_id).first_text == pieces[0]
            assert len(log.steps(run.log_id or "")) >= len(pieces) - 1
    shown = "".join(run.pieces())
    assert run.finish is not None and run.finish.text.startswith(shown)
    rest = run.finish.text[len(shown) :]
    assert rest.strip("\ufffd") == "", "bytes of a character that the limit cut"


def test_chat_continues_with_the_answer_so_far(host: EngineHost, log: RunLog) -> None:
    first = finished(start(host, system="Be brief."))
    second = finished(start(host, prompt="And again.", parent=first.id))
    assert first.finish is not None
    assert second.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": first.finish.text},
        {"role": "user", "content": "And again."},
    ]
    assert list(detail(log, second.log_id).messages) == second.messages


def test_chat_continues_from_the_log_after_a_restart(host: EngineHost, history: History) -> None:
    first = finished(start(host))
    host.runs.__init__()  # type: ignore[misc]
    second = finished(start(host, prompt="More.", parent=first.log_id))
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]
    third = finished(start(host, prompt="More yet.", parent=second.id))
    ids = [first.log_id, second.log_id]
    for run_id in (third.id, third.log_id or ""):
        assert history.show(run_id)["runs"][0]["answered_by"] == ids
    host.runs.__init__()  # type: ignore[misc]
    assert history.show(third.log_id or "")["runs"][0]["answered_by"] == ids


def test_run_again_repeats_the_prompt_with_new_settings(host: EngineHost) -> None:
    first = finished(start(host, prompt="Once."))
    again = finished(start(host, method="plain", prompt="ignored", repeats=first.id))
    assert again.messages == first.messages
    assert again.meta["prompt"] == "Once." and again.meta["title"] == "Plain"


def test_loading_is_queued_and_told(host: EngineHost) -> None:
    assert host.loaded is None
    run = finished(host.load(host.catalog.target("tiny"), "float32", owner="tab"))
    assert run.state == "completed"
    assert host.loaded is not None and host.loaded.dtype_name == "float32"


def test_close_ends_every_run(host: EngineHost) -> None:
    before = set(threading.enumerate())
    runs = [start(host, owner=str(i), limits={"max_new_tokens": "400"}) for i in range(3)]
    host.close()
    assert all(run.over.is_set() for run in runs)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "engine"]


def test_a_closed_host_takes_nothing_on(host: EngineHost) -> None:
    ended: list[str] = []
    host.before_close(lambda: ended.append("first"))
    host.before_close(lambda: ended.append("second"))
    host.close()
    assert ended == ["first", "second"]
    with pytest.raises(ClosingError, match="Start it again"):
        start(host)


def test_closing_waits_only_so_long_for_what_cannot_be_stopped(host: EngineHost) -> None:
    hold = threading.Event()
    host.submit(lambda run: (hold.wait(), run.end("completed"))[1], owner="tab")
    began = time.monotonic()
    host.close(wait_s=0.2)
    assert time.monotonic() - began < 10
    hold.set()


def test_what_ended_stays_as_it_ended() -> None:
    run = LiveRun("tab")
    run.end("failed", error="It broke.")
    run.end("completed")
    assert (run.state, run.error) == ("failed", "It broke.")
