"""Writes a run to the log beside a decode loop that somebody else drives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError
from engine.model.target import Target
from engine.steps import Record
from playground.host.environment import environment, machine
from playground.host.live import LiveRun
from playground.host.recorder import Inbox, Recorder
from playground.host.request import GenerateRequest
from storage import NewRun, RunLog


@dataclass(frozen=True, slots=True)
class Recording:
    """A run being recorded."""

    run_id: str
    inbox: Inbox

    def put(self, record: Record) -> None:
        """Hand over a record; never waits."""
        self.inbox.put(record)


@contextmanager
def record_run(
    log: RunLog,
    target: Target,
    config: MethodConfig,
    *,
    sampling: Sampling,
    limits: Limits,
    prompt_ids: Sequence[int],
    prompt_text: str = "",
    messages: Sequence[dict[str, str]] = (),
    stored: Mapping[str, Any] | None = None,
) -> Iterator[Recording]:
    """Record what is `put` until the block ends; an exception ends the run as failed.

    Args:
        stored: further fields of the log's `NewRun`, e.g. its labels.
    """
    run = LiveRun(owner="")
    new = new_run(
        target,
        config,
        sampling=sampling,
        limits=limits,
        prompt_ids=prompt_ids,
        prompt_text=prompt_text,
        messages=messages,
    )
    run.log_id = log.begin(replace(new, **(stored or {})))
    recorder = Recorder(run, target, log, limits.stop)
    inbox: Inbox = Inbox()
    thread = threading.Thread(target=recorder.follow, args=(inbox,), daemon=True)
    thread.start()
    fault: str | None = "The run ended early."
    try:
        yield Recording(run.log_id, inbox)
        fault = None
    except PlaygroundError as error:
        fault = str(error)
        raise
    finally:
        inbox.put(None)
        thread.join()
        recorder.close(fault)


def new_run(
    target: Target,
    config: MethodConfig,
    *,
    sampling: Sampling,
    limits: Limits,
    prompt_ids: Sequence[int],
    prompt_text: str,
    messages: Sequence[dict[str, str]],
) -> NewRun:
    """What the log stores of a run before it starts."""
    return NewRun(
        target=target.name,
        method=config.model_dump(mode="json"),
        method_title=type(config).title,
        lossless=config.lossless,
        sampling=sampling.model_dump(mode="json"),
        limits=limits.model_dump(mode="json"),
        prompt_ids=tuple(prompt_ids),
        prompt_text=prompt_text,
        messages=tuple(messages),
        dtype=target.dtype_name,
        device=str(target.device),
        environment=environment(target),
    )


def unbegun_run(
    request: GenerateRequest, prompt_text: str, messages: Sequence[dict[str, str]]
) -> NewRun:
    """What the log stores of a run whose target or drafter could not be had."""
    return NewRun(
        target=request.target.name,
        method=request.config.model_dump(mode="json"),
        method_title=request.method.title,
        lossless=request.config.lossless,
        sampling=request.sampling.model_dump(mode="json"),
        limits=request.limits.model_dump(mode="json"),
        prompt_ids=(),
        prompt_text=prompt_text,
        messages=tuple(messages),
        dtype=request.dtype,
        environment=machine(),
    )


def log_unbegun(log: RunLog, new: NewRun, sentence: str) -> str:
    """Write down a run that failed before its prefill, and why; returns its id."""
    run_id = log.begin(new)
    log.finish(
        run_id,
        status="failed",
        output_ids=(),
        text="",
        finish_reason=None,
        metrics={},
        error=sentence,
    )
    return run_id
