"""What a client is told of a run's drafting, in the shapes that engines give it."""

from __future__ import annotations

from typing import Any

from engine.metrics import TimeSplit
from playground.host.live import LiveRun


def speculative_decoding(run: LiveRun) -> dict[str, Any] | None:
    """Acceptance of one request as vLLM reports it; None before the first step.

    `acceptance_histogram[j]` counts the steps that accepted exactly j draft tokens, before any cut,
    for all j up to `num_spec_tokens`, the most that a step drafted.
    """
    figures = run.metrics
    if figures is None or not figures.num_steps:
        return None
    accepted, longest = run.rows.accepted, run.rows.longest
    return {
        "mean_acceptance_length": figures.mat,
        "draft_acceptance_rate": figures.draft_acceptance or 0.0,
        "acceptance_histogram": [accepted[j] for j in range(longest + 1)],
        "num_spec_steps": figures.num_steps,
        "num_accepted_draft_tokens": figures.num_accepted,
        "num_draft_tokens": figures.num_drafted,
        "num_spec_tokens": longest,
    }


def timings(run: LiveRun) -> dict[str, Any]:
    """Times and acceptance of one request as llama-server reports them; milliseconds."""
    figures, first = run.metrics, run.first
    if figures is None or first is None:
        return {}
    prompt_ms, prompt_n = 1000 * first.ttft_s, first.num_prompt_tokens - first.num_cached
    predicted_n = figures.num_new_tokens
    decode_ms = 1000 * (predicted_n - 1) / figures.tok_s if figures.tok_s else 0.0
    return {
        "cache_n": first.num_cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / max(1, predicted_n - 1),
        "predicted_per_second": figures.tok_s,
        "draft_n": figures.num_drafted,
        "draft_n_accepted": figures.num_accepted,
        "step_ms": _split_ms(figures.time_split),
    }


def _split_ms(split: TimeSplit | None) -> dict[str, float] | None:
    """Mean of a step by what it went into, as the page shows it; not of llama-server's."""
    if split is None:
        return None
    return {
        "draft": 1000 * split.draft_s,
        "verify": 1000 * split.verify_s,
        "accept": 1000 * split.accept_s,
        "other": 1000 * (split.other_s - split.rollback_s),
        "rollback": 1000 * split.rollback_s,
    }


def usage(run: LiveRun) -> dict[str, Any]:
    """Tokens of the prompt and of the answer, counted after any cut."""
    read = run.first.num_prompt_tokens if run.first else 0
    written = run.metrics.num_new_tokens if run.metrics else 0
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": run.first.num_cached if run.first else 0},
    }
