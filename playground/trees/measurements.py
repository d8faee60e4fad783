"""Measurements of the Tree page on the engine's thread: ranks, latency, dynamic trees."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import validate_choice
from engine.tuning import StoppedError
from playground.experiments.plan import Item
from playground.experiments.prompts import items_of, sample_evenly
from playground.host.live import LiveRun
from playground.host.recording import Prompt, decode_and_record
from playground.host.runner import EngineHost
from playground.trees.methods import TreeMethod
from playground.trees.sources import RECENT, Sources, drafts_of
from playground.trees.tables import make_table

TEXT_TOKENS = 128
"""New tokens of every text that is written for a measurement."""


class Measurements:
    """The work of the page's jobs, on the engine's thread."""

    def __init__(self, host: EngineHost, sources: Sources) -> None:
        self._host = host
        self._sources = sources

    # ---- ranks

    def ranks(self, run: LiveRun, method: TreeMethod, source: str) -> dict[str, Any]:
        self._prepare(run, method.target)
        benchmark_id = None
        if source.startswith("suite:"):
            config = method.config if method.config.lossless else AutoregressiveConfig()
            run_ids = self._write(run, config, source.removeprefix("suite:"))
        else:
            run_ids, benchmark_id = self._sources.run_ids(source, method)
        artifact_id, table = make_table(
            self._host.log,
            method.config,
            self._host.build_context(),
            run_ids=run_ids,
            benchmark_id=benchmark_id,
            depths=8 if method.kind == "tree" else max(16, method.tree.depth),
            on_progress=run.reporter("ranking every true token"),
        )
        text = f"measured {table.num_positions:,} positions of {table.num_texts} texts"
        return {"source": f"table:{artifact_id}", "text": text}

    def _write(self, run: LiveRun, config: MethodConfig, suite: str) -> list[str]:
        """Let the target answer prompts of all categories of a suite; returns the run ids."""
        suites = self._host.catalog.suites
        items = sample_evenly(items_of(suites[validate_choice("suite", suite, suites)]), RECENT)
        drafter = self._host.drafter(config)
        run_ids = []
        for number, item in enumerate(items):
            if run.cancel_requested.is_set():
                raise StoppedError(f"Stopped; {number} texts were written and are in the log.")
            run.state, run.activity = "running", f"writing text {number + 1} of {len(items)}"
            run.share = number / len(items)
            run_ids.append(self._answer(run, config, drafter, item))
        return run_ids

    def _answer(self, run: LiveRun, config: MethodConfig, drafter: Drafter, item: Item) -> str:
        """Write one text; returns its id in the log."""
        target, text = self._host.build_context().target, item.turns[0]
        is_chat = target.has_chat_template and not item.raw
        messages = [{"role": "user", "content": text}] if is_chat else []
        answer = LiveRun(run.owner)
        decode_and_record(
            self._host.log,
            target,
            drafter,
            config,
            Prompt.encode(target, text, messages),
            sampling=Sampling(),
            limits=Limits(max_new_tokens=TEXT_TOKENS),
            cancelled=run.cancel_requested.is_set,
            prefix_caching=True,
            labels={"suite": item.suite, "category": item.category, "prompt": item.id},
            run=answer,
        )
        if run.cancel_requested.is_set():
            raise StoppedError("Stopped; what was written so far is in the log.")
        assert answer.log_id is not None
        return answer.log_id

    # ---- latency

    def latency(self, run: LiveRun, method: TreeMethod) -> dict[str, Any]:
        self._prepare(run, method.target)
        on_progress = run.reporter("timing verify forwards and drafts")
        context = self._host.build_context()
        self._host.experience.measure(method.config, context, on_progress=on_progress)
        return {"speed": self.speed(method), "text": "measured"}

    def speed(self, method: TreeMethod) -> dict[str, Any] | None:
        """What steps take here, as the page reads it."""
        latency = self._host.experience.step_latency(method.target, method.config)
        return None if latency is None else asdict(latency)

    # ---- dynamic trees

    def runs(
        self, run: LiveRun, method: TreeMethod, config: MethodConfig, source: str
    ) -> dict[str, Any]:
        """Answer a suite's prompts with these settings, as set, if no table can predict them.

        Args:
            source: a suite; the first suite replaces any other source.
        """
        self._prepare(run, method.target)
        suites = self._host.catalog.suites
        suite = source.removeprefix("suite:") if source.startswith("suite:") else next(iter(suites))
        ids = self._write(run, config.replace(drafting="as set"), suite)
        text = f"{len(ids)} prompts of {suites[suite].title} answered"
        return {"drafted": drafts_of(self._host.log, ids, config), "text": text}

    # ---- the target

    def _prepare(self, run: LiveRun, target: str) -> None:
        """Load the target, unless it is loaded already, in whatever dtype."""
        spec, loaded = self._host.catalog.target(target), self._host.loaded
        dtype = loaded.dtype_name if loaded is not None and loaded.name == spec.name else "auto"
        self._host.prepare(run, spec, dtype)
