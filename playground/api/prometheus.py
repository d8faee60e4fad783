"""Prometheus metrics under vLLM's names, so that its dashboards show them.

They count every run that was written to the log since the server started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from playground.host.runner import EngineHost
from storage import StepRow

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2.5, 5)
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)


class PrometheusMetrics:
    """Metrics of one server; a `storage.LogWatcher`."""

    def __init__(self, host: EngineHost) -> None:
        own = self.registry = CollectorRegistry()
        self._drafts = _counter(own, "spec_decode_num_drafts", "steps of requests that drafted")
        self._drafted = _counter(own, "spec_decode_num_draft_tokens", "drafted tokens")
        self._accepted = _counter(own, "spec_decode_num_accepted_tokens", "accepted draft tokens")
        self._at = _counter(
            own,
            "spec_decode_num_accepted_tokens_per_pos",
            "steps that accepted a draft token at this position of the path, from 0",
            "position",
        )
        self._prompt = _counter(own, "prompt_tokens", "tokens of prompts")
        self._generated = _counter(own, "generation_tokens", "new tokens, after any cut")
        self._ended = _counter(own, "request_success", "finished requests", "finished_reason")
        self._ttft = _histogram(own, "time_to_first_token_seconds", TTFT_BUCKETS)
        self._itl = _histogram(own, "inter_token_latency_seconds", ITL_BUCKETS)
        self._latency = _histogram(own, "e2e_request_latency_seconds", LATENCY_BUCKETS)
        running, waiting = (
            Gauge(f"vllm:num_requests_{state}", f"requests {state}", registry=own)
            for state in ("running", "waiting")
        )
        running.set_function(lambda: host.occupancy[0])
        waiting.set_function(lambda: host.occupancy[1])

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    # ---- `storage.LogWatcher`

    def stepped(self, steps: Sequence[StepRow]) -> None:
        self._generated.inc(sum(step.num_committed for step in steps))
        for step in steps:  # one per output, however many tokens it has, as vLLM observes
            self._itl.observe(step.draft_s + step.verify_s + step.accept_s + step.other_s)

    def finished(self, *, reason: str | None, metrics: Mapping[str, Any]) -> None:
        self._ended.labels(reason or "error").inc()
        if metrics.get("num_drafted"):  # all of its steps count, as in MAT
            self._drafts.inc(metrics["num_steps"])
            self._drafted.inc(metrics["num_drafted"])
            self._accepted.inc(metrics["num_accepted"])
            for position, count in enumerate(metrics["at_least"]):
                self._at.labels(str(position)).inc(count)
        if metrics.get("ttft_s") is not None:
            self._prompt.inc(metrics["num_prompt_tokens"])
            self._generated.inc()  # the first token, which the prefill commits
            self._ttft.observe(metrics["ttft_s"])
            self._latency.observe(metrics["ttft_s"] + metrics["decode_s"])


def _counter(registry: CollectorRegistry, name: str, about: str, *labels: str) -> Counter:
    return Counter(f"vllm:{name}", about, labels, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(f"vllm:{name}", name.replace("_", " "), buckets=buckets, registry=registry)
