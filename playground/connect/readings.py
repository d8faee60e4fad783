"""Counters of running engines, read from their /metrics.

Counters only grow, so figures are those of the time between two readings. A counter that fell means
that the engine was restarted in between; then only the later reading counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ConfigError
from engine.metrics import draft_acceptance, mat, position_rates
from engine.safe_text import as_text, read_json
from playground.connect.responses import MAX_COUNT, Iteration, Iterations, ModelList

_SAMPLE = re.compile(
    r"""([\w:]++)[ \t]*+(?:\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\})?"""  # name, labels
    r"""[ \t]*+(?<=[ \t}])(\S++)(?:[ \t]++-?\d++)?[ \t\r]*+""",  # value, time
    re.ASCII,
)
"""A line of Prometheus' text format; possessive quantifiers keep matching linear in its length."""
_POSITION = re.compile(r'(?:^|[,\s])position="(\d{1,9})"', re.ASCII)
MAX_POSITIONS = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts since the engine's start; None if the engine does not report them.

    Attributes:
        steps: verifications of a draft.
        at_least: steps that accepted at least 1, 2, … draft tokens.
        running, waiting: requests at this moment.
        mean_mat, mean_acceptance: recent means that the engine computes itself.
        since_last_read: the counts are since the last reading, not since the start.
    """

    steps: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    at_least: tuple[float, ...] = ()
    generated: float | None = None
    running: float | None = None
    waiting: float | None = None
    mean_mat: float | None = None
    mean_acceptance: float | None = None
    since_last_read: bool = False

    @property
    def mat(self) -> float | None:
        """From the counters, or as the engine reports it."""
        if not self.steps or self.accepted is None:
            return self.mean_mat
        return mat(self.accepted, self.steps)

    @property
    def draft_acceptance(self) -> float | None:
        """From the counters, or as the engine reports it."""
        if not self.drafted or self.accepted is None:
            return self.mean_acceptance
        return draft_acceptance(self.accepted, self.drafted)

    @property
    def position_rates(self) -> tuple[float, ...]:
        return position_rates(self.at_least, self.steps or 0)


COUNTED = ("steps", "drafted", "accepted", "generated")


def between(before: Reading, after: Reading) -> tuple[Reading, bool]:
    """The counts between two readings, and whether the engine was restarted in between."""
    if after.since_last_read:
        return after, False
    padded = (*before.at_least, *(0.0,) * len(after.at_least))
    pairs = [(getattr(before, name), getattr(after, name)) for name in COUNTED]
    pairs += zip(padded, after.at_least, strict=False)
    if any(b is not None and a is not None and a < b for b, a in pairs):
        return after, True
    growth: dict[str, Any] = {
        name: None if a is None else a - (b or 0.0)
        for name, (b, a) in zip(COUNTED, pairs, strict=False)
    }
    counts = tuple(a - b for a, b in zip(after.at_least, padded, strict=False))
    return replace(after, at_least=counts, **growth), False


@dataclass(frozen=True, slots=True)
class Engine:
    """How to recognise, read and configure an engine.

    Attributes:
        owner: `owned_by` in its list of models.
        names: Prometheus' name of every figure, without `_total`.
        extra: fields of every request that disable the prompt cache.
        flag: the option that sets the draft length: `{k}`, or `{k1}` for one more.
    """

    name: str
    title: str
    owner: str
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""

    def read(self, body: bytes) -> Reading:
        """Raises ConfigError: the body is not in the format of its /metrics."""
        return _from_prometheus(as_text(body, what="/metrics"), self.names)


def _vllm_names(prefix: str, running: str, waiting: str, generated: str) -> dict[str, str]:
    counted = f"{prefix}:spec_decode_num_"
    return {
        "steps": f"{counted}drafts",
        "drafted": f"{counted}draft_tokens",
        "accepted": f"{counted}accepted_tokens",
        "at_least": f"{counted}accepted_tokens_per_pos",
        "generated": f"{prefix}:{generated}",
        "running": f"{prefix}:{running}",
        "waiting": f"{prefix}:{waiting}",
    }


_VLLM = _vllm_names("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens")


class TensorRT(Engine):
    """Its /metrics is a JSON list of the iterations since the last read."""

    def read(self, body: bytes) -> Reading:
        listed = read_json(body, what="/metrics") if body.strip() else []
        iterations = Iterations.parse({"iterations": listed}, where="/metrics").iterations
        stats = [one.spec_decoding_stats for one in iterations if one.spec_decoding_stats]
        last = iterations[-1] if iterations else Iteration()
        return Reading(
            steps=sum(one.num_requests_with_draft_tokens for one in stats),
            drafted=sum(one.num_draft_tokens for one in stats),
            accepted=sum(one.num_accepted_tokens for one in stats),
            running=last.num_active_requests,
            waiting=last.num_queued_requests,
            since_last_read=True,
        )


ENGINES = (
    Engine(
        "playground",
        "Speculative decoding playground",
        "speculative-decoding-playground",
        _VLLM,
        flag="max_draft_len: {k}",
    ),
    Engine(
        "vllm",
        "vLLM",
        "vllm",
        _VLLM,
        flag="--speculative-config '{{\"num_speculative_tokens\": {k}, …}}'",
    ),
    Engine(
        "sglang",
        "SGLang",
        "sglang",
        {
            "mean_mat": "sglang:spec_accept_length",
            "mean_acceptance": "sglang:spec_accept_rate",
            "generated": "sglang:generation_tokens",
            "running": "sglang:num_running_reqs",
            "waiting": "sglang:num_queue_reqs",
        },
        flag="--speculative-num-steps {k} --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens {k1}",
    ),
    Engine(
        "llamacpp",
        "llama.cpp",
        "llamacpp",
        _vllm_names("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted"),
        extra={"cache_prompt": False},
        flag="--spec-draft-n-max {k}",
    ),
    TensorRT("trtllm", "TensorRT-LLM", "tensorrt_llm", flag="max_draft_len: {k}"),
)


def engine_of(listed: ModelList) -> Engine:
    """The engine whose list of models this is.

    Raises ConfigError: the engine is not supported, or lists no model.
    """
    owners = [one.owned_by for one in listed.data]
    for engine in ENGINES:
        if engine.owner in owners:
            return engine
    titles = ", ".join(engine.title for engine in ENGINES)
    raise ConfigError(
        f"owned_by in /v1/models must name a supported engine ({titles}), got {owners[:3]!r:.80}."
    )


def _from_prometheus(text: str, names: Mapping[str, str]) -> Reading:
    by_name = {metric: name for name, metric in names.items()}
    series: dict[str, list[float]] = {}
    positions: dict[int, float] = {}
    for line in text.split("\n"):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line.lstrip())
        if sample is None:
            raise ConfigError("/metrics must be in Prometheus' text format.")
        metric, labels, value = sample.groups()
        name = by_name.get(metric.removesuffix("_total"))
        if name == "at_least":
            position = _POSITION.search(labels or "")
            if position is None:
                raise ConfigError(f"{metric} in /metrics must have a position.")
            at = int(position[1])
            positions[at] = positions.get(at, 0.0) + _amount(metric, value)
        elif name is not None:
            series.setdefault(name, []).append(_amount(metric, value))
    deepest = min(max(positions, default=-1), MAX_POSITIONS - 1)
    at_least = tuple(positions.get(at, 0.0) for at in range(deepest + 1))
    # There is a series per model or worker: counts are summed, means are averaged.
    figures: dict[str, Any] = {
        name: sum(values) / (len(values) if name.startswith("mean_") else 1)
        for name, values in series.items()
    }
    return Reading(**figures, at_least=at_least)


def _amount(metric: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{metric} in /metrics must be in [0, 2^53], got {text:.80}.")
    return value
