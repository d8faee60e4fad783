"""How long the Runs page's questions take in the server, over a log of synthetic runs.

    python -m benchmarks.runs_page [--runs 100000] [--prompts 2000] [--db URL] [--repeats 20]

Writes runs as an import would, up to 10,000; more are copies of these, made by the database. Then
asks what the page asks: first page, every order, filters, deep pages, text search, groups; and what
other pages ask of the log. `--prompts` counts different ones. Prints median and 95th percentile in
milliseconds, and the processor time of the median question in this process, which other programs on
the machine hardly change. With --db the log is kept there, in a SQLite file or a PostgreSQL
database, and used again the next time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any, get_args

import sqlalchemy as sa

from benchmarks import read_options
from playground.export import offered_runs
from playground.host.catalog import Catalog
from playground.host.menu import MethodMenu
from playground.runs.query import TableQuery
from playground.runs.table import RunTable
from storage import RunDetail, RunLog, RunQuery, SortKey, Status, StoredRun
from storage import schema as tables

TARGETS = ("smollm2-135m-instruct", "qwen3-0.6b", "llama-3.2-1b", "tinyllama-1.1b")
METHODS = (
    ("Autoregressive", "Plain decoding"),
    ("NGram", "N-gram"),
    ("Suffix", "Suffix automaton"),
    ("Medusa", "Medusa heads"),
    ("Eagle", "EAGLE-2, dynamic tree"),
    ("Draft_Target", "Draft model"),
)
STATUSES: tuple[Status, ...] = ("completed",) * 17 + ("cancelled", "failed", "interrupted")
CATEGORIES = ("chat", "translation", "summarization", "qa", "math", "rag", "code")
WORDS = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "Überlegung naïve función matrix tensor kernel draft verify accept token tree branch cache"
).split()
BATCH = 500
WRITTEN = 10_000
"""Runs that are written one by one; a database copies them much faster."""
QUERIES: dict[str, dict[str, Any]] = {
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
    "filter: benchmark": {"experiment_id": "bench0000x1"},
    "filter: status": {"status": "failed"},
    "filter: dtype, device": {"dtype": "bfloat16", "device": "cpu"},
    "filter: deleted": {"deleted": True},
    "filter: two that exclude each other": {
        "target": TARGETS[1],
        "method_title": "N-gram",
        "decoding_type": "Suffix",
    },
    **{f"sort: {sort}": {"sort": sort} for sort in get_args(SortKey)},
    "filter and sort: target by TTFT": {"target": TARGETS[2], "sort": "ttft_s"},
    "filter and sort: target, label by MAT": {
        "target": TARGETS[2],
        "labels": {"category": "code"},
        "sort": "mat",
    },
    "page 200": {"page": 199},
    "page 200, single requests": {"group": "run", "page": 199},
    "page 200 of a filter, sorted": {"target": TARGETS[0], "sort": "mat", "page": 199},
    "search: a common word": {"text": "TENSOR"},
    "search: a rare word": {"text": "needle in"},
    "search: nothing": {"text": "no such words"},
    "search: another script's case": {"text": "ÜBERLEGUNG"},
    "search, filter and sort": {"text": "kernel", "target": TARGETS[0], "sort": "tok_s"},
}
GROUPS = ("method_title", "setup_id", "prompt_id", "label:category")


def main() -> None:
    """Build, ask, print."""
    options = read_options(
        __doc__,
        smoke={"runs": 60, "prompts": 20, "repeats": 2},
        runs=100_000,
        prompts=2000,
        db="",
        repeats=20,
    )
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        log = RunLog.open(options.db or str(Path(folder) / "runs.sqlite3"))
        print(f"opened in {time.monotonic() - started:.1f} s")
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
    written = min(num_runs, WRITTEN)
    runs = synthetic(written, num_prompts)
    while batch := list(islice(runs, BATCH)):
        log.write_whole(batch)
    for copy in range(1, -(-num_runs // written)):
        with log._database.transaction() as connection:
            for table in (tables.runs, tables.run_details, tables.labels, tables.tags):
                connection.execute(_copied(table, copy, connection.dialect.name))
    ids = [row.id for row in log.rows(RunQuery(limit=1000))]
    for run_id in ids[::5]:
        log.annotate(run_id, tags=["keep"])
    log.annotate(ids[7], note="the needle in the haystack")
    log.set_deleted(ids[3::50])
    with log._database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET lock_timeout = 0")  # its own vacuum may be at it
            connection.exec_driver_sql("VACUUM")
        connection.exec_driver_sql("ANALYZE")
    print(f"{num_runs} runs written in {time.monotonic() - started:.0f} s")


def _copied(table: sa.Table, copy: int, database: str) -> sa.Insert:
    """The first rows again, as later and faster runs of other ids and of other benchmarks."""
    column = table.c.id if "id" in table.c else table.c.run_id
    changes: dict[str, Any] = {column.name: column.concat(f"-{copy:04}")}
    if table is tables.runs:
        at, later = sa.type_coerce(table.c.created_at, sa.DateTime), 300 * WRITTEN * copy
        moved = sa.func.strftime("%Y-%m-%d %H:%M:%f000", at, f"+{later} seconds")
        changes["created_at"] = moved if database == "sqlite" else at + timedelta(seconds=later)
        changes |= {n: table.c[n].concat(f"x{copy}") for n in ("experiment_id",)}
        changes |= {n: table.c[n] * (1 + copy / 1000) for n in ("tok_s", "mat", "ttft_s")}
    values = [changes.get(name, value) for name, value in table.c.items()]
    first = sa.select(*values).where(sa.func.length(column) == 16)
    return table.insert().from_select(table.c.keys(), first)


def report(log: RunLog, repeats: int) -> None:
    """Ask every question several times."""
    runs = RunTable(log)
    menu = MethodMenu(Catalog.shipped(), log)

    def rows(query: dict[str, Any]) -> int:
        return len(runs.view(TableQuery.parse(query))["rows"])

    print(f"{'question':42}{'median ms':>10}{'p95 ms':>9}{'CPU ms':>10}{'rows':>9}")
    queries = {**QUERIES, **{f"groups: {by}": {"group": by} for by in GROUPS}}
    for name, query in queries.items():
        _print(name, repeats, partial(rows, query))
    _print("values to filter by", repeats, lambda: len(runs.menus([])["targets"]))
    _print("Deploy: what is offered", repeats, lambda: len(offered_runs(log)))
    _print("Generate: the menu of methods", repeats, lambda: len(menu.choices(TARGETS[0])))
    _print("the newest runs", repeats, lambda: len(log.rows(RunQuery())))


def _print(name: str, repeats: int, ask: Callable[[], int]) -> None:
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    total_rows = 0
    for _ in range(repeats):
        started, began = time.perf_counter(), time.thread_time()
        total_rows = ask()
        wall_ms.append(1000 * (time.perf_counter() - started))
        cpu_ms.append(1000 * (time.thread_time() - began))
    late = quantiles(wall_ms, n=20)[-1]
    print(f"{name:42}{median(wall_ms):10.1f}{late:9.1f}{median(cpu_ms):10.1f}{total_rows:9}")


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
    split: dict[str, Any] = {
        "draft_s": 0.004,
        "verify_s": 0.03,
        "accept_s": 0.0004,
        "other_s": 0.0006,
    }
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
        experiment_id=f"bench{number // 2000:04}" if number % 4 else None,
        kind="benchmark" if number % 4 else None,
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
