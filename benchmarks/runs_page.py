"""How long the Runs page's questions take in the server, over a log of synthetic runs.

    python benchmarks/runs_page.py [--runs 100000] [--prompts 2000] [--db URL] [--repeats 20]

Writes the runs as an import would, then asks what the page asks: first page, filter, sort, deep
page, text search, groups. Prints median and 95th percentile in milliseconds, and the processor time
of the median question, which other programs on the machine hardly change. With --db the log is
kept there, in a SQLite file or a PostgreSQL database, and used again the next time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from playground.runs.query import TableQuery
from playground.runs.table import RunTable
from storage import RunDetail, RunLog, StoredRun

TARGETS = ("smollm2-135m-instruct", "qwen3-0.6b", "llama-3.2-1b", "tinyllama-1.1b")
METHODS = (
    ("Autoregressive", "Plain decoding"),
    ("NGram", "N-gram"),
    ("Suffix", "Suffix automaton"),
    ("Medusa", "Medusa heads"),
    ("Eagle", "EAGLE-2, dynamic tree"),
    ("Draft_Target", "Draft model"),
)
STATUSES = ("completed",) * 17 + ("cancelled", "failed", "interrupted")
CATEGORIES = ("chat", "translation", "summarization", "qa", "math", "rag", "code")
WORDS = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "Überlegung naïve función matrix tensor kernel draft verify accept token tree branch cache"
).split()
BATCH = 500
QUESTIONS: dict[str, dict[str, Any]] = {
    "first page": {},
    "first page, single requests": {"group": "run"},
    "filter: target": {"target": TARGETS[1]},
    "filter: target, method, status": {
        "target": TARGETS[1],
        "method_title": METHODS[3][1],
        "status": "completed",
    },
    "filter: label": {"labels": {"category": "math"}},
    "filter: tag": {"tag": "keep"},
    "filter: tok/s at least 90": {"ranges": {"tok_s": [90, None]}},
    "sort: tok/s": {"sort": "tok_s"},
    "sort: steps, ascending": {"sort": "num_steps", "descending": False},
    "sort: method": {"sort": "method_title", "descending": False},
    "filter and sort: target by TTFT": {"target": TARGETS[2], "sort": "ttft_s"},
    "filter and sort: target, label by MAT": {
        "target": TARGETS[2],
        "labels": {"category": "code"},
        "sort": "mat",
    },
    "deep page": {"page": -1},
    "deep page, single requests": {"group": "run", "page": -1},
    "deep page of a filter, sorted": {"target": TARGETS[0], "sort": "mat", "page": -1},
    "search: a common word": {"text": "TENSOR"},
    "search: a rare word": {"text": "needle in"},
    "search: nothing": {"text": "no such words"},
    "search: another script's case": {"text": "ÜBERLEGUNG"},
    "search, filter and sort": {"text": "kernel", "target": TARGETS[0], "sort": "tok_s"},
}
GROUPS = ("method_title", "setup_id", "prompt_id", "label:category")


def main() -> None:
    """Build, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=2000, help="different prompts")
    parser.add_argument("--db", default=None, help="keep the log here")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog.open(options.db or str(Path(folder) / "runs.sqlite3"))
        try:
            build(log, options.runs, options.prompts)
            report(log, options.repeats)
        finally:
            log.close()


def build(log: RunLog, num_runs: int, num_prompts: int) -> None:
    """Fill an empty log."""
    if log.find().total:
        return
    started = time.monotonic()
    runs = synthetic(num_runs, num_prompts)
    while batch := list(islice(runs, BATCH)):
        log.write_whole(batch)
    ids = [row.id for row in log.find().rows]
    log.retag(ids[::5], add=["keep"])
    log.set_note(ids[7], "the needle in the haystack")
    print(f"{num_runs} runs written in {time.monotonic() - started:.0f} s")


def report(log: RunLog, repeats: int) -> None:
    """Ask every question several times."""
    runs = RunTable(log)

    def total(asked: dict[str, Any]) -> int:
        return int(runs.view(TableQuery.parse(asked))["total"])

    print(f"{'question':42}{'median ms':>10}{'p95 ms':>9}{'CPU ms':>10}{'runs':>9}")
    for name, asked in QUESTIONS.items():
        if asked.get("page") == -1:
            asked = {**asked, "page": max(0, (total({**asked, "page": 0}) - 1) // 50)}
        _print(name, repeats, lambda asked=asked: total(asked))  # type: ignore[misc]
    for by in GROUPS:
        asked = {"group": by}
        _print(f"groups: {by}", repeats, lambda asked=asked: total(asked))  # type: ignore[misc]
    _print("values to filter by", repeats, lambda: len(log.facets().targets))


def _print(name: str, repeats: int, ask: Any) -> None:
    took: list[float] = []
    busy: list[float] = []
    found = 0
    for _ in range(repeats):
        started, began = time.perf_counter(), time.thread_time()
        found = ask()
        took.append(1000 * (time.perf_counter() - started))
        busy.append(1000 * (time.thread_time() - began))
    late = quantiles(took, n=20)[-1]
    print(f"{name:42}{median(took):10.1f}{late:9.1f}{median(busy):10.1f}{found:9}")


def synthetic(num_runs: int, num_prompts: int) -> Iterator[StoredRun]:
    """Runs as a year of benchmarks leaves them, without step records; the same ones every time."""
    random_ = random.Random(7)
    prompts = [_text(random_, random_.randint(5, 400)) for _ in range(num_prompts)]
    began = datetime(2025, 1, 1, tzinfo=UTC)
    for number in range(num_runs):
        at = began + timedelta(seconds=300 * number + random_.random())
        yield StoredRun(_run(random_, number, at, prompts), ())


def _text(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choices(WORDS, k=num_words))


def _run(random_: random.Random, number: int, at: datetime, prompts: list[str]) -> RunDetail:
    decoding_type, title = random_.choice(METHODS)
    prompt = random_.randrange(len(prompts))
    mat = 1 + 3 * random_.random() if decoding_type != "Autoregressive" else 1.0
    tok_s = 25 * mat * (0.6 + 0.4 * random_.random())
    steps = random_.randint(20, 200)
    figures: dict[str, Any] = {
        "num_prompt_tokens": random_.randint(10, 600),
        "num_new_tokens": int(steps * mat),
        "num_steps": steps,
        "mat": mat,
        "tok_s": tok_s,
        "ttft_s": 0.05 + random_.random() / 3,
        "itl_ms": 1000 / tok_s,
        "step_p50_ms": 1000 * mat / tok_s,
        "step_p95_ms": 1300 * mat / tok_s,
        "draft_acceptance": random_.random(),
    }
    split = {"draft_s": 0.004, "verify_s": 0.03, "accept_s": 0.0004, "other_s": 0.0006}
    ids = tuple(random_.randrange(49152) for _ in range(120))
    return RunDetail(
        id=f"{random_.getrandbits(64):016x}",
        created_at=at,
        status=random_.choice(STATUSES),
        target=random_.choice(TARGETS),
        decoding_type=decoding_type,
        method_title=title,
        lossless=True,
        dtype="bfloat16",
        device="cpu",
        method={"decoding_type": decoding_type, "max_draft_len": random_.randint(1, 8)},
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": number},
        limits={"max_new_tokens": 256, "ignore_eos": False, "stop": []},
        setup_id="",
        prompt_id="",
        prompt_text=prompts[prompt],
        prompt_ids=ids[:60],
        messages=({"role": "user", "content": prompts[prompt]},),
        environment={"cpu": "a processor", "versions": {"torch": "2.13.0", "transformers": "5.23"}},
        finish_reason="eos",
        name="",
        note="",
        tags=("nightly",) if number % 10 == 0 else (),
        labels={"category": CATEGORIES[prompt % 7], "repeat": str(number % 3)},
        benchmark_id=f"bench{number // 2000:04}" if number % 4 else None,
        deleted=False,
        first_token_id=ids[0],
        first_text="The",
        output_ids=ids,
        text=_text(random_, 90),
        metrics={**figures, "time_split": split, "position_rates": [0.8, 0.5, 0.2]},
        error=None,
        **figures,
        **split,
    )


if __name__ == "__main__":
    main()
