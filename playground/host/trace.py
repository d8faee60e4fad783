"""The trace of a run: one JSON object per line, `run`, then `step`s, then `end`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import Tally
from engine.model.target import Target
from engine.model.text import whole_text
from engine.safe_text import json_text, unwritable
from engine.steps import End, Record, Step


class TraceFile:
    """Writes a run's records as they arrive; a context manager."""

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
                "prompt_ids": list(prompt_ids),
                "sampling": sampling.model_dump(mode="json"),
                "dtype": target.dtype_name,
                "device": str(target.device),
            }
        )

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # reported by the write
            self._stream.close()

    def write(self, record: Record) -> None:
        """Append a record; the prefill has no line of its own."""
        self._tally.add(record)
        if isinstance(record, Step):
            self._line(step_line(record))
        elif isinstance(record, End):
            metrics = self._tally.metrics
            self._line(
                {
                    "type": "end",
                    "output_ids": list(record.output_ids),
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
    return ConfigError(f"--trace: {unwritable(path, error)}")


def step_line(step: Step) -> dict[str, Any]:
    """One step; accepting counts as `other_s`."""
    return {
        "type": "step",
        "index": step.index,
        "tokens": list(step.tokens),
        "parents": list(step.parents),
        "accepted": list(step.accepted),
        "bonus": step.bonus,
        "bypass": step.bypass,
        "draft_s": step.draft_s,
        "verify_s": step.verify_s,
        "other_s": step.accept_s + step.other_s,
    }
