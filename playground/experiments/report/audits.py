"""Why answers differ from plain decoding's: the target is evaluated once more, and audits stored.

In half precision a near-tie between two tokens can fall either way, in any engine. An audit tells
that from a fault of the method; see `engine.model.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from pydantic import TypeAdapter

from engine.config import Sampling
from engine.constraint import allowed_after
from engine.metrics import first_divergence
from engine.model.audit import Audit, View, audit
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.finished import FinishedRequest, Pair
from storage import RunLog

ARTIFACT = "audit"
"""Kind of an audit in the log; its key names the two runs."""
AUDITS_EACH = 8
"""Answers of a configuration that are looked into, where they differ from plain decoding's."""
Audits = Mapping[tuple[str, str], Audit]
"""By run and plain decoding's run."""
_AUDIT = TypeAdapter(Audit)


def divergences(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, int]]:
    """The pairs whose texts differ, and at which token."""
    for own, plain in pairs:
        at = first_divergence(own.output_ids, plain.output_ids)
        if at is not None:
            yield (own, plain), at


def audit_divergences(
    target: Target,
    log: RunLog,
    pairs: Sequence[Pair],
    *,
    benchmark_id: str | None,
    most: int = AUDITS_EACH,
    tell: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Audit the first answers of a configuration that differ, and keep what was found.

    The very first is also checked on a float32 copy, where the target is small.
    """
    for n, ((own, plain), _) in enumerate(list(divergences(pairs))[:most]):
        if cancelled():
            return
        stored = log.wait_for(partial(log.get, plain.run_id))
        if stored is None or log.wait_for(partial(_find, log, own, plain)) is not None:
            continue
        tell()
        texts = plain.output_ids, own.output_ids
        allowed = partial(allowed_after, target, Sampling.parse(stored.sampling))
        result = attempt(
            partial(audit, target, stored.prompt_ids, *texts, allowed=allowed, in_float32=n == 0),
            where=f"the audit of {own.run_id}",
        )
        if result is not None and not isinstance(result, Fault):
            log.artifacts.put(
                ARTIFACT,
                {"own": own.run_id, "plain": plain.run_id},
                meta=asdict(result),
                payload=b"",
                run_id=own.run_id,
                benchmark_id=benchmark_id,
            )


def audits_of(log: RunLog, benchmark_id: str) -> Audits:
    kept = log.artifacts.find(ARTIFACT, benchmark_id=benchmark_id)
    return {(one.key["own"], one.key["plain"]): _AUDIT.validate_python(one.meta) for one in kept}


def _find(log: RunLog, own: FinishedRequest, plain: FinishedRequest) -> Audit | None:
    kept = log.artifacts.find(ARTIFACT, {"own": own.run_id, "plain": plain.run_id})
    return _AUDIT.validate_python(kept[0].meta) if kept else None


def gap_sentences(audit: Audit) -> tuple[str, ...]:
    """What the target says at the place where two texts part, one sentence per dtype."""
    views = [audit.view] if audit.exact is None else [audit.view, audit.exact]
    return tuple(_gap_sentence(audit, view) for view in views)


def _gap_sentence(audit: Audit, view: View) -> str:
    behind = view.plain_logit - view.own_logit
    return (
        f"{view.dtype}: top-2 logit gap {view.gap:.3g} ({view.best!r} over {view.second!r}; "
        f"adjacent numbers there are {view.unit:.2g} apart). The method's {audit.own_token!r} is "
        f"the target's choice {view.own_rank}, {abs(behind):.3g} "
        f"{'below' if behind >= 0 else 'above'} plain decoding's {audit.plain_token!r}."
    )
