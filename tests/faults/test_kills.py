"""kill -9 at any moment of every long action: what was shown is kept, and what is left is done.

Short by default; --faults-long kills a hundred times.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from playground.experiments.sweep.report import SweepStore
from playground.experiments.sweep.trials import trial_benchmark_id
from storage import RunLog
from tests.faults.children import Child, command, page, words
from tests.faults.conftest import Tally
from tests.faults.runs import Watcher, answers, check_run, follow, opened
from tests.playground.serving import free_port
from tests.playground.tiny import save_tiny_llama

pytestmark = pytest.mark.slow  # whole programs, started and ended

SEED = 20261122
MOST_AT_ONCE = 5
"""Kills of one experiment before it is left alone to end."""


def timed(folder: Path, *arguments: object) -> float:
    """Seconds of a command that nobody kills."""
    child = Child(folder, command, *arguments)
    assert child.ended() == 0, child.errors
    return time.monotonic() - child.began_s


def killed(
    folder: Path, draw: random.Random, seconds: float, asked: Callable[[], Sequence[object]]
) -> None:
    """Kill a command at some moment of the seconds that it takes; sooner, if it had ended."""
    while True:
        child = Child(folder, command, *asked())
        time.sleep(draw.uniform(0.1, 0.8) * seconds)
        if child.kill():
            return
        seconds /= 2


def rounds(num_kills: int) -> list[int]:
    """So many kills in rounds of a few: each round ends with a whole result."""
    whole, rest = divmod(num_kills, MOST_AT_ONCE)
    return [MOST_AT_ONCE] * whole + [rest] * (rest > 0)


# ---- runs


def test_a_killed_run_of_the_command_line(
    tiny: Path, tmp_path: Path, num_kills: dict[str, int], tally: Tally
) -> None:
    db, draw = tmp_path / "runs.db", random.Random(SEED)
    line = "generate hello --target {} --dtype float32 --db {} --method NGram --ignore-eos"
    asked = words(f"{line} --max-new-tokens 900", tiny, db)
    timed(tmp_path, *asked)
    with opened(db) as log:
        whole = _newest(log).text
    for _ in range(num_kills["generate"]):
        child = Child(tmp_path, command, *asked)
        enough = draw.uniform(0.0, 0.9) * len(whole)
        child.until(lambda child=child, enough=enough: len(child.text) > enough)  # type: ignore[misc]
        assert child.kill(), child.errors
        with opened(db) as log:
            equal = check_run(log, _newest(log), whole, child.text.removesuffix("\n"), tally)
        tally.end(1, equal=equal)
    _nothing_lost(tally)


def test_a_killed_run_of_the_page(tmp_path: Path, num_kills: dict[str, int], tally: Tally) -> None:
    target = save_tiny_llama(tmp_path / "tiny")
    db, draw, whole = tmp_path / "runs.db", random.Random(SEED), ""
    limits = {"limits": {"max_new_tokens": "400", "ignore_eos": True}}
    asked = {"form": {"values": {"method": {"delay_ms": "5"}}}, "run_form": {"values": limits}}
    for number in range(num_kills["page"] + 1):
        child, url = begin_page(tmp_path / str(number), target, db)
        seen = Watcher()
        tab = threading.Thread(target=follow, args=(url, seen.take), kwargs=asked)
        tab.start()
        if not whole:
            tab.join()
            whole = seen.shown
        else:
            enough = draw.uniform(0.0, 0.9) * len(whole)
            child.until(lambda seen=seen, enough=enough: len(seen.shown) > enough)  # type: ignore[misc]
        assert child.kill(), child.errors
        tab.join()
        with opened(db) as log:
            run = log.get(seen.log_id or "")
            assert run is not None
            whole = run.text if number == 0 else whole
            equal = check_run(log, run, whole, seen.shown, tally)
        if number:
            tally.end(1, equal=equal)
    _nothing_lost(tally)


def begin_page(folder: Path, target: Path, db: Path) -> tuple[Child, str]:
    """A page that answers."""
    port = free_port()
    child = Child(folder, page, target, db, port)
    url = f"http://127.0.0.1:{port}"

    def answers_now() -> bool:
        try:
            return httpx.get(f"{url}/gradio_api/startup-events", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    assert child.until(answers_now), child.errors
    return child, url


def _newest(log: RunLog) -> Any:
    (row, *_) = log.find().rows
    return log.get(row.id)


# ---- experiments


def test_a_killed_benchmark(
    tiny: Path, tmp_path: Path, num_kills: dict[str, int], tally: Tally
) -> None:
    draw = random.Random(SEED)
    asked = words(
        "bench --target {} --dtype float32 --suite starter --methods ngram --repeats 2 "
        "--max-new-tokens 16 --categories chat --ignore-eos --db",
        tiny,
    )
    seconds = timed(tmp_path, *asked, tmp_path / "whole.db")
    with opened(tmp_path / "whole.db") as log:
        whole = answers(log, log.benchmarks.list()[0].id)
    assert len(whole) == 12
    for number, most in enumerate(rounds(num_kills["bench"])):
        db = tmp_path / f"{number}.db"

        def going_on(db: Path = db) -> Sequence[object]:
            with opened(db) as log:
                begun = log.benchmarks.list()
            anew = (*asked, db)
            return ("bench", "--resume", begun[0].id, "--db", db) if begun else anew

        for _ in range(most):
            killed(tmp_path, draw, seconds, going_on)
            with opened(db) as log:
                begun = log.benchmarks.list()
                tally.wrongly_marked += sum(one.status == "running" for one in begun)
                tally.wrongly_marked += _wrongly_marked(log)
        timed(tmp_path, *going_on())
        with opened(db) as log:
            (benchmark,) = log.benchmarks.list()
            done = [row for row in log.find().rows if row.status == "completed"]
            equal = answers(log, benchmark.id) == whole and len(done) == len(whole)
            tally.wrongly_marked += benchmark.status != "completed"
        tally.end(most, equal=equal)
    _nothing_lost(tally)


def test_a_killed_sweep(
    tiny: Path, tmp_path: Path, num_kills: dict[str, int], tally: Tally
) -> None:
    draw = random.Random(SEED)
    asked = words(
        "sweep --target {} --dtype float32 --grid --method ngram --vary max_draft_len=1:3 --suite "
        "starter --categories chat --max-new-tokens 16 --ignore-eos --name s --db",
        tiny,
    )
    (tmp_path / "whole").mkdir()
    seconds = timed(tmp_path, *asked, tmp_path / "whole" / "runs.db")
    whole = swept(tmp_path / "whole" / "runs.db")
    assert len(whole) == 3
    for number, most in enumerate(rounds(num_kills["sweep"])):
        db = tmp_path / str(number) / "runs.db"
        for _ in range(most):
            killed(tmp_path, draw, seconds, lambda db=db: _going_on(db, asked))  # type: ignore[misc]
            with opened(db) as log:
                tally.wrongly_marked += _wrongly_marked(log)
                tally.wrongly_marked += "running" in statuses(log)
        if "completed" not in statuses_of(db):
            timed(tmp_path, *_going_on(db, asked))
        tally.wrongly_marked += statuses_of(db) != ["completed"]
        tally.end(most, equal=swept(db) == whole)
    _nothing_lost(tally)


def _going_on(db: Path, asked: Sequence[object]) -> Sequence[object]:
    begun = db.exists() and statuses_of(db)
    return ("sweep", "--resume", "s", "--db", db) if begun else (*asked, db)


def statuses_of(db: Path) -> list[str]:
    with opened(db) as log:
        return statuses(log)


def statuses(log: RunLog) -> list[str]:
    """How its sweeps stand."""
    return [head.status for head in SweepStore(log).heads()]


def swept(db: Path) -> dict[Any, Any]:
    """Every point, how it ended, and what was answered there."""
    with opened(db) as log:
        sweep = SweepStore(log).load("s")
        return {
            trial.key: (trial.outcome, answers(log, trial_benchmark_id(sweep.row.id, trial.point)))
            for trial in sweep.trials
        }


def _wrongly_marked(log: RunLog) -> int:
    """Runs that are neither done nor known to have died."""
    return sum(row.status not in ("completed", "interrupted") for row in log.find().rows)


# ---- training


@pytest.mark.parametrize("method", ["medusa"])
def test_killed_corpus_writing_and_training(
    method: str, tiny: Path, tmp_path: Path, num_kills: dict[str, int], tally: Tally
) -> None:
    draw = random.Random(SEED)
    asked = words(
        "train --target {} --dtype float32 --method {} --rows 4 --tokens 1500 "
        "--set pack_tokens=256 --set epochs=3 --output",
        *(tiny, method),
    )
    seconds = timed(tmp_path, *asked, tmp_path / "whole" / "drafter")
    whole = made(tmp_path / "whole")
    assert any(name.endswith(".safetensors") for name in whole)
    for number, most in enumerate(rounds(num_kills["train"])):
        folder = tmp_path / str(number)
        for _ in range(most):
            killed(tmp_path, draw, seconds, lambda to=folder: (*asked, to / "drafter"))  # type: ignore[misc]
        timed(tmp_path, *asked, folder / "drafter")
        assert not list(folder.rglob("partial-*"))
        tally.end(most, equal=made(folder) == whole)
    _nothing_lost(tally)


def made(folder: Path) -> dict[str, bytes]:
    """Weights and corpus, byte by byte."""
    names = ("*.safetensors", "dialogues.jsonl")
    files = [file for name in names for file in folder.rglob(name)]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _nothing_lost(tally: Tally) -> None:
    assert (tally.unlogged, tally.wrongly_marked) == (0, 0), tally.line
    assert tally.equal == tally.resumed, tally.line
