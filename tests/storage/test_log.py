"""What goes into the run log comes out of it, whatever happens to the process."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from engine.steps import Step
from storage import (
    RunLog,
    StepRow,
    StorageError,
)
from tests.storage.conftest import finished_run, new_run, step

ROOT = Path(__file__).parents[2]


def test_run_round_trips(log: RunLog) -> None:
    messages = ({"role": "user", "content": "héllo \x00 \u2028 <script>"},)
    environment = {"versions": {"torch": "2"}, "weird": math.inf}
    run_id = finished_run(log, messages=messages, environment=environment, tags=("b", "a"))
    run = log.get(run_id)
    assert run is not None
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
    metrics = {"mat": math.nan, "ttft_s": 0.1, "tok_s": None}
    log.finish(run_id, status="failed", output_ids=[], text="", finish_reason=None, metrics=metrics)
    run = log.get(run_id)
    assert run is not None and math.isnan(run.metrics["mat"])


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


def test_writer_and_reader_threads_do_not_disturb_each_other(log: RunLog) -> None:
    run_id, num_seen = log.begin(new_run()), 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(lambda: [log.add_steps(run_id, [step(i)]) for i in range(100)])
        while not writer.done():
            num_steps = len(log.steps(run_id))
            assert num_steps >= num_seen
            num_seen = num_steps
            log.find()
    writer.result()
    assert len(log.steps(run_id)) == 100


def test_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("this is not a database, but it is long enough to look at" * 20)
    with pytest.raises(StorageError, match="not a database"):
        RunLog.open(str(file))


def test_unknown_driver_and_broken_url_are_refused_in_a_sentence() -> None:
    with pytest.raises(StorageError, match="No driver|not a database URL"):
        RunLog.open("nosuchdb://x")
    with pytest.raises(StorageError, match="not a database URL"):
        RunLog.open("://")


def test_opening_storage_loads_no_torch_gradio_or_engine() -> None:
    script = (
        "import sys, storage\n"
        "heavy = {'torch', 'gradio', 'engine', 'playground', 'presets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
