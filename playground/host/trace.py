"""Traces of a run: a JSON object per line while it is written, or slices for a trace viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import Tally, TimeSplit
from engine.model.target import Target
from engine.model.text import whole_text
from engine.safe_text import json_text, write_error_text
from engine.steps import End, Record, Step
from storage import StoredRun

STEP_FIELDS = ("index", "tokens", "parents", "accepted", "bonus", "bypass", "draft_s", "verify_s")


class TraceFile:
    """Writes a run's records as they arrive."""

    def __init__(
        self,
        path: Path,
        target: Target,
        method: MethodConfig,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        """Open the file and write the line of the run.

        Raises ConfigError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        self._path = path
        self._tokenizer, self._limits = target.tokenizer, limits
        self._tally = Tally()
        self._line(
            {
                "type": "run",
                "target": target.name,
                "method": method.model_dump(mode="json"),
                "prompt_ids": prompt_ids,
                "sampling": sampling.model_dump(mode="json"),
                "dtype": target.dtype_name,
                "device": str(target.device),
            }
        )

    def close(self) -> None:
        with suppress(OSError):  # reported by the write
            self._stream.close()

    def write(self, record: Record) -> None:
        """Append a record; the prefill has no line of its own."""
        self._tally.add(record)
        if isinstance(record, Step):
            line = {"type": "step", **{name: getattr(record, name) for name in STEP_FIELDS}}
            self._line({**line, "other_s": record.accept_s + record.other_s})
        elif isinstance(record, End):
            metrics = self._tally.metrics
            self._line(
                {
                    "type": "end",
                    "output_ids": record.output_ids,
                    "text": whole_text(self._tokenizer, record.output_ids, self._limits),
                    "finish_reason": record.finish_reason,
                    "steps": record.num_steps,
                    "mat": metrics.mat,
                    "tok_s": metrics.tok_s,
                    "ttft_s": metrics.ttft_s,
                }
            )

    def _line(self, line: Mapping[str, Any]) -> None:
        """Flushed, so that a killed run leaves whole lines."""
        try:
            self._stream.write(json_text(line) + "\n")
            self._stream.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--trace: {write_error_text(path, error)}")


def chrome_trace(stored: StoredRun) -> str:
    """A run in the Trace Event format, as Perfetto and chrome://tracing open it.

    A slice per step, with its parts below it and its tokens as arguments, on one track; the sizes
    of drafts as a counter. Times are microseconds since the request.
    """
    run = stored.run

    def slice_of(name: str, at_s: float, seconds: float, **arguments: Any) -> dict[str, Any]:
        times = {"ts": round(1e6 * at_s, 1), "dur": round(1e6 * seconds, 1)}
        return {"name": name, "ph": "X", "pid": 1, "tid": 1, **times, "args": arguments}

    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": run.target}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": run.method_title}},
        slice_of("prefill", 0.0, run.ttft_s or 0.0, tokens=run.num_prompt_tokens),
    ]
    for step in stored.steps:
        parts = TimeSplit.of(step)
        began_s = at_s = step.at_s - parts.total_s
        name = f"step {step.index + 1}: {len(step.accepted)} of {len(step.tokens) - 1}"
        events.append(
            slice_of(
                name,
                began_s,
                parts.total_s,
                committed="".join(step.committed_texts),
                drafted=list(step.token_texts[1:]),
                accepted=[step.token_texts[node] for node in step.accepted],
                target_token=step.bonus_text,
                context=step.context_len,
                decision=step.decision,
            )
        )
        for part, ms in parts.ms.items():
            events.append(slice_of(part, at_s, ms / 1000))
            at_s += ms / 1000
        size = {"drafted": len(step.tokens) - 1, "accepted": len(step.accepted)}
        counter = {"name": "draft tokens", "ph": "C", "pid": 1, "ts": round(1e6 * began_s, 1)}
        events.append({**counter, "args": size})
    return json_text({"traceEvents": events, "displayTimeUnit": "ms"})
