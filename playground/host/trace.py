"""Traces of a stored run: a JSON object per line, or slices for a trace viewer."""

from __future__ import annotations

from typing import Any

from engine.metrics import TimeSplit
from engine.safe_text import json_text
from storage import StoredRun

RUN_FIELDS = ("target", "method", "prompt_ids", "sampling", "dtype", "device")
STEP_FIELDS = ("index", "tokens", "parents", "accepted", "bonus", "bypass", "draft_s", "verify_s")


def jsonl_trace(stored: StoredRun) -> str:
    """A run as lines of JSON: its settings, every step, and how it ended."""
    run = stored.run
    lines = [{"type": "run", **{name: getattr(run, name) for name in RUN_FIELDS}}]
    for step in stored.steps:
        line = {"type": "step", **{name: getattr(step, name) for name in STEP_FIELDS}}
        lines.append({**line, "other_s": step.accept_s + step.other_s})
    lines.append(
        {
            "type": "end",
            "output_ids": run.output_ids,
            "text": run.text,
            "finish_reason": run.finish_reason,
            "steps": run.num_steps,
            "mat": run.mat,
            "tok_s": run.tok_s,
            "ttft_s": run.ttft_s,
        }
    )
    return "".join(json_text(line) + "\n" for line in lines)


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
