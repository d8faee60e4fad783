"""The host: one engine for all tabs, stops at once, keeps every run."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import ConfigError, PromptError
from engine.model.sources import TargetSpec
from playground.host.live import LiveRun, LiveRuns
from playground.host.recording import decode_and_record
from playground.host.request import read_request
from playground.host.runner import MAX_WAITING, EngineHost, QueueFullError
from playground.host.task import ClosingError
from playground.runs.details import request_again
from playground.runs.reading import History
from tests.playground.asks import ask, busy, finished, start, stored, until
from tests.playground.tiny import held_drafts


@pytest.mark.usefixtures("auto_drafting")
def test_what_the_controller_decides_is_in_the_log(host: EngineHost) -> None:
    request = replace(read_request(host.catalog, ask()), config=NGramConfig(max_draft_len=4))
    run = finished(host.generate(request, owner="tab"))
    detail = stored(host, run)
    assert run.state == "completed" and detail.method["drafting"] == "auto", run.error
    assert all(row.decision for row in run.rows.read(0) or ())
    assert detail.metrics["expected_tok_s"] > 0


def test_stop_ends_within_a_step_and_the_run_is_kept(host: EngineHost) -> None:
    with held_drafts():
        run = start(host)
        until(lambda: run.first)
        host.cancel_owner("tab")
    assert finished(run).state == stored(host, run).status == "cancelled"
    assert len(host.log.steps(run.log_id or "")) == len(run.rows) <= 1


def test_two_tabs_take_turns_in_order(host: EngineHost) -> None:
    with held_drafts():
        first, second, third = (start(host, owner=name) for name in ("a", "b", "c"))
        until(lambda: first.state == "running")
        assert (host.ahead_of(second), host.ahead_of(third)) == (1, 2)
        assert second.status_text.startswith("waiting for the engine, 1 ahead · ")
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
    assert stopped.log_id is None and stopped.state == "cancelled"


def test_a_full_queue_refuses_a_run_or_takes_it_for_its_owners_waiting_one(
    host: EngineHost,
) -> None:
    with busy(host, full=True):
        with pytest.raises(QueueFullError, match="waiting"):
            start(host, owner="busy")
        (running,) = host.runs.owned_by("busy")
        assert not running.cancel_requested.is_set(), "what is refused cancels nothing"
        (before,) = host.runs.owned_by("busy 3")
        run = start(host, owner="busy 3")
        assert before.over.is_set() and host.ahead_of(run) == MAX_WAITING
    assert finished(run).state == "completed"


def test_a_run_takes_the_place_of_its_owners_running_one(host: EngineHost) -> None:
    with held_drafts():
        running = start(host)
        until(lambda: running.first)
        again = start(host)
    assert finished(running).state == "cancelled" and finished(again).state == "completed"


def test_a_bug_in_the_loop_keeps_the_run_as_failed(
    host: EngineHost, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished(start(host, settings={"fail_at": "3"}))
    assert run.state == stored(host, run).status == "failed"
    assert run.error and run.id in run.error and "scripted" not in run.error
    assert "scripted failure" in caplog.text
    assert len(run.rows) == len(host.log.steps(run.log_id or "")) == 3
    assert finished(start(host)).state == "completed"


def test_a_long_prompt_tells_the_tokens_read(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = set[tuple[str, float | None]]()

    def watched(*args: Any, run: LiveRun, prefilled: Any, **more: Any) -> None:
        def reading(num_tokens: int) -> None:
            prefilled(num_tokens)
            told.add((run.activity, run.share))

        reading(25)
        decode_and_record(*args, run=run, prefilled=reading, **more)

    monkeypatch.setattr("playground.host.runner.decode_and_record", watched)
    assert finished(start(host, mode="raw", prompt="x" * 100)).state == "completed"
    assert told >= {(f"reading the prompt: {n} of 100 tokens", n / 100) for n in (25, 100)}


def test_chat_continues_with_an_answer_that_is_still_being_written(host: EngineHost) -> None:
    first = start(host, settings={"delay_ms": "20"}, limits={"max_new_tokens": "400"})
    until(lambda: len(first.rows) >= 3)
    shown = "".join(first.pieces())
    second = start(host, prompt="And again.", parent=first.id)
    so_far = second.messages[-2]["content"]
    assert shown and so_far.startswith(shown)
    finish = finished(first).finish
    assert finish is not None and finish.text.startswith(so_far)


def test_chat_continues_from_the_log_after_a_restart(host: EngineHost, history: History) -> None:
    first = finished(start(host, system="Be brief."))
    host.runs.__init__()  # type: ignore[misc]
    second = finished(start(host, prompt="More.", parent=first.log_id))
    assert second.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": stored(host, first).text},
        {"role": "user", "content": "More."},
    ]
    assert list(stored(host, second).messages) == second.messages
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


def test_close_ends_every_run_and_a_closed_host_takes_nothing_on(host: EngineHost) -> None:
    before, ended = set(threading.enumerate()), list[str]()
    runs = [start(host, owner=str(i), limits={"max_new_tokens": "400"}) for i in range(3)]
    for name in ("first", "second"):
        host.before_close(partial(ended.append, name))
    host.close()
    assert all(run.over.is_set() for run in runs) and ended == ["first", "second"]
    assert "engine" not in {thread.name for thread in set(threading.enumerate()) - before}
    with pytest.raises(ClosingError, match="Start it again"):
        start(host)


def test_closing_waits_only_so_long_for_what_cannot_be_stopped(host: EngineHost) -> None:
    hold = threading.Event()
    host.submit(lambda run: (hold.wait(), run.end("completed"))[1], owner="tab")
    host.close(wait_s=0.2)
    hold.set()


def test_a_finished_run_keeps_its_state() -> None:
    run = LiveRun("tab")
    run.end("failed", error="It broke.")
    run.end("completed")
    assert (run.state, run.error) == ("failed", "It broke.")


# ---- a stored run as a request, and runs that never began


def test_a_run_again_has_the_same_settings_and_text(host: EngineHost) -> None:
    first = finished(start(host, prompt="Once more.", settings={"max_draft_len": "2"}))
    host.runs.__init__()  # type: ignore[misc]
    run = stored(host, first)
    again = finished(host.generate(request_again(host.catalog, run), owner="tab"))
    twin = stored(host, again)
    assert twin.id != run.id and twin.text == run.text
    assert (twin.setup_id, twin.prompt_id) == (run.setup_id, run.prompt_id)
    assert (twin.method, twin.messages) == (run.method, run.messages)


def test_what_cannot_be_run_again_is_said(host: EngineHost) -> None:
    run = stored(host, finished(start(host)))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("no method 'Psychic' here", {"method": {**run.method, "decoding_type": "Psychic"}}),
        ("unheard_of", {"method": {**run.method, "unheard_of": 1}}),
        ("target must be one of", {"target": "/etc"}),
    ]
    for message, changes in cases:
        with pytest.raises(ConfigError, match=message):
            request_again(host.catalog, replace(run, **changes))


def test_token_ids_are_no_text_to_run_again(host: EngineHost) -> None:
    """Different ids may decode to the same text, and a text to other ids."""
    request = read_request(host.catalog, ask(mode="raw"))
    runs = [
        finished(host.generate(replace(request, prompt="", prompt_ids=ids), owner="tab"))
        for ids in ((5, 6), (5, 6, 1))
    ]
    one, other = (stored(host, run) for run in runs)
    assert runs[0].meta["prompt"] and one.prompt_text == "" and one.prompt_id != other.prompt_id
    for _ in ("live", "from the log"):
        with pytest.raises(PromptError, match="token ids"):
            host.generate(request_again(host.catalog, one), owner="tab")
        host.runs = LiveRuns()


def test_a_run_whose_target_cannot_be_loaded_is_in_the_log(host: EngineHost) -> None:
    request = read_request(host.catalog, ask(prompt="Never asked."))
    missing = TargetSpec(name="missing", title="Missing", path="/no/such/folder")
    run = finished(host.generate(replace(request, target=missing), owner="tab"))
    assert run.state == "failed" and run.error is not None and "/no/such/folder" in run.error
    entry = stored(host, run)
    assert (entry.status, entry.error, entry.target) == ("failed", run.error, "missing")
    assert entry.prompt_text == "Never asked." and entry.method["decoding_type"] == "Scripted"
    assert entry.num_steps == 0 and host.log.steps(entry.id) == ()
    assert finished(start(host)).state == "completed", "the engine goes on"
