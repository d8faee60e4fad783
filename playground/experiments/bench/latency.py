"""The latency table of genai-perf, at concurrency 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.experiments.bench.measured import Measured
from playground.experiments.bench.stats import Statistic

ROWS: dict[str, str] = {
    "request_latency_ms": "Request latency (ms)",
    "time_to_first_token_ms": "Time to first token (ms)",
    "inter_token_latency_ms": "Inter-token latency (ms)",
    "output_sequence_length": "Output sequence length",
    "input_sequence_length": "Input sequence length",
}
DEFINITIONS: dict[str, str] = {
    "request_latency_ms": "request in the engine → last token committed",
    "time_to_first_token_ms": "request in the engine → first token committed",
    "inter_token_latency_ms": "(request latency - time to first token) / (output tokens - 1)",
    "output_sequence_length": "new tokens of a request",
    "input_sequence_length": "prompt tokens of a request",
    "output_token_throughput": "Σ output tokens / Σ request latency: one request at a time",
    "request_throughput": "requests / Σ request latency: one request at a time",
}


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """One configuration's table; `rows` by the keys of `ROWS`.

    A row is None where no request defines it: an answer of one token has no inter-token latency.
    """

    rows: dict[str, Statistic | None]
    output_token_throughput: float
    request_throughput: float
    num_requests: int
    concurrency: int = 1


def latency_table(requests: Sequence[Measured]) -> LatencyTable | None:
    """None without requests."""
    if not requests:
        return None
    values: dict[str, list[float]] = {
        "request_latency_ms": [1000 * r.latency_s for r in requests],
        "time_to_first_token_ms": [1000 * r.ttft_s for r in requests],
        "inter_token_latency_ms": [
            1000 * (r.latency_s - r.ttft_s) / (r.num_new_tokens - 1)
            for r in requests
            if r.num_new_tokens > 1
        ],
        "output_sequence_length": [float(r.num_new_tokens) for r in requests],
        "input_sequence_length": [float(r.num_prompt_tokens) for r in requests],
    }
    seconds = sum(r.latency_s for r in requests)
    return LatencyTable(
        rows={key: Statistic.of(values[key]) for key in ROWS},
        output_token_throughput=sum(r.num_new_tokens for r in requests) / seconds,
        request_throughput=len(requests) / seconds,
        num_requests=len(requests),
    )
