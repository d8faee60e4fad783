"""A run's figures as text, for the panel and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import formats
from engine.metrics import TimeSplit, ratio


def figure_texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """The text of every figure; a dash where a run is too short to define one.

    Args:
        figures: as `engine.metrics.stored_figures` gives them.
    """
    cached, prompt = figures.get("num_cached") or 0, figures.get("num_prompt_tokens") or 0
    kinds = ("tok_s", "mat", "draft_acceptance", "ttft_s", "itl_ms")
    steps_ms = figures.get("step_p50_ms"), figures.get("step_p95_ms")
    return {
        **{name: formats.of_kind(name)(figures.get(name)) for name in kinds},
        "num_prompt_tokens": f"{prompt - cached} / {cached}",
        "step_p95_ms": formats.durations(*steps_ms),
        "num_new_tokens": f"{figures.get('num_new_tokens') or 0} / {figures.get('num_steps') or 0}",
        "time_split": "; ".join((_split_text(figures), *remarks(figures))),
        "steps": steps_text(figures),
    }


def _split_text(figures: Mapping[str, Any]) -> str:
    split = figures.get("time_split")
    return formats.time_split(TimeSplit(**split).ms) if split else "time split"


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """Remarks where a run's counts differ from its text."""
    cut, beyond = figures.get("num_cut") or 0, figures.get("num_beyond_end") or 0
    texts = [f"{formats.plural(cut, 'draft')} cut by the grammar"] if cut else []
    if beyond:
        texts.append(f"MAT counts {formats.plural(beyond, 'token')} beyond the end of the text")
    return texts


def steps_text(figures: Mapping[str, Any]) -> str:
    """Sums over the steps of a run, all or some: tokens, rates, time split."""
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
