"""Why answers part from plain decoding's: the target is asked once more; its word stays in the log.

In half precision a near-tie between two tokens can fall either way, in any engine. An audit tells
that from a fault of the method; see `engine.model.audit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.model.audit import Audit, View
from storage import Artifact, RunLog

ARTIFACT = "audit"
"""Kind of an audit in the log; its key names the two runs."""
Audits = Mapping[tuple[str, str], Audit]
"""By run and plain decoding's run."""


def store_audit(
    log: RunLog, own: str, plain: str, found: Audit, *, benchmark_id: str | None = None
) -> None:
    """Keep an audit with the run that it is about.

    Args:
        own, plain: ids of the two runs.
    """
    log.artifacts.put(
        ARTIFACT,
        {"own": own, "plain": plain},
        meta=asdict(found),
        payload=b"",
        run_id=own,
        benchmark_id=benchmark_id,
    )


def stored_audit(log: RunLog, own: str, plain: str) -> Audit | None:
    """The audit of two runs, if there was one."""
    kept = log.artifacts.find(ARTIFACT, {"own": own, "plain": plain})
    return _audit_of(kept[0]) if kept else None


def audits_of(log: RunLog, benchmark_id: str) -> Audits:
    """Every audit of a benchmark."""
    kept = log.artifacts.find(ARTIFACT, benchmark_id=benchmark_id)
    return {(one.key["own"], one.key["plain"]): _audit_of(one) for one in kept}


def _audit_of(kept: Artifact) -> Audit:
    meta: Mapping[str, Any] = kept.meta
    exact = meta["exact"]
    views = {"view": View(**meta["view"]), "exact": None if exact is None else View(**exact)}
    return Audit(**{**meta, **views})


def gap_words(audit: Audit) -> tuple[str, ...]:
    """What the target says at the place where two texts part, one sentence per dtype."""
    views = [audit.view] if audit.exact is None else [audit.view, audit.exact]
    return tuple(_view_words(audit, view) for view in views)


def _view_words(audit: Audit, view: View) -> str:
    top = (
        f"{view.dtype}: top-2 logit gap {view.gap:.3g} ({view.best!r} over {view.second!r}; "
        f"numbers lie {view.unit:.2g} apart there)"
    )
    behind = view.plain_logit - view.own_logit
    way = "below" if behind >= 0 else "above"
    return (
        f"{top}. The method's {audit.own_token!r} is choice {view.own_rank}, "
        f"{abs(behind):.3g} {way} plain decoding's {audit.plain_token!r}."
    )
