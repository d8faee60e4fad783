"""What the Sweep page does: start, watch, stop, go on, forget; sweeps run beside the page.

page ── start ──► controller thread ── one job per trial ──► engine host
                      │ trials                                   (other runs go between trials)
                      ▼
                  Optuna's tables ◄── page asks once a second, in any tab, after any reload
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.target import Target
from playground.errors import attempt
from playground.experiments.sweeps import session
from playground.experiments.sweeps.form import plan_of_form
from playground.experiments.sweeps.measure import Pair, Watch, measure_on
from playground.experiments.sweeps.report import config_of, preset_yaml, state_of
from playground.experiments.sweeps.run import PointError, SweepError, SweepProgress, conduct
from playground.experiments.sweeps.store import Sweep, SweepStore
from playground.host.live import LiveRun
from playground.host.runner import EngineHost, QueueFullError
from storage import StorageError

WAIT_S = 0.2
MAX_LISTED = 200


@dataclass(frozen=True, slots=True)
class HostBench:
    """The engine's target, and drafters that only this sweep uses."""

    target: Target
    host: EngineHost

    def new_drafter(self, config: MethodConfig) -> Drafter:
        return self.host.new_drafter(config)


@dataclass(slots=True)
class Running:
    """A sweep that this server runs."""

    sweep: Sweep
    stop: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    progress: SweepProgress | None = None


class SweepService:
    """Sweeps of one server: at most one runs at a time."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._store: SweepStore | None = None
        self._running: Running | None = None

    @property
    def store(self) -> SweepStore:
        """Opened when it is first needed."""
        with self._lock:
            if self._store is None:
                self._store = SweepStore.beside(self.host.log, self.host.catalog.types)
            return self._store

    def close(self) -> None:
        """Stop what runs, wait for it, give the database back."""
        running = self._running
        if running is not None:
            running.stop.set()
            running.over.wait()
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    # ---- what the page asks

    def start(self, form: object, name: str = "") -> str:
        """Begin a sweep and run it; returns its name.

        Raises:
            ConfigError: the form is wrong, or another sweep runs.
        """
        plan = plan_of_form(self.host.catalog, form)
        return self._launch(lambda store: session.begin(store, plan, name))

    def resume(self, name: str, trials: int | None = None) -> str:
        """Go on with a sweep.

        Raises:
            ConfigError: there is none of this name, or one is running.
        """
        return self._launch(lambda store: session.reopen(store, name, trials))

    def stop(self, name: str) -> None:
        """End a sweep that this server runs; it can be gone on with.

        Raises:
            ConfigError: it does not run here.
        """
        running = self._here(name)
        if running is None:
            raise ConfigError(f"Sweep {name} is not run by this server. Stop it where it runs.")
        running.stop.set()

    def delete(self, name: str) -> None:
        """Forget a sweep that does not run. Its runs stay in the log."""
        self.store.delete(name)

    def list(self) -> list[dict[str, Any]]:
        """The newest sweeps, newest first."""
        return [asdict(head) for head in self.store.heads()[:MAX_LISTED]]

    def look(self, name: str, have: object = None) -> dict[str, Any]:
        """A sweep as it stands, and its progress if it runs here.

        Args:
            have: `version` of the trials that the page has; they are left out if it is the newest.
        """
        running = self._here(name)
        state = state_of(self.store.load(name) if running is None else running.sweep)
        state["version"] = zlib.crc32(json.dumps(state["trials"]).encode())
        if state["version"] == have:
            del state["trials"]
        progress = None if running is None else running.progress
        return {
            **state,
            "here": running is not None,
            "stopping": running is not None and running.stop.is_set(),
            "progress": None if progress is None else asdict(progress),
        }

    def yaml(self, name: str, number: int | None) -> dict[str, str]:
        """A trial's settings as a method file."""
        text = preset_yaml(self.store.load(name), number)
        return {"file": f"{name}.yaml", "text": text}

    def use(self, name: str, number: int | None) -> dict[str, Any]:
        """A trial's target, method and settings, for the form of another page."""
        sweep = self.store.load(name)
        config = config_of(sweep, number)
        start = self.host.catalog.method(sweep.plan.method).config.model_dump(mode="json")
        changed = {k: v for k, v in config.model_dump(mode="json").items() if start.get(k) != v}
        return {
            "target": sweep.plan.target.name,
            "method": sweep.plan.method,
            "settings": changed,
        }

    # ---- running

    def _here(self, name: str) -> Running | None:
        running = self._running
        same = running is not None and running.sweep.name == name and not running.over.is_set()
        return running if same else None

    def _launch(self, make: Callable[[SweepStore], Sweep]) -> str:
        store = self.store
        with self._lock:
            before = self._running
            if before is not None and not before.over.is_set():
                raise ConfigError(
                    f"Sweep {before.sweep.name} is running. Stop it, or wait until it is done."
                )
            running = Running(make(store))
            running.sweep.claim()
            self._running = running
            name = running.sweep.name
            threading.Thread(
                target=self._conduct, args=(running,), name=f"sweep {name}", daemon=True
            ).start()
        return name

    def _conduct(self, running: Running) -> None:
        def tell(progress: SweepProgress) -> None:
            running.progress = progress

        try:
            attempt(
                lambda: conduct(
                    running.sweep,
                    _OnHost(running, self.host),
                    tell=tell,
                    cancelled=running.stop.is_set,
                ),
                where=f"sweep {running.sweep.name}",
            )
        finally:
            running.over.set()


class _OnHost:
    """Measures a point as one job of the engine, and waits for it."""

    def __init__(self, running: Running, host: EngineHost) -> None:
        self._running = running
        self._host = host

    def __call__(self, config: MethodConfig, run_group: str, watch: Watch) -> list[Pair]:
        job = _PointJob(self._running.sweep, self._host, config, run_group, watch)
        run = self._submit(job)
        while run is not None and not run.over.wait(WAIT_S):
            if self._running.stop.is_set():
                run.cancel()
        if run is None or run.state == "cancelled":
            self._running.stop.set()
            return []
        if job.error is not None:
            raise job.error
        if run.state == "failed":
            raise PointError(run.error or "The engine could not run it.")
        return job.pairs

    def _submit(self, job: _PointJob) -> LiveRun | None:
        """The queued job; None if the sweep was stopped while the queue was full."""
        owner = f"sweep {self._running.sweep.name}"
        while not self._running.stop.is_set():
            try:
                return self._host.submit(job.work, owner=owner)
            except QueueFullError:
                time.sleep(WAIT_S)
        return None


class _PointJob:
    """The work of one trial, on the engine's thread."""

    def __init__(
        self, sweep: Sweep, host: EngineHost, config: MethodConfig, run_group: str, watch: Watch
    ) -> None:
        self._sweep = sweep
        self._host = host
        self._config = config
        self._run_group = run_group
        self._watch = watch
        self._run: LiveRun | None = None
        self.pairs: list[Pair] = []
        self.error: PlaygroundError | StorageError | None = None

    def work(self, run: LiveRun) -> None:
        self._run = run
        plan = self._sweep.plan
        try:
            self._watch.say(f"loading {plan.target.title or plan.target.name}")
            target = self._prepared(run)
            run.state = "running"
            measure = measure_on(HostBench(target, self._host), self._host.log, plan)
            self.pairs = measure(self._config, self._run_group, self)
        except (PlaygroundError, StorageError) as error:
            self.error = error
        cancelled = run.cancel_asked.is_set()
        run.end("cancelled" if cancelled else "failed" if self.error else "completed")

    def _prepared(self, run: LiveRun) -> Target:
        """The sweep's target. What is wrong with it is wrong with every point."""
        plan = self._sweep.plan
        try:
            target = self._host.prepare(run, plan.target, plan.dtype)
            session.check_target(self._sweep, target)
        except ConfigError as error:
            raise SweepError(str(error)) from error
        return target

    # ---- the watch, with the job's own way of ending

    def pair(self, pairs: list[Pair]) -> bool:
        return self._watch.pair(pairs)

    def say(self, words: str) -> None:
        self._watch.say(words)

    def cancelled(self) -> bool:
        asked = self._run is not None and self._run.cancel_asked.is_set()
        return asked or self._watch.cancelled()
