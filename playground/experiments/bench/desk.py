"""What the Benchmark page does: start, watch, stop, go on; a benchmark is one job of the engine.

It belongs to no browser tab: closing the page leaves it running, and every tab sees it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.bench import session
from playground.experiments.bench.export import FILES
from playground.experiments.bench.form import (
    menus,
    method_fields,
    method_menu,
    outlook,
    plan_of_form,
    suite_entry,
)
from playground.experiments.bench.latency import DEFINITIONS, ROWS
from playground.experiments.bench.layouts import read_suite_text
from playground.experiments.bench.measured import Measured, measured_runs
from playground.experiments.bench.plan import Plan
from playground.experiments.bench.progress import Progress, time_left
from playground.experiments.bench.report import FORMULAS
from playground.experiments.bench.session import Results
from playground.experiments.bench.view import head_of, view_of
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from presets import PromptSuite
from storage import Benchmark, RunQuery

MAX_FILES = 16
MAX_LISTED = 40
MAX_SHOWN = 8
"""Reports that are kept ready."""
DRAW_EVERY_S = 3.0


@dataclass(frozen=True, slots=True)
class HostBench:
    """The engine's target, and drafters that only this benchmark uses."""

    target: Target
    host: EngineHost

    def new_drafter(self, config: MethodConfig) -> Drafter:
        return self.host.new_drafter(config)


@dataclass(slots=True)
class Running:
    """A benchmark in the engine's queue or on its thread."""

    id: str
    run: LiveRun
    plan: Plan
    progress: Progress | None = None
    requests: list[Measured] = field(default_factory=list)
    drawn_s: float = 0.0


@dataclass(slots=True)
class _Shown:
    """A report as the page draws it; another one has another `version`."""

    version: str
    requests: tuple[Measured, ...] = field(repr=False)
    view: Mapping[str, Any] = field(repr=False)


class BenchDesk:
    """Benchmarks of one server."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._files: OrderedDict[str, PromptSuite] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._shown: OrderedDict[str, _Shown] = OrderedDict()

    # ---- the form

    def menus(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Targets, suites, and the controls that all configurations share."""
        latency = {key: [title, DEFINITIONS[key]] for key, title in ROWS.items()}
        found = menus(self.host.catalog, dict(self._files))
        return {**found, "formulas": {**FORMULAS, **DEFINITIONS}, "latency_rows": latency}

    def methods(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Methods that fit a target."""
        return {"methods": method_menu(self.host.catalog, asked.get("target"))}

    def fields(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A method's settings."""
        return method_fields(self.host.catalog, asked.get("method"))

    def add_file(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Read a file of prompts that the browser sent; it is offered until the server ends."""
        name, text = asked.get("name"), asked.get("text")
        if not isinstance(name, str) or not isinstance(text, str) or not 0 < len(name) <= 200:
            raise ConfigError("A file of prompts must have a name and a text.")
        suite = read_suite_text(text, name, where=name)
        key = "file:" + hashlib.sha256(f"{name}\n{text}".encode(errors="replace")).hexdigest()[:16]
        with self._lock:
            self._files[key] = suite
            while len(self._files) > MAX_FILES:
                self._files.popitem(last=False)
        return suite_entry(key, suite)

    def outlook(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What would be run, or why it cannot."""
        return outlook(plan_of_form(self.host.catalog, dict(self._files), asked))

    # ---- benchmarks

    def start(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a benchmark and queue it."""
        plan = plan_of_form(self.host.catalog, dict(self._files), asked)
        benchmark_id = session.begin(self.host.log, plan)
        self._queue(benchmark_id, plan)
        return {"id": benchmark_id}

    def resume(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Go on with a benchmark."""
        benchmark_id = _id(asked)
        plan = session.plan_to_resume(self.host.log, benchmark_id, self.host.catalog.types)
        with self._lock:
            if benchmark_id in self._running:
                raise ConfigError("This benchmark is running already.")
        self.host.log.benchmarks.resume(benchmark_id)
        self._queue(benchmark_id, plan)
        return {"id": benchmark_id}

    def stop(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """End a benchmark that runs here; what is done is kept."""
        running = self._running.get(_id(asked))
        if running is None:
            raise ConfigError("This benchmark is not run by this server. Stop it where it runs.")
        running.run.cancel()
        return {}

    def benchmarks(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The newest benchmarks, newest first."""
        found = self.host.log.benchmarks.list(MAX_LISTED)
        kept = [b for b in found if b.plan.get("kind") == session.KIND]
        return {"benchmarks": [head_of(b, here=b.id in self._running) for b in kept]}

    def look(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A benchmark as it stands; without the report if `have` names its version."""
        benchmark_id = _id(asked)
        running = self._running.get(benchmark_id)
        benchmark = session.stored_plan(self.host.log, benchmark_id)
        head = head_of(benchmark, here=running is not None)
        progress = None if running is None else self._progress(running)
        shown = self._view(benchmark, running)
        found = {**head, "version": shown.version, "progress": progress}
        return found if asked.get("have") == shown.version else {**found, **shown.view}

    def file(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One of the report's files, as text."""
        name = asked.get("name")
        if name not in FILES:
            raise ConfigError(f"name must be one of {', '.join(FILES)}, got {name!r:.60}.")
        results = session.read_results(self.host.log, _id(asked))
        return {"name": f"benchmark-{_id(asked)}-{name}", "text": FILES[name](results)}

    # ---- running

    def _queue(self, benchmark_id: str, plan: Plan) -> None:
        """Raises QueueFullError: too many are waiting; the benchmark can be resumed."""

        def work(run: LiveRun) -> None:
            with self._lock:
                running = self._running[benchmark_id]
            done = attempt(lambda: self._conduct(running), where=f"benchmark {benchmark_id}")
            if isinstance(done, Fault):
                self._finish(benchmark_id, "failed", done.sentence)
                run.end("failed", error=done.sentence)

        with self._lock:
            try:
                run = self.host.submit(work, owner=f"benchmark {benchmark_id}")
            except PlaygroundError as error:
                self._finish(benchmark_id, "cancelled", str(error))
                raise
            self._running[benchmark_id] = Running(benchmark_id, run, plan)
        seen_off = threading.Thread(target=self._see_off, args=(benchmark_id, run), daemon=True)
        seen_off.start()

    def _conduct(self, running: Running) -> None:
        log, plan, run = self.host.log, running.plan, running.run
        target = self.host.prepare(run, plan.target, plan.dtype)
        then = session.environment_of(log, running.id)
        session.check_same_target({"environment": then}, target)
        run.state = "running"
        running.requests = measured_runs(log, running.id)

        def tell(progress: Progress) -> None:
            running.progress = progress
            if progress.last is not None:
                running.requests.append(progress.last)
                self._draw(running)

        outcome = session.conduct(
            plan,
            HostBench(target, self.host),
            log,
            running.id,
            tell=tell,
            cancelled=run.cancel_asked.is_set,
        )
        run.end(outcome.status)

    def _draw(self, running: Running) -> None:
        """A report every few seconds, made here between two requests so that it slows none."""
        now = time.monotonic()
        if now - running.drawn_s >= DRAW_EVERY_S:
            results = session.read_results(self.host.log, running.id, running.requests)
            self._keep(f"running here {len(running.requests)}", results)
            running.drawn_s = time.monotonic()

    def _finish(
        self, benchmark_id: str, status: Literal["cancelled", "failed"], error: str | None
    ) -> None:
        self.host.log.benchmarks.finish(benchmark_id, status, {"error": error})

    def _see_off(self, benchmark_id: str, run: LiveRun) -> None:
        """Once it is over in whatever way, the log says so and it is no longer here."""
        run.over.wait()
        stored = self.host.log.benchmarks.get(benchmark_id)
        if stored is not None and stored.status == "running":
            self._finish(benchmark_id, "cancelled", run.error)
        with self._lock:
            self._running.pop(benchmark_id, None)

    # ---- what is shown

    def _keep(self, version: str, results: Results) -> _Shown:
        made = _Shown(version, results.requests, view_of(results))
        with self._lock:
            self._shown[results.benchmark.id] = made
            self._shown.move_to_end(results.benchmark.id)
            while len(self._shown) > MAX_SHOWN:
                self._shown.popitem(last=False)
        return made

    def _view(self, benchmark: Benchmark, running: Running | None) -> _Shown:
        """The report as the page draws it; of one that runs here, the last that was made."""
        log = self.host.log
        with self._lock:
            kept = self._shown.get(benchmark.id)
        done = RunQuery(benchmark_id=benchmark.id, status="completed", limit=1)
        version = f"{benchmark.status} {log.find(done).total}"
        if kept is not None and (running is not None or kept.version == version):
            return kept
        known = measured_runs(log, benchmark.id, () if kept is None else kept.requests)
        return self._keep(version, session.read_results(log, benchmark.id, known))

    def _progress(self, running: Running) -> dict[str, Any]:
        ahead = self.host.ahead_of(running.run)
        if running.progress is None:
            words = f"waiting for the engine, {ahead} ahead" if ahead else running.run.words
            return {"num_failed": 0, "share": None, "words": words, "left": "", "counts": ""}
        now = running.progress
        words = "stopping" if running.run.cancel_asked.is_set() else now.words
        return {
            "num_failed": now.num_failed,
            "share": now.num_past / max(1, now.num_requests),
            "words": words,
            "left": time_left(now.eta_s),
            "counts": f"{now.num_past} of {now.num_requests}",
        }


def _id(asked: Mapping[str, Any]) -> str:
    raw = asked.get("id")
    if isinstance(raw, str) and 0 < len(raw) <= 64 and raw.isascii() and raw.isprintable():
        return raw
    raise ConfigError(f"id must be the id of a benchmark, got {raw!r:.80}.")
