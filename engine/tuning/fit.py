"""Chooses how much a method drafts: the size that is predicted to be the fastest on this machine.

    tok/s(size) = MAT / (draft + accept and commit + sum over rows of share · verify(rows))

MAT and the shares of rows were measured once (`engine.drafters.sizes`); the times are this
machine's: the target's latency curve, and of every size a few real steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine import formats
from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.drafters.sizes import SizeTable
from engine.model.target import Target
from engine.steps import Step
from engine.tuning.latency import LatencyCurve, Prediction

NUM_STEPS = 6
"""Steps that are timed of a size, after one that is not."""
PERIOD, PROMPT_LEN = 16, 64
"""Tokens of the text that is drafted for: it repeats itself, so that whoever looks up, drafts."""
SECONDS = 1.5
"""What timing the sizes of a method may take; those not reached are left out."""


@dataclass(frozen=True, slots=True)
class SizePrediction:
    """A size, and what it is predicted to bring."""

    settings: Mapping[str, Any]
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen.

    Attributes:
        config: the method's settings with the size chosen.
        reason: what was chosen and why, for people; empty where nothing was asked.
        sizes: all that was considered, fastest first; empty if nothing could be predicted.
    """

    config: MethodConfig
    reason: str = ""
    sizes: tuple[SizePrediction, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for the run log."""
        found = [
            {
                **one.settings,
                "mat": one.prediction.mat,
                "step_ms": one.prediction.step_ms,
                "tok_s": one.prediction.tok_s,
                "speedup": one.prediction.speedup,
            }
            for one in self.sizes
        ]
        return {"reason": self.reason, "sizes": found}


def fit_size(
    config: MethodConfig,
    tables: Callable[[MethodConfig], SizeTable | None],
    context: BuildContext,
    curve: Callable[[], LatencyCurve],
) -> Fit:
    """The method's settings with the size that is predicted to be the fastest.

    Methods within another are fitted each as if it drafted alone.

    Args:
        tables: what was measured of a method, if anything was.
        curve: gives the latency curve of the context's target; asked where it is needed.

    Raises ConfigError, DrafterError, SourceError: the method's drafter cannot be built.
    """
    if config.size == "set" or not config.has_sizes:
        return Fit(config)
    if within := config.within():
        fits = {
            name: fit_size(one.replace(size="fit"), tables, context, curve)
            for name, one in within.items()
        }
        settings = {name: fit.config.replace(size="set") for name, fit in fits.items()}
        reasons = [f"{fit.config.title}. {fit.reason}" for fit in fits.values() if fit.reason]
        return Fit(config.replace(**settings), " ".join(reasons))
    table = tables(config)
    if table is None or table.target != context.target.name:
        return Fit(
            config,
            f"{config.title} drafts as much as is set: with these settings, other sizes were not "
            f"measured on {context.target.name}.",
        )
    inner = config.replace(adaptive=False)
    verify, plain = curve(), AutoregressiveConfig().build(context)
    plain_tok_s = 1000 / (verify.at(1) + _beside_verifying(plain, context.target)[1])
    found: list[SizePrediction] = []
    began = time.monotonic()
    with closing(inner.build(context)) as built:
        for size in table.sizes:
            if found and time.monotonic() - began > SECONDS:
                break
            sized = inner.replace(**size.settings)
            drafter = sized.build_sharing(built, context)
            depth = sized.draft_shape().depth if sized.offline else None
            draft_ms, other_ms = _beside_verifying(drafter, context.target)
            verify_ms = sum(share * verify.at(rows, depth) for rows, share in size.rows)
            prediction = Prediction(size.mat, draft_ms, verify_ms, other_ms, plain_tok_s)
            found.append(SizePrediction(size.settings, prediction))
    found.sort(key=lambda one: -one.prediction.tok_s)
    best = config.replace(**found[0].settings, size="fit")
    return Fit(best, _reason(config, found), tuple(found))


def _beside_verifying(drafter: Drafter, target: Target) -> tuple[float, float]:
    """Median milliseconds that real steps take to draft, and to accept and commit."""
    prompt = [(97 * (i % PERIOD)) % target.vocab_size for i in range(PROMPT_LEN)]
    records = decode(target, drafter, prompt, limits=Limits(max_new_tokens=512, ignore_eos=True))
    steps = [s for s in islice(records, NUM_STEPS + 2) if isinstance(s, Step)][1:]
    records.close()
    drafting = statistics.median(step.draft_s for step in steps)
    rest = statistics.median(step.accept_s + step.other_s - step.rollback_s for step in steps)
    return 1000 * drafting, 1000 * rest


def _reason(config: MethodConfig, found: Sequence[SizePrediction]) -> str:
    best, kept = found[0], {name: getattr(config, name) for name in config.size_settings.split()}
    one = best.prediction
    among = f"is predicted to be the fastest of {len(found)} sizes"
    among = among if len(found) > 1 else "is the only size tried"
    said = (
        f"Fitted to this machine: {_words(best.settings)} {among}: "
        f"{formats.speedup(one.speedup)} plain decoding, {formats.tok_s(one.tok_s)} tok/s "
        f"(MAT {formats.mat(one.mat)}, {formats.duration(one.step_ms)} a step)."
    )
    as_set = next((s for s in found if {**kept, **s.settings} == kept), None)
    if as_set is None or as_set is best:
        return said
    return f"{said} As set: {formats.speedup(as_set.prediction.speedup)}."


def _words(settings: Mapping[str, Any]) -> str:
    """Names and values; of a tree its size."""
    parts = []
    for name, value in settings.items():
        tree = name.endswith("_choices")
        parts.append(f"a tree of {len(value)}" if tree else f"{name} {value}")
    return ", ".join(parts)
