"""What goes into the run log comes out of it, whatever happens to the process."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from engine.steps import Step
from storage import EXTERNAL, RunLog, StepRow, StorageError
from tests.storage.conftest import detail, finish, finished_run, new_run, step


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


def test_steps_round_trip_with_nan_and_infinity(log: RunLog) -> None:
    run_id = log.begin(new_run())
    odd = step(1, draft_probs=(None, math.nan, math.inf), token_texts=("\ufffd", "🙂", "\x00"))
    log.add_steps(run_id, [step(0), odd])
    first, second = log.steps(run_id)
    assert first == step(0)
    assert math.isnan(second.draft_probs[1] or 0) and second.draft_probs[2] == math.inf
    assert second.token_texts == odd.token_texts
    finish(log, run_id, {"mat": math.nan, "ttft_s": 0.1, "tok_s": None})
    assert math.isnan(detail(log, run_id).metrics["mat"])


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


def test_summary_follows_the_stream(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
    figures = {"num_steps": 3, "num_new_tokens": 7, "mat": 5 / 3, "tok_s": 24.123456789}
    log.add_steps(run_id, [step(0)], {**figures, "num_steps": 1})
    log.add_steps(run_id, [step(1, accepted=()), step(2)], figures)
    (row,) = log.find().rows
    assert {name: getattr(row, name) for name in figures} == figures, "as given, not worked out"


def test_of_another_engines_run_nobody_knows_whether_it_is_lossless(log: RunLog) -> None:
    run_id = log.begin(new_run(method={"decoding_type": EXTERNAL}, lossless=None))
    assert detail(log, run_id).lossless is log.find().rows[0].lossless is None


def test_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("this is not a database, but it is long enough to look at" * 20)
    with pytest.raises(StorageError, match="not a database"):
        RunLog.open(str(file))


@pytest.mark.parametrize(("url", "message"), [("nosuchdb://x", "No driver"), ("://", "not a data")])
def test_unknown_driver_and_broken_url_are_refused_in_a_sentence(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        RunLog.open(url)
