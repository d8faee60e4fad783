"""Figures of a run in the shapes of vLLM, llama-server and OpenAI."""

from __future__ import annotations

from typing import Any

from engine.metrics import ratio, throughput, tpot_ms
from playground.host.live import LiveRun


def speculative_decoding(run: LiveRun) -> dict[str, Any] | None:
    """Acceptance of one request as vLLM reports it; None before the first step.

    `acceptance_histogram[j]` counts the steps that accepted exactly j draft tokens, before any cut,
    for all j up to `num_spec_tokens`, the longest draft of a step. `bypass_reasons`, not vLLM's,
    counts the steps that drafted nothing by `engine.steps.Bypass`.
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
        "bypass_reasons": dict(figures.bypasses),
    }


def timings(run: LiveRun) -> dict[str, Any]:
    """Times and acceptance of one request as llama-server reports them; milliseconds."""
    figures, first = run.metrics, run.first
    if figures is None or first is None:
        return {}
    prompt_ms, prompt_n = 1000 * first.ttft_s, first.num_prompt_tokens - first.num_cached
    predicted_n = figures.num_new_tokens
    return {
        "cache_n": first.num_cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, prompt_n),
        "prompt_per_second": throughput(prompt_n, first.ttft_s),
        "predicted_n": predicted_n,
        "predicted_ms": 1000 * figures.decode_s,
        "predicted_per_token_ms": tpot_ms(predicted_n, figures.decode_s),
        "predicted_per_second": figures.tok_s,
        "draft_n": figures.num_drafted,
        "draft_n_accepted": figures.num_accepted,
        "step_ms": figures.time_split.ms if figures.time_split else None,
    }


def usage(run: LiveRun) -> dict[str, Any]:
    """Tokens of the prompt and of the answer, counted after any cut."""
    num_prompt_tokens = run.first.num_prompt_tokens if run.first else 0
    num_new_tokens = run.metrics.num_new_tokens if run.metrics else 0
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": run.first.num_cached if run.first else 0},
    }
