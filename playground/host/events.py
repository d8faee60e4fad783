"""What travels to the browser: events, steps and ends, made from a run's rows.

An event is `[run, n, pieces, accepted, kind, rejected, drafted]`. n counts a run's events from the
prefill (0), so a batch that is lost or repeated can be told apart: the panel ignores what it has
and asks again for what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.metrics import Metrics
from playground.host.live import Finish, First
from storage import StepRow

Event = list[Any]
PREFILL, BONUS, RECOVERED = 0, 1, 2
MOST_REJECTED = 8
"""Rejected labels sent along with an event; the step itself has all."""
REASON_WORDS = {
    "eos": "done · end of text",
    "stop": "done · stop string",
    "length": "done · length limit",
    "context": "done · context full",
    "cancelled": "stopped",
}


def prefill_event(run_id: str, first: First) -> Event:
    return [run_id, 0, [first.text], 0, PREFILL, [], 0]


def step_event(run_id: str, row: StepRow) -> Event:
    """What the text needs of a step: its pieces, and the drafts that the target turned down."""
    kind = RECOVERED if _recovered(row) else BONUS
    return [
        run_id,
        row.index + 1,
        list(row.committed_texts),
        len(row.accepted),
        kind,
        _rejected(row),
        len(row.tokens) - 1,
    ]


def _last_accepted(row: StepRow) -> int:
    return row.accepted[-1] if row.accepted else 0


def _recovered(row: StepRow) -> bool:
    """Whether the target's own token follows a rejection, not a fully accepted path."""
    return _last_accepted(row) in row.parents


def _rejected(row: StepRow) -> list[str]:
    """The drafter's favourite continuation after the accepted path, which the target refused.

    For a chain that is its rest; for a tree the first-ranked path below the last accepted node.
    """
    labels: list[str] = []
    node = _last_accepted(row)
    while len(labels) < MOST_REJECTED:
        children = [i for i, parent in enumerate(row.parents) if i and parent == node]
        if not children:
            return labels
        node = min(children, key=lambda i: (row.ranks[i], i))
        labels.append(row.token_texts[node])
    return labels


def step_detail(row: StepRow) -> dict[str, Any]:
    """Everything that the draft tree of one step shows."""
    return {
        "index": row.index,
        "context_len": row.context_len,
        "labels": list(row.token_texts),
        "token_ids": list(row.tokens),
        "parents": list(row.parents),
        "ranks": list(row.ranks),
        "draft_probs": list(row.draft_probs),
        "target_probs": list(row.target_probs),
        "accepted": list(row.accepted),
        "bonus": {
            "label": row.bonus_text,
            "token_id": row.bonus,
            "recovered": _recovered(row),
        },
        "num_committed": row.num_committed,
        "num_extra_rows": row.num_extra_rows,
        "draft_s": row.draft_s,
        "verify_s": row.verify_s,
        "accept_s": row.accept_s,
        "other_s": row.other_s,
        "decision": row.decision,
    }


def end_of(num_events: int, finish: Finish) -> dict[str, Any]:
    """How a text ended; `units` is its length as the browser counts (UTF-16)."""
    return {
        "n": num_events,
        "reason": finish.reason,
        "units": len(finish.text.encode("utf-16-le", "surrogatepass")) // 2,
        "tail": finish.text[-16:],
    }


def figures_of(metrics: Metrics | None) -> dict[str, Any] | None:
    return None if metrics is None else asdict(metrics)


LEAST_MAT = 1.05
LEAST_STEPS = 20


def misfit(metrics: Mapping[str, Any]) -> str | None:
    """A warning where a drafter was hardly ever right: most likely it belongs to another target."""
    mat, steps = metrics.get("mat"), metrics.get("num_steps") or 0
    if not metrics.get("num_drafted") or steps < LEAST_STEPS or mat is None or mat >= LEAST_MAT:
        return None
    return (
        f"MAT is {mat:.2f} over {steps} steps: hardly any draft was accepted, so drafting only "
        "cost time. Most likely the drafter was made for another target, or does not suit this "
        "text."
    )


def run_meta(
    run_id: str,
    *,
    title: str,
    target: str,
    lossless: bool,
    prompt: str,
    messages: Sequence[dict[str, str]],
    parent: str | None = None,
) -> dict[str, Any]:
    """What a panel shows of a run besides its text; without messages it is a raw completion."""
    return {
        "id": run_id,
        "title": title,
        "target": target,
        "lossless": lossless,
        "mode": "chat" if messages else "raw",
        "prompt": prompt,
        "history": [dict(message) for message in messages[:-1]],
        "parent": parent,
    }
