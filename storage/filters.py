"""Which runs are asked for, in which order, and what answers: pages, groups, facets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

from storage.records import RunSummary, Status

Figure = Literal[
    "num_prompt_tokens",
    "num_new_tokens",
    "num_steps",
    "mat",
    "tok_s",
    "ttft_s",
    "itl_ms",
    "step_p50_ms",
    "step_p95_ms",
    "draft_acceptance",
    "draft_s",
    "verify_s",
    "accept_s",
    "other_s",
]
"""The numbers of a run that the database sorts, bounds and averages."""
SortKey = (
    Figure
    | Literal["created_at", "target", "decoding_type", "method_title", "status", "name"]
    | Literal["dtype", "device", "finish_reason"]
)
GroupKey = Literal[
    "target", "method_title", "setup_id", "prompt_id", "status", "dtype", "device", "benchmark_id"
]
"""What runs are grouped by, besides `tag` and `label:KEY`."""
LABEL_PREFIX = "label:"


def names_of(kinds: Any) -> tuple[str, ...]:
    """The words of a Literal, or of a union of them."""
    inner = get_args(kinds)
    if isinstance(inner[0], str):
        return inner
    return tuple(word for kind in inner for word in names_of(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Which runs, in which order; empty filters let everything through."""

    target: str | None = None
    decoding_type: str | None = None
    method_title: str | None = None
    status: Status | None = None
    dtype: str | None = None
    device: str | None = None
    setup_id: str | None = None
    prompt_id: str | None = None
    benchmark_id: str | None = None
    tag: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """All of them must be equal."""
    ranges: Mapping[Figure, tuple[float | None, float | None]] = field(default_factory=dict)
    """Least and most of a figure; a run without it is left out."""
    ids: tuple[str, ...] | None = None
    """Only these."""
    text: str = ""
    """Found anywhere in prompt, name, note, method or target, whatever the case."""
    include_deleted: bool = False
    only_deleted: bool = False
    sort: SortKey = "created_at"
    descending: bool = True
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RunPage:
    """One page of runs, and how many there are in all."""

    rows: tuple[RunSummary, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several runs."""

    mean: float
    std: float | None
    """Of a sample: n - 1 below the line; None for one run."""
    num_runs: int


class Circumstance(NamedTuple):
    """What must be equal where one speed is divided by another."""

    target: str
    prompt_id: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that have something in common."""

    value: str | None
    """What they have in common; None for those that have no such thing."""
    num_runs: int
    newest_at: datetime
    """Aware, UTC."""
    example: RunSummary
    """One of them."""
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Facets:
    """What can be filtered by: the different values in the log."""

    targets: tuple[str, ...]
    methods: tuple[str, ...]
    tags: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    """At most 50 values of each key."""
    benchmarks: Mapping[str, str]
    """Names of the newest by id."""
