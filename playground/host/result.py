"""A run's figures as texts, its comparison with plain decoding, and predictions before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import formats
from engine.figures import FIGURES
from engine.formats import DASH
from engine.metrics import (
    EQUAL_MARGIN,
    TimeSplit,
    expert_reads,
    ratio,
    tokens_per_step,
)
from engine.steps import BYPASSES
from playground.host.balance import Balance, hardly_drafts, missing_drafts, step_words
from playground.host.plain import PlainStep, step_parts, stored_plain_step
from playground.host.speedup import DOUBTS, DRIFT
from storage import PLAIN

if TYPE_CHECKING:  # `runs list` reads figures without torch
    from engine.drafters.method import MethodConfig
    from engine.tuning.experience import ExperienceStore

MIN_STEPS = 8
"""Steps that a comparison needs: the first ones are not typical."""
MIN_QUIET_STEPS, MIN_QUIET_SHARE = 16, 0.8
"""Undisturbed steps, and their share of all steps, below which a result is uncertain."""
MIN_EXPERT_ROWS = 1.5
"""Rows per step from which a sentence says that more rows load more experts."""
COSTS = {"draft": "drafting", "verify": "verifying", "other": "the rest"}
ADVICE = {
    "draft": "Drafting dominates. Draft fewer tokens or choose a method that needs no model.",
    "verify": "Verification dominates. Draft fewer tokens or use a smaller tree.",
    "other": "Neither drafting nor verifying takes most of the time.",
}
SOURCES = {
    "around": "Plain decoding: {} tok/s, timed briefly before and after this run.",
    "before": "Plain decoding: {} tok/s, timed briefly before this run.",
    "own": "Plain decoding: {} tok/s, by the steps of this run that drafted nothing.",
}
UNCERTAIN = "Uncertain: {} For a reliable figure, use Compare."


def result_of(
    metrics: Mapping[str, Any],
    plain: PlainStep | None,
    *,
    is_plain: bool,
    experts: tuple[int, int] | None = None,
) -> dict[str, str] | None:
    """The result of a run as texts: `mood`, `head`, `text`, `advice`, `source`; None if too short.

    Args:
        metrics: the run's figures so far.
        is_plain: whether the run is plain decoding itself.
        experts: as `Target.experts`.
    """
    tok_s = metrics.get("tok_s")
    if not tok_s or (metrics.get("num_steps") or 0) < MIN_STEPS:
        return None
    if is_plain:
        each = formats.duration(1000 / tok_s)
        text = f"one token a step, {each} each. Speedups are measured against it."
        return _parts("plain", "Plain decoding:", text)
    comparison = compare_with_plain(metrics, plain)
    if comparison is None:
        return None
    plain = comparison.plain
    kind = "before" if plain.source == "around" and plain.drift is None else plain.source
    source = SOURCES[kind].format(formats.tok_s(plain.tok_s))
    routing = experts_sentence(metrics, experts)
    sentences = (drafting_sentence(metrics), routing, comparison.remark, source)
    missing = missing_drafts(metrics.get("num_accepted") or 0, metrics.get("num_drafted") or 0)
    return _compared(comparison, " ".join(filter(None, sentences)), f"{missing} on this text.")


def experts_sentence(metrics: Mapping[str, Any], experts: tuple[int, int] | None) -> str:
    """What verifying several rows costs a mixture of experts; empty for other targets."""
    rows = 1 + (ratio(metrics.get("num_drafted") or 0, metrics["num_steps"]) or 0.0)
    if experts is None or rows < MIN_EXPERT_ROWS:
        return ""
    reads = expert_reads(*experts, rows)
    return (
        f"More rows load more experts: {rows:.1f} rows a step read about {reads:.1f}× the experts "
        "of one."
    )


def too_short(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    """The result of a finished run that has too few steps; None for longer runs, and if unknown."""
    steps = metrics.get("num_steps")
    if steps is None or steps >= MIN_STEPS:
        return None
    text = f"{formats.plural(steps, 'step')}; a speedup needs {MIN_STEPS} at least."
    return _parts("same", "Too short to compare with plain decoding:", text)


@dataclass(frozen=True, slots=True)
class PlainComparison:
    """A run compared with plain decoding, and whether it is reliable.

    Attributes:
        plain: the baseline in use: the given one, or the run's own undrafted steps.
        speedup: tok/s over plain decoding's; None where the baseline is wrong.
        is_sure: whether the speedup is reliable to two decimals.
        remark: why it is not; empty if it is.
    """

    plain: PlainStep
    balance: Balance
    speedup: float | None
    is_sure: bool
    remark: str


def compare_with_plain(
    metrics: Mapping[str, Any], plain: PlainStep | None
) -> PlainComparison | None:
    """Compare a run with plain decoding; the speedup is the ratio of the displayed tok/s."""
    own, steps = step_parts(metrics), metrics.get("num_steps")
    if plain is None or own is None or not steps:
        return None
    plain = plain.during(metrics)
    tokens = tokens_per_step(metrics["num_new_tokens"], steps)
    assert tokens is not None
    balance = Balance.of(tokens, own, plain.parts)
    doubt = plain.doubt(sum(own))
    words = DOUBTS[doubt] if doubt else _doubt_of_run(metrics, balance, plain)
    speedup = None if doubt == "cheap step" else balance.formula
    remark = UNCERTAIN.format(words) if words else ""
    return PlainComparison(plain, balance, speedup, not words, remark)


def sure_speedup(metrics: Mapping[str, Any]) -> float | None:
    """A run's speedup over the baseline stored with it; None where it is not reliable."""
    comparison = compare_with_plain(metrics, stored_plain_step(metrics))
    return comparison.speedup if comparison and comparison.is_sure else None


def _doubt_of_run(metrics: Mapping[str, Any], balance: Balance, plain: PlainStep) -> str:
    """Why the run's own timing is unreliable: other work on the machine, or too few steps."""
    plain_s = sum(plain.parts)
    step_s = plain_s * (1 + balance.total)
    steps, disturbed = metrics["num_steps"], metrics.get("num_disturbed", 0)
    quiet, split = steps - disturbed, metrics.get("quiet_split")
    quiet_s = TimeSplit(**split).total_s if split else step_s
    if quiet < MIN_QUIET_SHARE * steps or step_s > DRIFT * quiet_s:
        others = formats.figure(balance.mat * plain_s / quiet_s, 1, "×")
        return (
            f"the machine was busy with something else during {disturbed} of {steps} steps; "
            f"the others were about {others} plain decoding."
        )
    return f"only {quiet} steps could be compared." if quiet < MIN_QUIET_STEPS else ""


def _compared(comparison: PlainComparison, source: str, missing: str) -> dict[str, str]:
    balance, speedup = comparison.balance, comparison.speedup
    if speedup is None:
        text = f"{formats.mat(balance.mat)} tokens a step."
        return _parts("same", "No speedup is given:", text, source)
    about = f"About {formats.figure(speedup, 1, '×')}"
    head = f"{formats.speedup(speedup) if comparison.is_sure else about} plain decoding:"
    if speedup > 1 + EQUAL_MARGIN:
        mood = "faster" if comparison.is_sure else "same"
        return _parts(mood, head, f"{step_words(balance.mat, 1 + balance.total)}.", source)
    parts = [f"{COSTS[name]} {round(paid, 2) + 0.0:+.2f}" for name, paid in balance.paid.items()]
    text = f"{step_words(balance.mat, 1 + balance.total, 'but')} ({', '.join(parts)})."
    if speedup >= 1 - EQUAL_MARGIN or not comparison.is_sure:
        return _parts("same", head, text, source)
    advice = missing if hardly_drafts(balance.mat) else ADVICE[balance.largest]
    return _parts("slower", head, text, source, advice)


def _parts(mood: str, head: str, text: str, source: str = "", advice: str = "") -> dict[str, str]:
    return {"mood": mood, "head": head, "text": text, "advice": advice, "source": source}


def bypass_sentence(metrics: Mapping[str, Any]) -> str | None:
    """Why a run drafted nothing, or not where its draft model's context was too short.

    Args:
        metrics: the run's `Metrics` as plain values, possibly of an older version.
    """
    bypasses = metrics.get("bypasses") or {}
    drafted = bool(metrics.get("num_drafted"))
    reasons = [name for name in bypasses if name == "draft_context" or not drafted]
    if not reasons:
        return None
    steps = metrics["num_steps"]
    clauses = (f"{BYPASSES.get(one, one)} ({bypasses[one]} of {steps} steps)" for one in reasons)
    return f"{'Sometimes n' if drafted else 'N'}othing was drafted: {'; '.join(clauses)}."


def drafting_sentence(metrics: Mapping[str, Any]) -> str:
    """How much a run with drafting: auto drafted; empty for other runs."""
    steps, expected = metrics.get("num_steps"), metrics.get("expected_tok_s")
    drafted = drafted_steps(metrics)
    if not drafted or expected is None or not metrics.get("num_drafted"):
        return ""
    each = metrics["num_drafted"] / drafted
    return (
        f"Drafted in {drafted} of {steps} steps, {each:.1f} tokens each; the controller expected "
        f"{expected:.1f} tok/s."
    )


def drafted_steps(metrics: Mapping[str, Any]) -> int:
    """Steps that drafted anything."""
    steps: int = metrics.get("num_steps") or 0
    bypasses: Mapping[str, int] = metrics.get("bypasses") or {}
    return max(0, steps - sum(bypasses.values()))


WARNED_STEPS = 10
"""Drafted steps after which a warning says that hardly any draft is accepted: a drafter that is
right every second time is wrong ten times running once in a thousand texts."""
MAX_PREDICTABLE = 1.0
"""Temperature above which few drafts of any drafter are accepted."""


def warning_of(metrics: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """A warning where nothing was drafted, or hardly any draft of a trained drafter was accepted.

    Lookup methods are exempt: the text may simply not repeat itself.
    """
    if bypassed := bypass_sentence(metrics):
        return bypassed
    mat, steps, drafted = metrics.get("mat"), metrics.get("num_steps"), drafted_steps(metrics)
    if not (meta.get("trained") and metrics.get("num_drafted")) or mat is None or not steps:
        return None
    if drafted < WARNED_STEPS or not hardly_drafts(mat := 1 + (mat - 1) * steps / drafted):
        return None
    cause = "the drafter was made for another target, or does not suit this text"
    if (temperature := meta.get("temperature", 0.0)) > MAX_PREDICTABLE:
        cause = f"temperature {temperature:g} is too high for any drafter"
    return (
        f"MAT is {formats.mat(mat)} over the {drafted} steps that drafted: hardly any draft was "
        f"accepted, so drafting only cost time. Most likely {cause}."
    )


def figure_texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """The text of every figure; a dash where it is undefined.

    Args:
        figures: as in `engine.metrics.Metrics`.
    """
    cached, prompt = figures.get("num_cached") or 0, figures.get("num_prompt_tokens") or 0
    names = ("tok_s", "mat", "draft_acceptance", "ttft_s", "itl_ms")
    steps_ms = figures.get("step_p50_ms"), figures.get("step_p95_ms")
    split, steps = figures.get("time_split"), figures.get("num_steps", DASH)
    split_text = formats.time_split(TimeSplit(**split).ms) if split else "time split"
    return {
        **{name: FIGURES[name].with_unit(figures.get(name)) for name in names},
        "num_prompt_tokens": f"{prompt - cached} / {cached}",
        "step_p95_ms": formats.durations(*steps_ms),
        "num_new_tokens": f"{figures.get('num_new_tokens') or 0} / {steps}",
        "time_split": "; ".join((split_text, *remarks(figures))),
        "steps": steps_text(figures),
    }


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """Remarks where a run's counts do not match its text."""
    cut, beyond = figures.get("num_cut") or 0, figures.get("num_beyond_end") or 0
    texts = [f"{formats.plural(cut, 'draft')} cut by the grammar"] if cut else []
    if beyond:
        texts.append(f"MAT counts {formats.plural(beyond, 'token')} beyond the end of the text")
    return texts


def steps_text(figures: Mapping[str, Any]) -> str:
    """Tokens, rates and time split over all or some steps of a run."""
    split, steps = figures.get("time_split"), figures.get("num_steps") or 0
    if not split or not steps:
        return ""
    mean = TimeSplit(**split)
    shares = (
        f"{part} {formats.percent(ratio(ms, 1000 * mean.total_s))}" for part, ms in mean.ms.items()
    )
    tokens = formats.plural(figures["num_new_tokens"] - 1, "token")
    return (
        f"{formats.plural(steps, 'step')}: {tokens} in "
        f"{formats.duration(1000 * figures['decode_s'])} · "
        f"{formats.tok_s(figures['tok_s'])} tok/s · MAT {formats.mat(figures['mat'])} · "
        + ", ".join(shares)
    )


# ---- before a run

NOT_KNOWN = "The speedup of drafting as set is not known yet: a run with drafting: auto finds out."


def as_set_sentence(experience: ExperienceStore, target: str, config: MethodConfig) -> str:
    """The speedup expected from earlier runs; empty unless drafting is as set."""
    if config.drafting != "as set" or config.decoding_type == PLAIN:
        return ""
    stored = experience.find(target, config)
    expected = stored and stored.predict_as_set(config)
    if not expected:
        return NOT_KNOWN
    step = step_words(expected.mat, expected.mat / expected.speedup)
    advice = " Drafting: auto drafts less." if expected.speedup < 1 - EQUAL_MARGIN else ""
    return (
        f"As set, about {formats.speedup(expected.speedup)} plain decoding is expected: "
        f"{step}, by earlier runs here.{advice}"
    )
