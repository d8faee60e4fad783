"""What goes into the run log comes out whole, or is refused in a sentence."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from engine.steps import Step
from storage import RunLog, RunQuery, StepRow, StorageError
from tests.storage.conftest import (
    NUM_THREADS,
    detail,
    errors_at_once,
    finish,
    finished_run,
    new_run,
    step,
)

LONE = "lone \udcff surrogate"
ODD_TEXTS = ["a\x00b", "lone \\udcff surrogate", "\\u0000 and \\u005c", "\\\\u0041\\", "🙂\\ué"]


def test_run_round_trips(log: RunLog) -> None:
    messages = ({"role": "user", "content": "héllo \x00 \u2028 <script>"},)
    environment = {"versions": {"torch": "2"}, "weird": math.inf}
    run_id = finished_run(log, messages=messages, environment=environment, tags=("b", "a"))
    run = detail(log, run_id)
    assert run.status == "completed" and run.finish_reason == "length"
    assert run.messages == messages and run.environment == environment
    assert run.output_ids == (5, 6, 9, 6, 9) and run.text == "abdbd"
    assert (run.first_token_id, run.first_text) == (5, "a")
    assert run.prompt_ids == (1, 2, 3) and run.method["max_draft_len"] == 4
    assert (run.mat, run.tok_s, run.ttft_s) == (2.0, 40.0, 0.05)
    assert run.tags == ("a", "b") and run.created_at.tzinfo is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_odd_figures_of_steps_and_runs_round_trip(log: RunLog, value: float) -> None:
    run_id = log.begin(new_run())
    odd = step(1, draft_probs=(None, value, 0.5), token_texts=("\ufffd", "🙂", "\x00"))
    log.add_steps(run_id, [step(0), odd])
    assert repr(log.steps(run_id)) == repr((step(0), odd))
    figures = {"mat": value, "tok_s": value, "ttft_s": value}
    finish(log, run_id, {**figures, "itl_ms": None}, output_ids=[5])
    (row,) = log.find(RunQuery(sort="mat")).rows
    for kept in (row, detail(log, run_id)):
        assert repr({name: getattr(kept, name) for name in figures}) == repr(figures)
    assert repr(detail(log, run_id).metrics) == repr({**figures, "itl_ms": None})


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_round_trips(log: RunLog, text: str) -> None:
    run_id = log.begin(new_run(prompt_text=text))
    log.add_prefill(run_id, token_id=5, text=text, num_prompt_tokens=3, ttft_s=0.1)
    log.annotate(run_id, note=text)
    finish(log, run_id, status="failed", output_ids=[5], text=text, error=text)
    run = detail(log, run_id)
    assert [run.prompt_text, run.first_text, run.note, run.text, run.error] == [text] * 5
    assert log.find(RunQuery(text=text[-2:].upper())).total == 1, "also behind a NUL"


def test_a_lone_surrogate_is_read_as_its_escape_and_refused_in_ids(log: RunLog) -> None:
    method = {"decoding_type": "NGram", "note": [LONE, "🙂", "\\ud800", "\ud83d"]}
    run_id = log.begin(new_run(prompt_text=LONE, method=method))
    log.add_steps(run_id, [replace(step(0), committed_texts=(LONE,))])
    run, read = detail(log, run_id), "lone \\udcff surrogate"
    assert run.prompt_text == read
    assert run.method["note"] == [read, "🙂", "\\ud800", "\\ud83d"]
    assert log.steps(run_id)[0].committed_texts == (read,)
    log.annotate(run_id, name=LONE, tags=[LONE])
    (row,) = log.find(RunQuery(tag=LONE)).rows
    assert (row.name, row.tags) == (read, (read,))
    with pytest.raises(StorageError, match="surrogate"):
        log.get(LONE)


def test_step_rows_have_the_fields_of_the_engines_steps() -> None:
    theirs = [f.name for f in fields(Step)]
    ours = [f.name for f in fields(StepRow)]
    assert ours == [*theirs, "token_texts", "bonus_text", "committed_texts"]


def test_steps_are_read_by_index(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_steps(run_id, [step(i) for i in range(10)])
    assert [s.index for s in log.steps(run_id, 3, 6)] == [3, 4, 5]
    assert log.steps(run_id, 9) == (step(9),)
    assert log.steps(run_id, 10) == log.steps("none") == ()


def test_step_stored_twice_is_refused_and_counted_once(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_steps(run_id, [step(0)], {"num_steps": 1})
    for batch in ([step(1), step(0)], [step(2), step(2)]):
        with pytest.raises(StorageError, match="(?i)unique"):
            log.add_steps(run_id, batch, {"num_steps": 3})
    assert detail(log, run_id).num_steps == len(log.steps(run_id)) == 1


def test_changing_an_unknown_run_names_it(log: RunLog) -> None:
    assert log.get("nope") is None
    for change in (
        lambda: log.add_steps("nope", [step(0)]),
        lambda: log.annotate("nope", tags=[]),
        lambda: log.annotate("nope", name="x", tags=["a"]),
    ):
        with pytest.raises(StorageError, match="nope"):
            change()


def test_a_damaged_step_is_a_sentence(file_log: RunLog) -> None:
    run_id = finished_run(file_log)
    for payload in (b"no deflate", b"", b"PK\x05\x06", b"x\x9c\x03\x00\x00\x00\x00\x01"):
        with file_log._database.transaction() as connection:
            connection.exec_driver_sql("UPDATE steps SET payload = ?", (payload,))
        with pytest.raises(StorageError, match="damaged"):
            file_log.read_whole(run_id)
    with file_log._database.transaction() as connection:
        connection.exec_driver_sql("UPDATE run_details SET method = '{'")
    with pytest.raises(StorageError, match="damaged"):
        file_log.get(run_id)


def test_log_and_its_folder_are_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.db"
    with RunLog.open(str(file)) as log:
        log.begin(new_run())
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in file.parent.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes
    assert oct(file.parent.stat().st_mode & 0o777) == "0o700"


def test_threads_retag_the_same_runs_and_lose_no_tag(log: RunLog) -> None:
    ids = [finished_run(log, tags=("old", "kept")) for _ in range(3)]
    retag = log.retag
    assert errors_at_once(lambda n: retag([*ids, "nope"], add=[f"t{n}"], remove=["old"])) == []
    every = ("kept", *(f"t{n}" for n in range(NUM_THREADS)))
    with pytest.raises(StorageError, match="at most 50"):
        retag(ids, add=[str(n) for n in range(50)], remove=["kept"])
    assert [detail(log, run_id).tags for run_id in ids] == [every] * 3
