"""What a database would lose or refuse comes back whole, or is refused in a sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage import RunLog, RunQuery, StorageError, UnknownRunError
from tests.storage.conftest import finish, finished_run, new_run, step

LONE = "lone \udcff surrogate"
ODD_TEXTS = ["a\x00b", "lone \\udcff surrogate", "\\u0000 and \\u005c", "\\\\u0041\\", "🙂\\ué"]


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_round_trips(log: RunLog, text: str) -> None:
    run_id = log.begin(new_run(prompt_text=text))
    log.add_prefill(run_id, token_id=5, text=text, num_prompt_tokens=3, ttft_s=0.1)
    log.set_note(run_id, text)
    finish(log, run_id, status="failed", output_ids=[5], text=text, error=text)
    run = log.get(run_id)
    assert run is not None
    assert [run.prompt_text, run.first_text, run.note, run.text, run.error] == [text] * 5


def test_a_lone_surrogate_is_read_as_its_escape(log: RunLog) -> None:
    run_id = log.begin(
        new_run(
            prompt_text=LONE,
            method={"decoding_type": "NGram", "note": [LONE, "🙂", "\\ud800", "\ud83d"]},
        )
    )
    log.add_steps(run_id, [replace(step(0), committed_texts=(LONE,))])
    run = log.get(run_id)
    assert run is not None
    read = "lone \\udcff surrogate"
    assert run.prompt_text == read
    assert run.method["note"] == [read, "🙂", "\\ud800", "\\ud83d"]
    assert log.steps(run_id)[0].committed_texts == (read,)


def test_a_name_of_half_a_pair_is_refused_in_a_sentence(log: RunLog) -> None:
    run_id = log.begin(new_run())
    with pytest.raises(StorageError, match="surrogate"):
        log.rename(run_id, LONE)
    with pytest.raises(StorageError, match="surrogate"):
        log.set_tags(run_id, [LONE])


def test_log_and_its_folder_are_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.db"
    with RunLog.open(str(file)) as log:
        log.begin(new_run())
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in file.parent.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes
    assert oct(file.parent.stat().st_mode & 0o777) == "0o700"


def test_text_after_a_nul_is_found(log: RunLog) -> None:
    log.begin(new_run(prompt_text="before\x00After"))
    assert log.find(RunQuery(text="after")).total == 1


@pytest.mark.parametrize("figure", ["mat", "tok_s", "ttft_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_odd_figures_of_a_summary_round_trip(log: RunLog, figure: str, value: float) -> None:
    run_id = log.begin(new_run())
    finish(log, run_id, {figure: value}, output_ids=[5])
    (row,) = log.find(RunQuery(sort="mat")).rows
    stored = getattr(row, figure)
    assert isinstance(stored, float)
    assert stored == value or (math.isnan(stored) and math.isnan(value))


@pytest.mark.parametrize(
    ("change", "value"),
    [("add_steps", [step(0)]), ("set_tags", []), ("set_tags", ["a"]), ("rename", "x")],
)
def test_changing_an_unknown_run_names_it(log: RunLog, change: str, value: Any) -> None:
    assert log.get("nope") is None
    with pytest.raises(UnknownRunError, match="nope"):
        getattr(log, change)("nope", value)


def test_step_stored_twice_is_refused_and_counted_once(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_steps(run_id, [step(0)], {"num_steps": 1})
    for batch in ([step(1), step(0)], [step(2), step(2)]):
        with pytest.raises(StorageError, match="of run .* is stored already"):
            log.add_steps(run_id, batch, {"num_steps": 3})
    run = log.get(run_id)
    assert run is not None and run.num_steps == len(log.steps(run_id)) == 1


def test_unknown_sort_key_names_the_allowed_ones(log: RunLog) -> None:
    with pytest.raises(StorageError, match="created_at.*got 'speed'"):
        log.find(RunQuery(sort="speed"))  # type: ignore[arg-type]


def test_run_ids_never_look_like_an_option(log: RunLog) -> None:
    assert all(finished_run(log).isalnum() for _ in range(150))
