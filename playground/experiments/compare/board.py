"""A comparison as it stands: its configurations and their runs, live or read from the log alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.audit import Audit
from playground.experiments.bench.audits import stored_audit
from playground.experiments.bench.measured import Measured
from playground.experiments.compare.plan import ComparePlan
from playground.experiments.compare.verdict import first_parting
from storage import RunDetail, RunLog, RunQuery, RunSummary

PAGE = 500
RunKey = tuple[str, int, str]
"""Prompt, repeat, configuration."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of a comparison; the first is plain decoding.

    Attributes:
        settings: those that are not the method's defaults, in words.
    """

    name: str
    decoding_type: str
    lossless: bool
    settings: str


@dataclass(slots=True)
class Board:
    """Everything that the page shows of a comparison.

    Attributes:
        setup: what is the same for all, in words.
        prompts: name of every prompt, and its begin.
        runs: id in the log of every run so far, unfinished ones too.
        measured: the completed runs.
        audits: by configuration.
        faults: configurations that could not go on, and why.
        skipped: prompts that the target cannot take, and why.
    """

    id: str
    entries: tuple[Entry, ...]
    setup: str
    greedy: bool
    prompts: dict[str, str] = field(default_factory=dict)
    runs: dict[RunKey, str] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    audits: dict[str, Audit] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, run: RunDetail) -> None:
        """A run of the log that is over."""
        labels = run.labels
        self.prompts.setdefault(labels["prompt"], shown_prompt(labels, run.prompt_text))
        key = labels["prompt"], int(labels["repeat"]), labels["configuration"]
        self.runs[key] = run.id
        if run.status == "completed":
            self.measured.append(Measured.of(run))
        elif run.error:
            self.faults[labels["configuration"]] = run.error

    def of(self, name: str) -> list[Measured]:
        """One configuration's completed runs."""
        return [run for run in self.measured if run.configuration == name]

    @property
    def plain(self) -> str:
        return self.entries[0].name

    @property
    def num_repeats(self) -> int:
        return 1 + max((repeat for _, repeat, _ in self.runs), default=-1)


def board_of(plan: ComparePlan, compare_id: str, dtype: str, device: str) -> Board:
    """The empty board of a comparison that is about to run."""
    entries = tuple(
        Entry(c.name, c.config.decoding_type, c.config.lossless, settings_words(c.config))
        for c in plan.configurations
    )
    setup = setup_words(plan.target.name, dtype, device, plan.sampling, plan.limits.max_new_tokens)
    return Board(compare_id, entries, setup, plan.sampling.greedy)


def stored_board(log: RunLog, compare_id: str, types: Mapping[str, type[MethodConfig]]) -> Board:
    """A comparison from its runs in the log.

    Raises:
        ConfigError: the log has no run of it.
    """
    details = stored_runs(log, compare_id)
    if not details:
        raise ConfigError(f"No comparison {compare_id!r:.80} is in the log. Was it deleted?")
    first = details[0]
    sampling = Sampling.parse(first.sampling)
    length = first.limits["max_new_tokens"]
    device = str(first.environment.get("device_name") or first.device)
    setup = setup_words(first.target, first.dtype, device, sampling, length)
    board = Board(compare_id, _entries(details, types), setup, sampling.greedy)
    for run in details:
        board.add(run)
    plain = {run.pair: run for run in board.of(board.plain)}
    for entry in board.entries[1:]:
        pairs = [(run, plain[run.pair]) for run in board.of(entry.name) if run.pair in plain]
        parting = first_parting(pairs)
        if parting is None:
            continue
        (own, plain_run), _ = parting
        found = stored_audit(log, own.run_id, plain_run.run_id)
        if found is not None:
            board.audits[entry.name] = found
    return board


def stored_runs(log: RunLog, compare_id: str) -> list[RunDetail]:
    """All runs of a comparison, in the order in which they ran."""
    details = (log.get(run.id) for run in _summaries(log, compare_id))
    return [run for run in details if run is not None and {"place", "prompt"} <= set(run.labels)]


def _summaries(log: RunLog, compare_id: str) -> Iterator[RunSummary]:
    offset = 0
    while True:
        query = RunQuery(
            labels={"compare": compare_id}, descending=False, limit=PAGE, offset=offset
        )
        page = log.find(query)
        yield from page.rows
        offset += PAGE
        if offset >= page.total:
            return


def _entries(
    details: Sequence[RunDetail], types: Mapping[str, type[MethodConfig]]
) -> tuple[Entry, ...]:
    by_place: dict[int, RunDetail] = {}
    for run in details:
        by_place.setdefault(int(run.labels["place"]), run)
    return tuple(
        Entry(
            run.labels["configuration"],
            run.decoding_type,
            run.lossless,
            _stored_settings(run.method, types.get(run.decoding_type)),
        )
        for _, run in sorted(by_place.items())
    )


def _stored_settings(values: Mapping[str, Any], kind: type[MethodConfig] | None) -> str:
    try:
        return "" if kind is None else settings_words(kind.parse(values))
    except ConfigError:
        return "settings of another version"


def settings_words(config: MethodConfig) -> str:
    """The settings that are not the method's defaults."""
    values, fresh = config.model_dump(mode="json"), type(config).parse({}).model_dump(mode="json")
    changed = [key for key in values if key != "decoding_type" and values[key] != fresh[key]]
    return ", ".join(f"{key} {_short(values[key])}" for key in changed)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(str(value)) > 24:
        return f"of {len(value)}"
    return str(value)


def setup_words(
    target: str, dtype: str, device: str, sampling: Sampling, max_new_tokens: int
) -> str:
    """What is the same for every configuration."""
    if sampling.greedy:
        drawn = "greedy"
    else:
        drawn = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    return f"{target} · {dtype} · {device} · {drawn} · at most {max_new_tokens} tokens"


def shown_prompt(labels: Mapping[str, str], text: str) -> str:
    """A prompt's category and begin, for a menu."""
    words = " ".join(text.split())
    begin = words if len(words) <= 60 else words[:59] + "…"
    return begin if labels["category"] == labels["suite"] else f"{labels['category']}: {begin}"
