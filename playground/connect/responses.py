"""Responses of running engines as pydantic models; nothing else of a response is used.

A number that is negative, not finite or larger than 2^53 is refused where it is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from engine.config import Settings

MAX_COUNT = 2**53
"""Floats represent counts up to here exactly."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True, max_length=10_000)]
"""The first invalid item ends validation: there could be an error per byte."""


class Response(Settings):
    """Part of a response; further fields are ignored."""

    model_config = ConfigDict(extra="ignore")


# ---- /v1/models


class ListedModel(Response):
    id: str = Field(min_length=1, max_length=1000)
    owned_by: str | None = None


class ModelList(Response):
    data: Items[ListedModel]


# ---- /v1/chat/completions


class DraftCounts(Response):
    """Counts of one request's drafting."""

    steps: Annotated[Count, Field(ge=1)]
    drafted: Count
    accepted: Count

    @model_validator(mode="after")
    def _no_more_than_drafted(self) -> Self:
        if self.accepted > self.drafted:
            raise ValueError(
                f"accepted draft tokens must be at most those drafted, {self.drafted}, "
                f"got {self.accepted}"
            )
        return self


class Delta(Response):
    content: str | None = None


class StreamChoice(Response):
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(Response):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Acceptance(Response):
    num_spec_steps: Count
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count


class RequestMetrics(Response):
    speculative_decoding: Acceptance | None = None


class Timings(Response):
    draft_n: Count = 0
    draft_n_accepted: Count | None = None
    predicted_n: Count = 0


class Chunk(Response):
    """One event of a streamed answer; the last ones have the figures."""

    choices: Items[StreamChoice] | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    timings: Timings | None = None
    error: Any = None

    @property
    def drafting(self) -> DraftCounts | None:
        """As vLLM or llama-server reports it; None if it is not reported, or nothing was drafted.

        Raises ConfigError: the figures contradict each other.
        """
        spec, times = self.metrics and self.metrics.speculative_decoding, self.timings
        if spec and (spec.num_spec_steps or spec.num_draft_tokens):
            steps, drafted = spec.num_spec_steps, spec.num_draft_tokens
            accepted: int | None = spec.num_accepted_draft_tokens
        elif times and times.draft_n:
            drafted, accepted = times.draft_n, times.draft_n_accepted
            # The first token comes from the prompt; every step commits one more than it accepts.
            steps = max(1, times.predicted_n - 1 - (accepted or 0))
        else:
            return None
        return DraftCounts.parse({"steps": steps, "drafted": drafted, "accepted": accepted})


# ---- /metrics of TensorRT-LLM


class _CamelCase(Response):
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
