"""Counters of running engines, read from their /metrics.

Counters only grow, so figures cover the time between two readings. A counter that decreased means
that the engine was restarted in between; then only the later reading counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from engine.config import Settings
from engine.errors import ConfigError
from engine.metrics import mat, position_rates, ratio
from engine.safe_text import as_text, read_json

MAX_POSITIONS = 256
MAX_COUNT = 2**53
"""Floats represent counts up to here exactly."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True, max_length=10_000)]
"""Validation stops at the first invalid item: there could be an error per byte."""


class Response(Settings):
    """Part of a response; unknown fields are ignored, numbers beyond `Count` refused."""

    model_config = ConfigDict(extra="ignore")


class ListedModel(Response):
    id: str = Field(min_length=1, max_length=1000)
    owned_by: str | None = None


class ModelList(Response):
    data: Items[ListedModel]


class _CamelCase(Response):
    """As TensorRT-LLM's /metrics spells its fields."""

    model_config = ConfigDict(alias_generator=to_camel)


class DraftingStats(_CamelCase):
    num_requests_with_draft_tokens: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0


class Iteration(_CamelCase):
    num_active_requests: Count | None = None
    num_queued_requests: Count | None = None
    spec_decoding_stats: DraftingStats | None = None


class Iterations(Response):
    iterations: Items[Iteration]


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts since the engine's start or the last reading; None if it does not report them.

    `steps` are verify forwards, `at_least` those that accepted at least 1, 2, … draft tokens. The
    means are recent ones that the engine computes itself; window and block are DSpark's.
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
    mean_num_steps: float | None = None
    mean_draft_tokens: float | None = None
    mean_window: float | None = None
    mean_block_mat: float | None = None
    since_last_read: bool = False

    @property
    def mat(self) -> float | None:
        """From the counters; includes prefill's token if accepted tokens are not counted."""
        if self.accepted is None:
            return ratio(self.generated or 0, self.steps) or self.mean_mat
        return mat(self.accepted, self.steps or 0) or self.mean_mat

    @property
    def draft_len(self) -> int:
        """Draft tokens per step; 0 if the engine does not report them."""
        drafted = ratio(self.drafted or 0, self.steps) or self.mean_num_steps or 0
        return round(min(drafted, MAX_POSITIONS))

    @property
    def draft_acceptance(self) -> float | None:
        """From the counters, or as the engine reports it."""
        if not self.drafted or self.accepted is None:
            return self.mean_acceptance
        return ratio(self.accepted, self.drafted)

    @property
    def position_rates(self) -> tuple[float, ...]:
        return position_rates(self.at_least, self.steps or 0)


def between(before: Reading, after: Reading) -> tuple[Reading, bool]:
    """The counts between two readings, and whether the engine was restarted in between."""
    if after.since_last_read:
        return after, False
    padded = (*before.at_least, *(0.0,) * len(after.at_least))
    at_least = tuple(a - b for a, b in zip(after.at_least, padded, strict=False))
    growth: dict[str, Any] = {
        name: getattr(after, name) - (getattr(before, name) or 0.0)
        for name in ("steps", "drafted", "accepted", "generated")
        if getattr(after, name) is not None
    }
    if min((*at_least, *growth.values()), default=0.0) < 0:
        return after, True
    return replace(after, at_least=at_least, **growth), False


@dataclass(frozen=True, slots=True)
class Engine:
    """How to recognise, read and configure an engine.

    Attributes:
        owner: `owned_by` in its list of models.
        names: Prometheus' name of every figure, without `_total`.
        extra: fields of every request that disable the prompt cache.
        flag: the option that sets the draft length: `{k}`, or `{k1}` for one more.
        schedule: the options that set it by batch size, from rows of first, last and length.
    """

    name: str
    title: str
    owner: str
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""
    schedule: Callable[[list[list[int]]], str] | None = None

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


def _sglang_schedule(rows: list[list[int]]) -> str:
    """Each key is the least batch size of its steps; 0 steps = no drafts."""
    table = {str(first): {"candidate_steps": [length]} for first, _, length in rows}
    return (
        f"--speculative-adaptive --speculative-adaptive-config FILE.json with {json.dumps(table)}, "
        "for EAGLE and EAGLE3 with topk 1"
    )


def _trtllm_schedule(rows: list[list[int]]) -> str:
    """Each key is the largest batch size of its length, and none is longer than the first.

    Above the last key nothing is drafted (TensorRT-LLM#10860).
    """
    longest = rows[0][2]
    lengths = {last: min(length, longest) for _, last, length in rows if length}
    table = ", ".join(f"{last}: {length}" for last, length in lengths.items())
    return f"max_draft_len: {longest} and draft_len_schedule: {{{table}}}, without drafts above"


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
        schedule=lambda rows: f'"num_speculative_tokens_per_batch_size": {json.dumps(rows)}',
    ),
    Engine(
        "sglang",
        "SGLang",
        "sglang",
        {
            "steps": "sglang:spec_verify_calls",
            "mean_mat": "sglang:spec_accept_length",
            "mean_acceptance": "sglang:spec_accept_rate",
            "mean_num_steps": "sglang:spec_num_steps",
            "mean_draft_tokens": "sglang:spec_num_draft_tokens",
            "mean_window": "sglang:spec_cap_length",
            "mean_block_mat": "sglang:spec_block_accept_length",
            "generated": "sglang:generation_tokens",
            "running": "sglang:num_running_reqs",
            "waiting": "sglang:num_queue_reqs",
        },
        flag="--speculative-num-steps {k} --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens {k1}",
        schedule=_sglang_schedule,
    ),
    Engine(
        "llamacpp",
        "llama.cpp",
        "llamacpp",
        _vllm_names("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted"),
        extra={"cache_prompt": False},
        flag="--spec-draft-n-max {k}",
    ),
    TensorRT(
        "trtllm",
        "TensorRT-LLM",
        "tensorrt_llm",
        flag="max_draft_len: {k}",
        schedule=_trtllm_schedule,
    ),
)


def engine_of(models: ModelList) -> Engine:
    """The engine whose list of models this is.

    Raises ConfigError: the engine is not supported, or lists no model.
    """
    owners = [one.owned_by for one in models.data]
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
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ConfigError("/metrics must be in Prometheus' text format.") from error
    for metric, labels, value, *_ in samples:
        name = by_name.get(metric.removesuffix("_total"))
        if name is not None and not 0 <= value <= MAX_COUNT:
            raise ConfigError(f"{metric} in /metrics must be in [0, 2^53], got {value!s:.80}.")
        if name == "at_least":
            if not (at := labels.get("position", "")).isdecimal() or len(at) > 9:
                raise ConfigError(f"{metric} in /metrics must have a position.")
            positions[int(at)] = positions.get(int(at), 0.0) + value
        elif name is not None:
            series.setdefault(name, []).append(value)
    deepest = min(max(positions, default=-1), MAX_POSITIONS - 1)
    at_least = tuple(positions.get(at, 0.0) for at in range(deepest + 1))
    # There is a series per model or worker: counts are summed, means are averaged.
    figures: dict[str, Any] = {
        name: sum(values) / (len(values) if name.startswith("mean_") else 1)
        for name, values in series.items()
    }
    return Reading(**figures, at_least=at_least)
