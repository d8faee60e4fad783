"""What a database would lose or refuse comes back whole, or is refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from storage import RunLog, RunQuery, StorageError
from tests.storage.conftest import detail, finish, new_run, step

LONE = "lone \udcff surrogate"
ODD_TEXTS = ["a\x00b", "lone \\udcff surrogate", "\\u0000 and \\u005c", "\\\\u0041\\", "🙂\\ué"]


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_round_trips(log: RunLog, text: str) -> None:
    run_id = log.begin(new_run(prompt_text=text))
    log.add_prefill(run_id, token_id=5, text=text, num_prompt_tokens=3, ttft_s=0.1)
    log.annotate(run_id, note=text)
    finish(log, run_id, status="failed", output_ids=[5], text=text, error=text)
    run = detail(log, run_id)
    assert [run.prompt_text, run.first_text, run.note, run.text, run.error] == [text] * 5
    assert log.find(RunQuery(text=text[-2:].upper())).total == 1, "also behind a NUL"


def test_a_lone_surrogate_is_read_as_its_escape(log: RunLog) -> None:
    run_id = log.begin(
        new_run(
            prompt_text=LONE,
            method={"decoding_type": "NGram", "note": [LONE, "🙂", "\\ud800", "\ud83d"]},
        )
    )
    log.add_steps(run_id, [replace(step(0), committed_texts=(LONE,))])
    run, read = detail(log, run_id), "lone \\udcff surrogate"
    assert run.prompt_text == read
    assert run.method["note"] == [read, "🙂", "\\ud800", "\\ud83d"]
    assert log.steps(run_id)[0].committed_texts == (read,)


def test_a_name_of_half_a_pair_is_refused_in_a_sentence(log: RunLog) -> None:
    run_id = log.begin(new_run())
    with pytest.raises(StorageError, match="surrogate"):
        log.annotate(run_id, name=LONE)
    with pytest.raises(StorageError, match="surrogate"):
        log.annotate(run_id, tags=[LONE])


def test_log_and_its_folder_are_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.db"
    with RunLog.open(str(file)) as log:
        log.begin(new_run())
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in file.parent.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes
    assert oct(file.parent.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_odd_figures_of_a_summary_round_trip(log: RunLog, value: float) -> None:
    figures = {"mat": value, "tok_s": value, "ttft_s": value}
    finish(log, log.begin(new_run()), figures, output_ids=[5])
    (row,) = log.find(RunQuery(sort="mat")).rows
    assert repr({name: getattr(row, name) for name in figures}) == repr(figures)


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.add_steps("nope", [step(0)]),
        lambda log: log.annotate("nope", tags=[]),
        lambda log: log.annotate("nope", name="x", tags=["a"]),
    ],
)
def test_changing_an_unknown_run_names_it(log: RunLog, change: Callable[[RunLog], None]) -> None:
    assert log.get("nope") is None
    with pytest.raises(StorageError, match="nope"):
        change(log)


def test_step_stored_twice_is_refused_and_counted_once(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_steps(run_id, [step(0)], {"num_steps": 1})
    for batch in ([step(1), step(0)], [step(2), step(2)]):
        with pytest.raises(StorageError, match="(?i)unique"):
            log.add_steps(run_id, batch, {"num_steps": 3})
    assert detail(log, run_id).num_steps == len(log.steps(run_id)) == 1
