"""What engines count of their drafting, read from the endpoints that they have.

Counters only grow, so a figure is of a time between two readings; a counter that fell means that
the engine was started anew in between, and then the later reading alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError
from engine.metrics import draft_acceptance, mat, position_rates
from engine.plain import read_json

POSITION = "position"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts since the engine's start; None where an engine does not tell.

    Attributes:
        steps: verifications of a draft.
        at_least: steps that accepted at least 1, 2, … draft tokens.
        running, waiting: requests at this moment.
        told_mat, told_rate: recent means that an engine works out itself.
    """

    steps: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    at_least: tuple[float, ...] = ()
    generated: float | None = None
    running: float | None = None
    waiting: float | None = None
    told_mat: float | None = None
    told_rate: float | None = None

    @property
    def mat(self) -> float | None:
        """Of its counters, or what the engine says itself."""
        if not self.steps or self.accepted is None:
            return self.told_mat
        return mat(self.accepted, self.steps)

    @property
    def draft_acceptance(self) -> float | None:
        """Of its counters, or what the engine says itself."""
        if not self.drafted or self.accepted is None:
            return self.told_rate
        return draft_acceptance(self.accepted, self.drafted)

    @property
    def position_rates(self) -> tuple[float, ...]:
        return position_rates(self.at_least, self.steps or 0)


COUNTED = ("steps", "drafted", "accepted", "generated")


def between(before: Reading, after: Reading) -> tuple[Reading, bool]:
    """What was counted between two readings, and whether the engine was started anew."""
    pairs = [(getattr(before, name), getattr(after, name)) for name in COUNTED]
    if any(b is not None and a is not None and a < b for b, a in pairs):
        return after, True
    grown = {
        name: None if a is None else a - (b or 0.0)
        for name, (b, a) in zip(COUNTED, pairs, strict=True)
    }
    padded = (*before.at_least, *(0.0,) * len(after.at_least))
    counts = tuple(a - b for a, b in zip(after.at_least, padded, strict=False))
    return replace(after, at_least=counts, **grown), False


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine is recognised, read, asked and set.

    Attributes:
        owner: what its list of models says of who owns them.
        names: Prometheus' name of every figure, without `_total`.
        extra: fields of every request, so that each prompt is read anew.
        flag: how its draft length is set, `{k}` in it, `{k1}` for one more.
    """

    name: str
    title: str
    owner: str
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""

    def read(self, text: str) -> Reading:
        """Raises ConfigError: this is no answer of its /metrics."""
        return _from_prometheus(text, self.names)


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
    """Its /metrics is a JSON list of iterations, emptied by reading: it is added up here."""

    def read(self, text: str) -> Reading:
        iterations = read_json(text, what="/metrics") if text.strip() else []
        if not isinstance(iterations, list):
            raise ConfigError("/metrics must be a list of iterations.")
        whole = [one for one in iterations if isinstance(one, dict)]
        stats = [s for one in whole if isinstance(s := one.get("specDecodingStats"), dict)]
        last = whole[-1] if whole else {}
        return Reading(
            steps=_sum(stats, "numRequestsWithDraftTokens"),
            drafted=_sum(stats, "numDraftTokens"),
            accepted=_sum(stats, "numAcceptedTokens"),
            running=_number(last.get("numActiveRequests")),
            waiting=_number(last.get("numQueuedRequests")),
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
            "told_mat": "sglang:spec_accept_length",
            "told_rate": "sglang:spec_accept_rate",
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


def engine_of(models: object) -> Engine:
    """The engine whose list of models this is.

    Raises ConfigError: it is none, or of an engine that is not known here.
    """
    data = models.get("data") if isinstance(models, dict) else None
    owners = [one.get("owned_by") for one in data or () if isinstance(one, dict)]
    for engine in ENGINES:
        if engine.owner in owners:
            return engine
    known = ", ".join(engine.title for engine in ENGINES)
    raise ConfigError(
        f"/v1/models names owners {owners[:3]!r:.80}; an engine that is known here ({known}) "
        "must answer."
    )


def _from_prometheus(text: str, names: Mapping[str, str]) -> Reading:
    by_name = {metric: name for name, metric in names.items()}
    found: dict[str, list[float]] = {}
    positions: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = by_name.get(sample.name.removesuffix("_total"))
                if name == "at_least":
                    at = int(sample.labels[POSITION])
                    positions[at] = positions.get(at, 0.0) + sample.value
                elif name is not None:
                    found.setdefault(name, []).append(sample.value)
    except (ValueError, KeyError) as error:
        raise ConfigError("/metrics must be in Prometheus' text format.") from error
    deepest = min(max(positions, default=-1), 255)
    at_least = tuple(positions.get(at, 0.0) for at in range(deepest + 1))
    # There is a series per model or worker: counts are added up, means are not.
    whole = {
        name: sum(values) / (len(values) if name.startswith("told_") else 1)
        for name, values in found.items()
    }
    return Reading(**whole, at_least=at_least)


def _sum(stats: Iterable[Mapping[str, Any]], key: str) -> float:
    return sum(_number(one.get(key)) or 0.0 for one in stats)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
