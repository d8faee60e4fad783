"""Values of the run log: runs, queries, results, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol, get_args


class StorageError(Exception):
    """The run log cannot be read or written; the message says why and what to do."""


class OutOfReachError(StorageError):
    """The database's server is out of reach; it may be back in a moment."""


class SchemaError(StorageError):
    """The database was written by a newer program, or is no run log."""


class UnknownRunError(StorageError):
    """No run has this id."""


class UnknownBenchmarkError(StorageError):
    """No benchmark has this id."""


class UnknownArtifactError(StorageError):
    """No artifact has this id."""


Status = Literal["running", "completed", "cancelled", "failed", "interrupted"]
"""`interrupted`: its process died; everything streamed until then is there."""


EXTERNAL = "External"
"""Decoding type of runs of other engines. Whether they are lossless is unknown; the column cannot
be NULL, so the type says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """Everything needed to repeat a run, known before it starts."""

    target: str
    method: Mapping[str, Any]
    """The method's settings as plain JSON; has `decoding_type`."""
    method_title: str
    lossless: bool | None
    """None: not known."""
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    prompt_text: str = ""
    """Raw prompt, or the last user turn."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Turns of a chat; empty for raw completion."""
    dtype: str = ""
    device: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, machine, weights."""
    tags: tuple[str, ...] = ()
    benchmark_id: str | None = None
    """The benchmark that it belongs to."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a benchmark groups by: suite, category, prompt, turn, repeat, configuration, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step as the engine recorded it (same fields), and its tokens as text."""

    index: int
    context_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    draft_probs: tuple[float | None, ...]
    target_probs: tuple[float | None, ...]
    accepted: tuple[int, ...]
    bonus: int
    num_committed: int
    num_extra_rows: int
    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    at_s: float
    decision: str = ""
    expected: tuple[float, float] | None = None
    bypass: str | None = None
    num_cut: int = 0
    num_forced: int = 0
    rollback_s: float = 0.0
    token_texts: tuple[str, ...] = ()
    """Label of every node."""
    bonus_text: str = ""
    committed_texts: tuple[str, ...] = ()
    """Piece of text of each committed token, as it streamed; may be empty."""


class LogWatcher(Protocol):
    """Receives what was written, on the thread that wrote it."""

    def prefilled(self, *, num_prompt_tokens: int, ttft_s: float) -> None:
        """A run's first token is there."""

    def stepped(self, steps: Sequence[StepRow]) -> None:
        """A run has taken these steps."""

    def finished(self, *, reason: str | None, metrics: Mapping[str, Any]) -> None:
        """A run is over, however it ended."""


def experiment_of(benchmark_id: str | None, labels: Mapping[str, str]) -> str | None:
    """Kind and id of a run's experiment, such as `compare:ID`; None for a run of its own.

    The trials of a sweep are benchmarks named `SWEEP-TRIAL`.
    """
    for kind in ("compare", "replay"):
        if labels.get(kind):
            return f"{kind}:{labels[kind]}"
    if not benchmark_id:
        return None
    whole, dash, _ = benchmark_id.partition("-")
    return f"{'sweep' if dash else 'benchmark'}:{whole}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A row of the table of runs."""

    id: str
    created_at: datetime
    """Aware, UTC."""
    status: Status
    target: str
    decoding_type: str
    method_title: str
    lossless: bool | None
    """None: not known."""
    dtype: str
    device: str
    method: Mapping[str, Any]
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    setup_id: str
    """Equal for runs of equal target, method, sampling (but its seed), limits, dtype, device."""
    prompt_id: str
    """Equal for runs of equal prompts."""
    prompt_text: str
    """Its first 200 characters; whole in `RunDetail`."""
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    mat: float | None
    tok_s: float | None
    ttft_s: float | None
    itl_ms: float | None
    step_p50_ms: float | None
    step_p95_ms: float | None
    draft_acceptance: float | None
    draft_s: float | None
    """Mean of a step, as the three below."""
    verify_s: float | None
    accept_s: float | None
    other_s: float | None
    finish_reason: str | None
    name: str
    note: str
    tags: tuple[str, ...]
    labels: Mapping[str, str]
    benchmark_id: str | None
    deleted: bool

    @property
    def experiment(self) -> str | None:
        """The experiment that it is a request of; see `experiment_of`."""
        return experiment_of(self.benchmark_id, self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail(RunSummary):
    """All of a run but its steps."""

    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    environment: Mapping[str, Any]
    first_token_id: int | None
    first_text: str
    output_ids: tuple[int, ...]
    """New tokens; of an interrupted run those streamed before it died."""
    text: str
    metrics: Mapping[str, Any]
    error: str | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A whole run, to be carried to another log."""

    run: RunDetail
    steps: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome for a run of another log."""

    id: str
    """Its id here."""
    source_id: str
    kind: Literal["added", "present", "renamed"]
    """`present`: it was here already; `renamed`: another run has its id, so it got a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkHead:
    """A benchmark without its plan, which may have thousands of prompts and never changes."""

    id: str
    name: str
    status: Status
    created_at: datetime
    """Aware, UTC."""
    finished_at: datetime | None
    summary: Mapping[str, Any]
    """Empty until it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(BenchmarkHead):
    """A plan of many runs, and what came of it."""

    plan: Mapping[str, Any]
    """Plain JSON; enough to resume after an interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A measurement or a drawing that is kept under a kind and a key; its bytes come separately."""

    id: str
    kind: str
    key: Mapping[str, Any]
    meta: Mapping[str, Any]
    created_at: datetime
    """Aware, UTC."""
    run_id: str | None
    benchmark_id: str | None


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
    experiment: str | None = None
    """As `experiment_of` writes it."""
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
    """One page of runs, and how many there are on all pages."""

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
    experiment: str | None = None
    """A machine is not as fast every day; None for runs of no experiment."""


@dataclass(frozen=True, slots=True)
class DecodeTotals:
    """What completed runs add up to.

    Attributes:
        num_tokens: without the first token of each run, which prefill commits.
        decode_s: seconds from first to last commit.
    """

    num_runs: int
    num_tokens: int
    decode_s: float
    num_steps: int


class SpeedupCounts(NamedTuple):
    """Totals of a configuration and of plain decoding over the same requests of an experiment."""

    own: DecodeTotals
    plain: DecodeTotals


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """The requests of one experiment, as a row among single runs.

    Attributes:
        key: kind and id; see `experiment_of`.
        name: the benchmark's; empty for other kinds.
        num_completed: of its `num_runs` requests.
        speedups: of every configuration that answered all that plain decoding did.
        example: one of its runs.
    """

    key: str
    name: str
    num_runs: int
    num_completed: int
    newest_at: datetime
    speedups: tuple[SpeedupCounts, ...]
    example: RunSummary

    @property
    def kind(self) -> str:
        return self.key.partition(":")[0]

    @property
    def id(self) -> str:
        return self.key.partition(":")[2]


@dataclass(frozen=True, slots=True)
class MeasuredSetup:
    """A configuration that an experiment compared with plain decoding."""

    counts: SpeedupCounts
    example: RunSummary
    """One of its runs."""


@dataclass(frozen=True, slots=True)
class FoldedPage:
    """The same of single runs and experiments."""

    rows: tuple[RunSummary | ExperimentRow, ...]
    total: int


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
