"""Benchmarks: suites × methods, kept in the log, run and shown for as many pages as look."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from pydantic import field_validator

from engine.config import Limits, Sampling, Settings, setting
from engine.errors import ConfigError, PlaygroundError, one_of
from playground.errors import attempt
from playground.experiments.cluster import workers_of
from playground.experiments.finished import FinishedRequest, RunGroup, finished_requests
from playground.experiments.job import Job, Jobs, Progress, State, submit
from playground.experiments.measurement import Measurement, Summary, check_same_target
from playground.experiments.plan import Configuration, ExperimentPlan, Types
from playground.experiments.pool import Pool
from playground.experiments.prompt_files import read_suite_text
from playground.experiments.report.audits import audits_of
from playground.experiments.report.export import FILES, Results
from playground.experiments.report.report import make_report
from playground.experiments.shards import measure_shards
from playground.experiments.suites import choose_items
from playground.host.bounded import BoundedCache
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import check_size, config_of, read_dtype
from playground.host.runner import EngineHost
from presets import PromptSuite
from storage import Benchmark, BenchmarkHead, RunLog, RunQuery, StorageError, new_id

KIND = "benchmark"
"""`kind` of a plan in the log that is a benchmark of this package."""
MAX_CONFIGURATIONS = 12
MAX_REQUESTS = 200_000
MAX_NAME = 60
MAX_FILES = 16
MAX_LISTED = 40
MAX_SKIPPED = 50
MAX_KEPT_BYTES = 256_000_000
"""Of the reports that are kept ready."""
BYTES_PER_REQUEST, BYTES_PER_TOKEN = 3000, 48
Report = tuple[str, Results]
"""A version, which tells a report from the next one, and what it shows."""
REPORT_EVERY_S = 3.0


# ---- in the log


def begin(
    log: RunLog, plan: ExperimentPlan, name: str = "", *, benchmark_id: str | None = None
) -> str:
    """Write a plan down before its first request; returns the benchmark's id."""
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    own = f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"
    values = {"kind": KIND, **plan.to_dict()}
    return log.benchmarks.begin(name or own, values, benchmark_id=benchmark_id)


def stored_benchmark(log: RunLog, benchmark_id: str) -> Benchmark:
    found = log.benchmarks.get(benchmark_id)
    if found is None or found.plan.get("kind") != KIND:
        raise _unknown(benchmark_id)
    return found


def _unknown(benchmark_id: str) -> ConfigError:
    return ConfigError(f"No benchmark {benchmark_id!r:.80} is in the log.")


def plan_to_resume(log: RunLog, benchmark_id: str, types: Types | None = None) -> ExperimentPlan:
    return ExperimentPlan.stored(stored_benchmark(log, benchmark_id).plan, types)


def environment_of(log: RunLog, benchmark_id: str) -> Mapping[str, Any]:
    """Where the benchmark's first request ran; empty before it."""
    query = RunQuery(benchmark_id=benchmark_id, descending=False, limit=1)
    first = next(iter(log.rows(query)), None)
    detail = None if first is None else log.get(first.id)
    return {} if detail is None else detail.environment


def conduct(log: RunLog, benchmark_id: str, measure: Callable[[], Summary]) -> Summary:
    """Measure what is missing of a benchmark and write down how it ended."""
    status: Literal["completed", "cancelled", "failed"] = "failed"
    ended: dict[str, Any] = {"skipped": [], "num_failed": 0}
    try:
        summary = measure()
        status = summary.status
        ended["skipped"] = [asdict(skip) for skip in summary.skipped]
        ended["num_failed"] = summary.num_failed
        return summary
    except CancelledError:
        status = "cancelled"
        raise
    except (PlaygroundError, StorageError) as error:
        ended["error"] = str(error)
        raise
    finally:
        log.benchmarks.finish(benchmark_id, status, ended)


def read_results(
    log: RunLog, benchmark_id: str, requests: Iterable[FinishedRequest] | None = None
) -> Results:
    """Everything that a benchmark has shown so far.

    Args:
        requests: its finished requests where they are at hand; else they are read from the log.
    """
    benchmark = stored_benchmark(log, benchmark_id)
    found = tuple(finished_requests(log, benchmark_id) if requests is None else requests)
    planned = None if benchmark.status == "completed" else num_planned(benchmark.plan)
    report = make_report(benchmark.plan, found, audits_of(log, benchmark_id), planned=planned)
    return Results(benchmark, found, report, environment_of(log, benchmark_id))


def num_planned(plan: Mapping[str, Any]) -> int:
    """Requests of a stored plan."""
    turns = sum(len(item["turns"]) for item in plan["items"])
    return turns * int(plan["repeats"]) * len(plan["configurations"])


# ---- what a page asks for


class Extent(Settings):
    """How much of the suites is run, and how often."""

    limit_per_category: int | None = setting(
        None,
        "Prompts of each kind",
        "maximum number of prompts of each kind of task; empty = all",
        ge=1,
        le=10_000,
    )
    repeats: int = setting(
        2,
        "Repeats",
        "runs of each prompt; more repeats narrow the interval",
        ge=1,
        le=20,
    )


class ConfigurationForm(Settings):
    method: str
    name: str
    settings: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _readable(cls, name: str) -> str:
        if not 0 < len(name.strip()) <= MAX_NAME:
            raise ValueError(f"A configuration's name must have 1 to {MAX_NAME} characters")
        if not name.isprintable():
            raise ValueError("A configuration's name must be printable")
        return name.strip()


class BenchmarkForm(Settings):
    """What the Benchmark page's form holds; settings as their controls hold them."""

    target: str
    dtype: str
    suites: list[str]
    categories: list[str] = []
    configurations: list[ConfigurationForm]
    extent: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling: dict[str, Any] = {}

    @field_validator("configurations")
    @classmethod
    def _some(cls, given: list[ConfigurationForm]) -> list[ConfigurationForm]:
        if not 1 <= len(given) <= MAX_CONFIGURATIONS:
            raise ValueError(
                f"A benchmark takes 1 to {MAX_CONFIGURATIONS} configurations besides plain "
                "decoding. Add a method"
            )
        return given

    def plan(self, catalog: Catalog, suites: Mapping[str, PromptSuite]) -> ExperimentPlan:
        """Raises ConfigError: naming what is wrong."""
        keys = list(dict.fromkeys(self.suites))
        if not keys:
            raise ConfigError("No suite is selected. Select one, or add a file of prompts.")
        extent = settings_from(Extent, self.extent, where="extent")
        configurations = []
        for one in self.configurations:
            method = catalog.method(one.method)
            config = config_of(method, one.settings)
            configurations.append(Configuration(one.name, method.title, config))
        plan = ExperimentPlan.parse(
            {
                "target": catalog.target(self.target),
                "dtype": read_dtype(self.dtype),
                "configurations": configurations,
                "items": choose_items(
                    [suites[one_of("suites", key, suites)] for key in keys],
                    categories=self.categories,
                    limit_per_category=extent.limit_per_category,
                ),
                "repeats": extent.repeats,
                "sampling": settings_from(Sampling, self.sampling, where="sampling"),
                "limits": settings_from(Limits, {"max_new_tokens": 128, **self.limits}),
            }
        )
        if plan.num_requests > MAX_REQUESTS:
            raise ConfigError(
                f"A benchmark may have {MAX_REQUESTS} requests; this one has {plan.num_requests}. "
                "Limit the prompts of each kind."
            )
        return plan


@dataclass(frozen=True, slots=True)
class BenchmarkState:
    """A benchmark as it stands.

    Attributes:
        job: while this server runs it.
        version: changes with what has been measured.
    """

    benchmark: Benchmark
    job: Job | None
    version: str
    results: Results


class Benchmarks:
    def __init__(self, host: EngineHost) -> None:
        self._log = host.log
        self._catalog = host.catalog
        self._host = host
        self._jobs = Jobs(host)
        self._lock = threading.Lock()
        self._files: OrderedDict[str, PromptSuite] = OrderedDict()
        self._kept: BoundedCache[str, Report] = BoundedCache(MAX_KEPT_BYTES, _bytes_of)
        """Reports that are ready, by benchmark."""

    @property
    def suites(self) -> dict[str, PromptSuite]:
        """The shipped suites, and the files that browsers sent."""
        with self._lock:
            return {**self._catalog.suites, **self._files}

    def add_file(self, name: str, text: str) -> str:
        """Read a file of prompts; its suite is offered under this key until the server ends."""
        if not 0 < len(name) <= 200:
            raise ConfigError("A file of prompts must have a name and a text.")
        suite = read_suite_text(text, name, where=name)
        key = "file:" + hashlib.sha256(f"{name}\n{text}".encode(errors="replace")).hexdigest()[:16]
        with self._lock:
            self._files[key] = suite
            while len(self._files) > MAX_FILES:
                self._files.popitem(last=False)
        return key

    def plan(self, form: Mapping[str, Any]) -> ExperimentPlan:
        """What a form asks for."""
        check_size(form)
        return BenchmarkForm.parse(form).plan(self._catalog, self.suites)

    def start(self, form: Mapping[str, Any], pool: Pool | None = None) -> str:
        """Begin a benchmark and queue it, or have workers measure it; returns its id.

        Raises:
            ConfigError: the form is wrong.
            QueueFullError, ClosingError: it was not taken on; then the log has nothing of it.
        """
        plan, benchmark_id = self.plan(form), new_id()
        write = partial(begin, self._log, plan, benchmark_id=benchmark_id)
        self._launch(benchmark_id, plan, pool, write)
        return benchmark_id

    def resume(self, benchmark_id: str, pool: Pool | None = None) -> None:
        """Go on with a benchmark."""
        plan = plan_to_resume(self._log, benchmark_id, self._catalog.types)
        write = partial(self._log.benchmarks.resume, benchmark_id)
        self._launch(benchmark_id, plan, pool, write)

    def stop(self, benchmark_id: str) -> None:
        """End a benchmark that runs here; what is done is kept."""
        job = self._jobs.get(benchmark_id)
        if job is None:
            raise ConfigError("Another server runs this benchmark. Stop it there.")
        job.cancel()

    def newest(self) -> tuple[BenchmarkHead, ...]:
        return self._log.benchmarks.list(MAX_LISTED)

    def look(self, benchmark_id: str) -> BenchmarkState:
        """A benchmark as it stands; its plan and requests are read when there is something new."""
        job = self._jobs.get(benchmark_id)
        head = self._log.benchmarks.head(benchmark_id)
        if head is None:
            raise _unknown(benchmark_id)
        version, results = self._report(head, running=job is not None)
        now = {field.name: getattr(head, field.name) for field in fields(BenchmarkHead)}
        return BenchmarkState(replace(results.benchmark, **now), job, version, results)

    def file(self, benchmark_id: str, name: object) -> str:
        """One of the report's files, as text."""
        return FILES[one_of("name", name, FILES)](read_results(self._log, benchmark_id))

    # ---- running

    def _launch(
        self,
        benchmark_id: str,
        plan: ExperimentPlan,
        pool: Pool | None,
        write: Callable[[], object],
    ) -> None:
        """Queue it, then `write` that it runs."""
        job = Job(benchmark_id, owner=f"benchmark {benchmark_id}")
        tell = self._teller(job, benchmark_id)
        told: dict[str, Any] = {"tell": tell, "cancelled": job.cancelled}

        def check(environment: Mapping[str, Any]) -> None:
            then = self._log.wait_for(lambda: environment_of(self._log, benchmark_id))
            check_same_target(then, environment)

        def by_workers(pool: Pool) -> Summary:
            with workers_of(self._host, job, pool, plan) as running:
                check(running.environment)
                return measure_shards(running, plan, benchmark_id, **told)

        def take_on() -> Callable[[], State]:
            if pool is None:
                group = RunGroup(benchmark_id)
                measurement = Measurement(plan=plan, log=self._log, group=group, **told)
                queued = submit(
                    self._host,
                    job,
                    plan,
                    measurement.run,
                    check=lambda target: check(target.environment()),
                )
            else:
                queued = partial(by_workers, pool)
            write()
            return lambda: conduct(self._log, benchmark_id, queued).status

        self._jobs.start(job, take_on)

    def _teller(self, job: Job, benchmark_id: str) -> Callable[[Progress], None]:
        """Takes a job's progress; a report every few seconds, between two requests."""
        requests = finished_requests(self._log, benchmark_id)
        drawn_s = time.monotonic()
        turn = threading.Lock()

        def draw() -> None:
            results = read_results(self._log, benchmark_id, requests)
            self._kept.put(benchmark_id, (f"running here {len(requests)}", results))

        def tell(progress: Progress) -> None:
            nonlocal drawn_s
            job.tell(progress)
            if progress.last is None:
                return
            with turn:  # workers report side by side
                requests.append(progress.last)
                if time.monotonic() - drawn_s >= REPORT_EVERY_S or len(requests) == 1:
                    attempt(draw, where=f"the report of benchmark {benchmark_id}")
                    drawn_s = time.monotonic()

        return tell

    # ---- what is shown

    def _report(self, head: BenchmarkHead, *, running: bool) -> Report:
        """The report; of a benchmark that runs here, the last that was made."""
        done = RunQuery(benchmark_id=head.id, status="completed")
        version = f"{head.status} {self._log.count(done)}"

        def read(kept: Report | None) -> Report:
            known = () if kept is None else kept[1].requests
            requests = finished_requests(self._log, head.id, known)
            return version, read_results(self._log, head.id, requests)

        return self._kept.read(head.id, read, stale=lambda kept: not running and kept[0] != version)


def _bytes_of(report: Report) -> int:
    """What a report keeps in memory: its requests, by far."""
    requests = report[1].requests
    tokens = sum(len(request.output_ids) for request in requests)
    return BYTES_PER_REQUEST * len(requests) + BYTES_PER_TOKEN * tokens
