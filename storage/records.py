"""Values of the run log: runs, queries, results, errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

Row = TypeVar("Row")


class StorageError(Exception):
    """The run log cannot be read or written; the message says why and what to do."""


class BusyError(StorageError):
    """The database is locked or out of reach, perhaps only for a moment."""


class OutOfReachError(BusyError):
    """The database's server cannot be reached."""


Status = Literal["running", "completed", "cancelled", "failed", "interrupted"]
"""`interrupted`: its process died; all that was streamed until then is stored."""


PLAIN = "Autoregressive"
"""Decoding type of plain decoding, the baseline of every speedup."""
EXTERNAL = "External"
"""Decoding type of other engines' runs. Whether they are lossless is unknown; that column cannot be
NULL, so this type marks it."""


ExperimentKind = Literal["benchmark", "compare", "sweep", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """The request of an experiment that a run answers; a run of its own has these defaults.

    Attributes:
        experiment_id: of its row in `benchmarks`; a replay has none.
        trial: the settings of a sweep's trial, as a digest: equal for every attempt at them.
        suite, prompt: the prompt's suite, and its name there.
        turn, repeat: counted from 0.
        configuration: its name in the plan; empty for a run that is no request.
        worker: which worker of a cluster answered; empty without one.
    """

    experiment_id: str | None = None
    kind: ExperimentKind | None = None
    trial: str = ""
    suite: str = ""
    prompt: str = ""
    turn: int = 0
    repeat: int = 0
    configuration: str = ""
    worker: str = ""

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """Identifies a request of a plan."""
        return *self.pair_key, self.configuration

    @property
    def pair_key(self) -> tuple[str, str, int, int]:
        """Equal for the same request to another configuration."""
        return self.suite, self.prompt, self.turn, self.repeat


REQUEST_KEY = tuple(one.name for one in fields(RequestKey))
"""The columns of `runs` that name a request."""


def key_values(run: Any) -> dict[str, Any]:
    """The `RequestKey` of a run or row, as keyword arguments."""
    return {name: getattr(run, name) for name in REQUEST_KEY}


def labelled_key(benchmark_id: str | None, labels: Mapping[str, str]) -> RequestKey:
    """The key of a run before schema 0009, which named its request in its labels.

    The benchmark of a sweep's trial was `SWEEP-TRIAL`.
    """
    whole, dash, trial = (benchmark_id or "").partition("-")
    kind: ExperimentKind = "sweep" if dash else "benchmark"
    if marked := labels.get("compare") or labels.get("replay"):
        whole, trial, kind = marked, "", "compare" if labels.get("compare") else "replay"
    if not whole:
        return RequestKey()
    key = RequestKey(experiment_id=whole, kind=kind, trial=trial)
    texts, numbers = ("suite", "prompt", "configuration"), ("turn", "repeat")
    try:
        request: dict[str, Any] = {name: labels[name] for name in texts}
        request |= {name: int(labels[name]) for name in numbers}
    except (KeyError, ValueError):
        return key
    if not all(0 <= request[name] < 2**31 for name in numbers):
        return key
    return replace(key, **request, worker=labels.get("worker", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(RequestKey):
    """The settings of a run, and its facts known in advance."""

    target: str
    method: Mapping[str, Any]
    """The method's settings as plain JSON; has `decoding_type`."""
    method_title: str
    lossless: bool | None
    """None: unknown."""
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    prompt_text: str = ""
    """Raw prompt, or the last user turn; in a summary its first 200 characters."""
    dtype: str = ""
    device: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What runs are filtered and grouped by: category, …; those of a request name its key, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun(RunSettings):
    """Everything needed to repeat a run."""

    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    """Turns of a chat; empty for raw completion."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, machine, weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step with the engine's fields, and its tokens as text."""

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
    """Is notified of writes, on the thread that wrote."""

    def stepped(self, steps: Sequence[StepRow]) -> None:
        """A run has taken these steps."""

    def finished(self, *, reason: str | None, metrics: Mapping[str, Any]) -> None:
        """A run has ended in any way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(RunSettings):
    """A row of the table of runs."""

    id: str
    created_at: datetime
    """Aware, UTC."""
    status: Status
    decoding_type: str
    setup_id: str
    """Equal for runs with equal target, method, sampling (except seed), limits, dtype, device."""
    prompt_id: str
    """Equal for runs of equal prompts."""
    tags: tuple[str, ...]
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
    """Mean over steps, like the next three."""
    verify_s: float | None
    accept_s: float | None
    other_s: float | None
    finish_reason: str | None
    name: str
    note: str
    deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail(RunSummary):
    """A run without its steps."""

    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]
    first_token_id: int | None
    first_text: str
    output_ids: tuple[int, ...]
    """New tokens; of an interrupted run those streamed until then."""
    text: str
    metrics: Mapping[str, Any]
    error: str | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run with its steps, as transferred between logs."""

    run: RunDetail
    steps: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkHead:
    """A benchmark without its plan, which may have thousands of prompts and never changes."""

    id: str
    kind: str
    """As its plan has it."""
    name: str
    status: Status
    created_at: datetime
    """Aware, UTC."""
    finished_at: datetime | None
    summary: Mapping[str, Any]
    """Empty until it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(BenchmarkHead):
    """A plan of many runs, and a summary of how it ended."""

    plan: Mapping[str, Any]
    """Plain JSON; enough to resume after an interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A measurement or a drawn tree under a kind and a key; its bytes are read separately."""

    id: str
    kind: str
    key: Mapping[str, Any]
    meta: Mapping[str, Any]
    created_at: datetime
    """Aware, UTC."""
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
NameKey = Literal[
    "experiment_id",
    "target",
    "method_title",
    "decoding_type",
    "status",
    "name",
    "dtype",
    "device",
    "finish_reason",
]
"""Columns that runs are filtered and sorted by, the most selective ones first; equal values are
ordered by time."""
SortKey = Literal[Figure, NameKey, "created_at"]
GroupKey = Literal[
    "target", "method_title", "setup_id", "prompt_id", "status", "dtype", "device", "experiment_id"
]
"""Keys that runs are grouped by, besides `tag` and `label:KEY`."""
FacetKey = Literal["target", "method_title", "decoding_type", "tag", "label"]
"""What filters offer the values of."""
LABEL_PREFIX = "label:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Filters, order and page of runs; empty filters match everything."""

    target: str | None = None
    decoding_type: str | None = None
    method_title: str | None = None
    status: Status | None = None
    dtype: str | None = None
    device: str | None = None
    setup_id: str | None = None
    prompt_id: str | None = None
    experiment_id: str | None = None
    trial: str | None = None
    tag: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """All of them must be equal."""
    ids: tuple[str, ...] | None = None
    """Only these."""
    text: str = ""
    """Text in the prompt, name, note, method or target, ignoring case."""
    deleted: bool | None = False
    """None: both."""
    sort: SortKey = "created_at"
    descending: bool = True
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RunPage(Generic[Row]):
    """One page of runs, and the number of rows of all pages."""

    rows: tuple[Row, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Weighted mean and standard deviation of a figure over several runs."""

    mean: float
    std: float | None
    """Of a sample: with equal weights divided by n - 1. None for one run."""

    @classmethod
    def of_sums(cls, w: float, ww: float, wx: float, wxx: float) -> Self | None:
        """From Σw, Σw², Σwx and Σwx², w being the weights; None where they are all 0.

        The variance is Σw(x - mean)² / (Σw - Σw² / Σw), unbiased for weights that say how reliable
        a value is.
        """
        if not w:
            return None
        freedom = w - ww / w
        several = freedom > 1e-9 * w
        return cls(wx / w, math.sqrt(max(0.0, wxx - wx * wx / w) / freedom) if several else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest(RequestKey):
    """A completed run as a request of an experiment, as far as its speedup depends on it.

    Attributes:
        decode_s: first commit → last commit; 0 where the first token was the only one.
        device: the kind of device, by name.
    """

    num_new_tokens: int
    num_steps: int
    ttft_s: float
    decode_s: float
    run_id: str = ""
    setup_id: str = ""
    decoding_type: str = ""
    device: str = ""

    @classmethod
    def timed(cls, run: Any, **others: Any) -> Self:
        """A request with the figures of its run, and `others` of its fields."""
        names = "num_new_tokens", "num_steps", "ttft_s", "decode_s"
        others |= {name: getattr(run, name) or 0 for name in names}
        return cls(**others)

    @property
    def machine(self) -> tuple[str, str]:
        """Where it was timed. Ratios compare only times of one machine."""
        return self.worker, self.device

    @property
    def latency_s(self) -> float:
        """Request in the engine → last commit."""
        return self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """The requests of one experiment, as a row among single runs.

    Attributes:
        name: empty where the log has no row of the experiment.
        num_completed: of its `num_runs` requests.
        example: one of its runs.
    """

    id: str
    kind: ExperimentKind
    name: str
    num_runs: int
    num_completed: int
    newest_at: datetime
    example: RunSummary


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that share a value."""

    value: str | None
    """The shared value; None for runs without one."""
    num_runs: int
    newest_at: datetime
    """Aware, UTC."""
    example: RunSummary
    """One of them."""
    figures: Mapping[str, Spread]
