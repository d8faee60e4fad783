"""A run log per test, in every database that it is kept in, and runs to put into it."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import NewRun, RunDetail, RunLog, StepRow, StoredRun, new_id
from tests.postgres import Server, missing, server

ROOT = Path(__file__).parents[2]
NUM_THREADS = 8


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "runs.sqlite3")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, path: str) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield path
        return
    with request.getfixturevalue("postgres").database("empty_log") as url:
        yield url


@pytest.fixture(scope="session")
def own() -> Iterator[Server]:
    """A server that a test may stop, if it starts it again."""
    if reason := missing():
        pytest.skip(reason)
    with server() as found:
        found.make_template("empty_log")
        yield found


@pytest.fixture
def mortal(own: Server) -> Iterator[str]:
    with own.database("empty_log") as url:
        yield url


@pytest.fixture
def log(url: str) -> Iterator[RunLog]:
    with RunLog.open(url) as log:
        yield log


@pytest.fixture
def file_log(path: str) -> Iterator[RunLog]:
    """In a SQLite file, where the kind of database makes no difference."""
    with RunLog.open(path) as log:
        yield log


def started(*lines: str) -> subprocess.Popen[str]:
    """A process that runs these lines, which have all names of this module."""
    imports = ("import time", "from storage import RunLog", f"from {__name__} import *")
    command = [sys.executable, "-c", "\n".join((*imports, *lines))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def other_process(url: str, *lines: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs these lines on its own `log` and then sleeps, and what it printed."""
    with started(f"log = RunLog.open({url!r})", *lines, "time.sleep(60)") as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def errors_at_once(work: Callable[[int], object]) -> list[BaseException]:
    """The errors of threads that run `work(0 …)` at the same time."""
    start = threading.Barrier(NUM_THREADS)

    def at_once(index: int) -> None:
        start.wait()
        work(index)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        threads = [pool.submit(at_once, index) for index in range(NUM_THREADS)]
    return [error for thread in threads if (error := thread.exception())]


def new_run(**changes: Any) -> NewRun:
    values: dict[str, Any] = {
        "target": "tiny",
        "method": {"decoding_type": "NGram", "max_draft_len": 4},
        "method_title": "N-gram",
        "lossless": True,
        "sampling": {"temperature": 0.0},
        "limits": {"max_new_tokens": 8},
        "prompt_ids": (1, 2, 3),
        "prompt_text": "hello",
    }
    return NewRun(**{**values, **changes})


def step(index: int = 0, **changes: Any) -> StepRow:
    values: dict[str, Any] = {
        "index": index,
        "context_len": 3 + index,
        "tokens": (5, 6, 7),
        "parents": (-1, 0, 1),
        "ranks": (0, 0, 0),
        "draft_probs": (None, 0.5, 0.25),
        "target_probs": (None, 0.75, 1e-30),
        "accepted": (1,),
        "bonus": 9,
        "num_committed": 2,
        "num_extra_rows": 0,
        "draft_s": 0.001,
        "verify_s": 0.02,
        "accept_s": 0.0001,
        "other_s": 0.0002,
        "at_s": 0.1 * (index + 1),
        "token_texts": ("a", "b", "c"),
        "bonus_text": "d",
        "committed_texts": ("b", "d"),
    }
    return StepRow(**{**values, **changes})


def finish(log: RunLog, run_id: str, metrics: Any = (), **changes: Any) -> None:
    """The end of a run, completed without a text by default."""
    end: dict[str, Any] = {"status": "completed", "output_ids": [], "text": "", **changes}
    log.finish(run_id, **{"finish_reason": None, "metrics": dict(metrics), **end})


def request(configuration: str, prompt: str = "1", **more: Any) -> dict[str, Any]:
    """What the run of a comparison's request has, as fields of a `NewRun`."""
    of: dict[str, Any] = {"experiment_id": "c", "kind": "compare", "suite": "s", "prompt": prompt}
    of["labels"] = {"category": "chat", "group": "chat"}
    return {**of, "configuration": configuration, **more}


def weighted_std(values: Sequence[float], weights: Sequence[float]) -> float:
    """By the definition, so that each value counts as much for it as for the mean."""
    mean = float(np.average(values, weights=weights))
    squares = sum(w * (x - mean) ** 2 for x, w in zip(values, weights, strict=True))
    return math.sqrt(squares / (sum(weights) - sum(w * w for w in weights) / sum(weights)))


def timed_run(log: RunLog, tok_s: float | None, *, num: int = 11, **changes: Any) -> str:
    """A completed run that decoded so fast."""
    run_id = log.begin(new_run(**changes))
    seconds = tok_s and (num - 1) / tok_s
    metrics = {"tok_s": tok_s, "decode_s": seconds}
    finish(log, run_id, metrics, output_ids=range(num))
    return run_id


def begun_benchmark(log: RunLog, name: str = "b", plan: Mapping[str, Any] | None = None) -> str:
    log.benchmarks.begin(benchmark_id := new_id(), name, plan or {})
    return benchmark_id


def finished_run(log: RunLog, *, tags: Sequence[str] = (), **changes: Any) -> str:
    run_id = log.begin(new_run(**changes))
    if tags:
        log.annotate(run_id, tags=tags)
    log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
    log.add_steps(run_id, [step(0), step(1)])
    figures = {"mat": 2.0, "tok_s": 40.0, "ttft_s": 0.05, "num_new_tokens": 5, "num_steps": 2}
    figures["num_prompt_tokens"] = 3
    output_ids = [5, 6, 9, 6, 9]
    end = {"output_ids": output_ids, "text": "abdbd", "finish_reason": "length"}
    finish(log, run_id, {**figures, "decode_s": 0.1}, **end)
    return run_id


def odd_run(log: RunLog) -> StoredRun:
    """Everything that a careless format loses: NaN, infinities, NULs, lone surrogates, newlines."""
    run_id = log.begin(
        new_run(
            environment={"weird": [math.nan, -math.inf, {"$x": "lone \udcff"}], "": None},
            prompt_text="line\nline\u2028\x00 🙂",
            messages=({"role": "user", "content": "line\nline"},),
            labels={"turn": "0"},
            experiment_id="b1",
            kind="benchmark",
            sampling={"seed": 2**63, "temperature": 0.1},
        )
    )
    log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
    log.add_steps(run_id, [step(0, draft_probs=(None, math.nan, math.inf)), step(1)])
    finish(
        log,
        run_id,
        {"mat": math.nan, "tok_s": 1e-30, "time_split": {"draft_s": 0.25}},
        status="failed",
        output_ids=[5, 6],
        text="a\x00b\r\n",
        error="it broke",
    )
    log.annotate(run_id, name="=näme", note="a note", tags=("a", "b"))
    return whole(log, run_id)


def detail(log: RunLog, run_id: str | None) -> RunDetail:
    run = log.get(run_id or "")
    assert run is not None
    return run


def whole(log: RunLog, run_id: str) -> StoredRun:
    stored = log.read_whole(run_id)
    assert stored is not None
    return stored
