"""A comparison as it stands, live or from the log alone, and its report as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.config import Sampling
from engine.errors import ConfigError
from engine.model.audit import Audit
from playground.experiments.chooser import pairs_of
from playground.experiments.finished import FinishedRequest, Pair
from playground.experiments.plan import Configuration, ExperimentPlan, Item, Types
from playground.experiments.report.audits import audits_of_pairs
from playground.experiments.report.page import report_page
from playground.experiments.report.report import Report, Section, make_report
from playground.experiments.report.statistics import speedup_of
from playground.experiments.report.verdict import NEAR_TIES, Divergence
from playground.host.stream import stored_badge
from storage import RunDetail, RunLog, RunQuery

SHOWN_TOKENS, SHOWN_BEFORE = 16, 12
RunKey = tuple[str, int, str]
"""Prompt, repeat, configuration."""
Kind = Literal["baseline", "identical", "diverged", "lossy", "sampled", "none"]
UNSTEADY = (
    "Plain decoding's own text changes from repeat to repeat for {}: this device rounds "
    "differently each time, so other texts may change too."
)
SAMPLED = (
    "Sampled: the method draws from the same distribution as plain decoding, but with other random "
    "numbers, so the texts differ even with the same seed. "
    "Set temperature to 0 to compare them."
)
LOSSY = "Lossy by design: it may keep tokens that the target would not choose."
LOSSY_SAMPLED: tuple[Kind, str, str] = (
    *("lossy", "lossy"),
    "Lossy by design, and sampled: the texts cannot be compared token by token.",
)


@dataclass(slots=True)
class Comparison:
    """Everything that the page shows of a comparison.

    Attributes:
        setup: what is the same for all, in a sentence; empty before the first run.
        prompts: name of every prompt, and its beginning.
        runs: id in the log of every run so far, unfinished ones too.
        faults: configurations that could not go on, and why.
        skipped: prompts that the target cannot take, and why.
        interrupted: whether the process ended before the comparison did.
        environment: where its first run was made.
        seen: ids of the runs that were read.
    """

    id: str
    plan: ExperimentPlan
    setup: str = ""
    prompts: dict[str, str] = field(default_factory=dict)
    runs: dict[RunKey, str] = field(default_factory=dict)
    finished: list[FinishedRequest] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @classmethod
    def read(
        cls, log: RunLog, compare_id: str, types: Types, *, last: Comparison | None = None
    ) -> Comparison:
        """One from its runs in the log.

        Args:
            last: what was read of it before; its runs are not read again.
        """
        row = log.benchmarks.get(compare_id)
        details = stored_runs(log, compare_id, () if last is None else last.seen)
        if last is None and not details:
            raise _unknown(compare_id)
        plan = (
            plan_of_runs(details, types) if row is None else ExperimentPlan.stored(row.plan, types)
        )
        comparison = cls(compare_id, plan) if last is None else replace(last, plan=plan)
        if row is not None:
            skipped = row.summary.get("skipped", [])
            comparison.skipped = {skip["prompt"]: skip["reason"] for skip in skipped}
            comparison.faults |= row.summary.get("faults", {})
            comparison.interrupted = row.status == "interrupted"
        for run in details:
            comparison.add(run)
        return comparison

    def add(self, run: RunDetail) -> None:
        """A run of the log that is over."""
        labels = run.labels
        self.seen.add(run.id)
        self.setup = self.setup or _setup_sentence(run)
        self.environment = self.environment or run.environment
        self.prompts.setdefault(labels["prompt"], _prompt_line(labels, run.prompt_text))
        key = labels["prompt"], int(labels["repeat"]), labels["configuration"]
        self.runs[key] = run.id
        self.interrupted |= run.status == "interrupted"
        if run.status == "completed":
            self.finished.append(FinishedRequest.of(run))
        elif run.error:
            self.faults.setdefault(labels["configuration"], run.error)

    @property
    def names(self) -> list[str]:
        return self.plan.names

    @property
    def num_planned(self) -> int | None:
        """How many requests there will be; None once all of them are finished."""
        names = set(self.names) - set(self.faults)
        turns = sum(len(item.turns) for item in self.plan.items if item.id not in self.skipped)
        planned = turns * self.plan.repeats * len(names)
        return planned if sum(r.configuration in names for r in self.finished) < planned else None

    def pairs(self, name: str) -> list[Pair]:
        """A configuration's answers beside plain decoding's."""
        return pairs_of(self.finished, name, self.plan)

    def make_report(self, log: RunLog) -> Report:
        audits: dict[tuple[str, str], Audit] = {}
        for name in self.names[1:]:
            audits |= audits_of_pairs(log, self.pairs(name))
        return make_report(self.plan, self.finished, audits, planned=self.num_planned)

    def median_runs(self, prompt: str) -> list[str]:
        """Of every configuration the run on this prompt that decoded for the median time.

        Of an even number it is the faster of the two in the middle; one that finished nothing
        shows the last that it began.
        """
        run_ids: list[str] = []
        for name in self.names:
            finished = (r for r in self.finished if (r.prompt, r.configuration) == (prompt, name))
            timed = sorted(finished, key=lambda request: request.decode_s)
            begun = [run for (p, _, n), run in self.runs.items() if (p, n) == (prompt, name)]
            run_ids += [timed[(len(timed) - 1) // 2].run_id] if timed else begun[-1:]
        return run_ids

    def shown_prompt(self) -> str | None:
        """The last prompt that as many configurations finished as any other."""
        counts = {
            prompt: len({r.configuration for r in self.finished if r.prompt == prompt})
            for prompt, _, _ in self.runs
        }
        most = max(counts.values(), default=0)
        return next((p for p in reversed(counts) if counts[p] == most), None)

    def results(self, log: RunLog) -> ComparisonResults:
        """The report, and what is said of every configuration."""
        report = self.make_report(log)
        remarks = []
        for section, own in zip(report.configurations, self.plan.configurations, strict=True):
            badge = stored_badge(own.values, self.environment, lossless=section.lossless)
            remarks.append(
                Remarks(
                    badge="baseline" if section.reference else badge,
                    settings=_settings_sentence(own),
                    fault=self.faults.get(section.name),
                    by_prompt=_by_prompt(self.pairs(section.name)),
                    verdict=_verdict(log, section),
                )
            )
        return ComparisonResults(self, report, tuple(remarks))

    def page(self, log: RunLog) -> str:
        """The comparison as one HTML file."""
        first, *more = self.prompts.values()
        title = f"Comparison: {first}" + (f" and {len(more)} more prompts" if more else "")
        report = self.make_report(log)
        return report_page(title, self.plan, report, self.finished, self.environment)


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is said of a configuration beside its figures.

    Attributes:
        by_prompt: the speedup of every prompt.
        verdict: whether its answers are plain decoding's, in words.
    """

    badge: str
    settings: str
    fault: str | None
    by_prompt: list[tuple[str, float]]
    verdict: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ComparisonResults:
    """A comparison with its report; `remarks` of every section."""

    comparison: Comparison
    report: Report
    remarks: tuple[Remarks, ...]

    def to_json(self) -> str:
        """What the race is drawn from: which run is whose, and the speedups of the table."""
        comparison = self.comparison
        speedups = [
            (section.name, None if section.reference else section.overall.speedup)
            for section in self.report.configurations
        ]
        return json.dumps(
            {
                "setup": comparison.setup,
                "num_repeats": 1 + max((repeat for _, repeat, _ in comparison.runs), default=-1),
                "configurations": [
                    {"name": name, "speedup": speedup and speedup.text}
                    for name, speedup in speedups
                ],
                "prompts": list(comparison.prompts.items()),
                "runs": [[*key, run] for key, run in comparison.runs.items()],
                "medians": {p: comparison.median_runs(p) for p in comparison.prompts},
            }
        )


def stored_runs(log: RunLog, compare_id: str, known: Container[str] = ()) -> list[RunDetail]:
    """The runs of a comparison that are over, in order, but those known by their ids."""
    ids = log.ids(RunQuery(labels={"compare": compare_id}, descending=False))
    runs = log.details([run_id for run_id in ids if run_id not in known])
    return [
        run for run in runs if {"place", "prompt"} <= set(run.labels) and run.status != "running"
    ]


def first_run(log: RunLog, compare_id: str) -> RunDetail:
    """Raises ConfigError: no such comparison is in the log."""
    for run_id in log.ids(RunQuery(labels={"compare": compare_id}, descending=False, limit=1)):
        if (run := log.get(run_id)) is not None:
            return run
    raise _unknown(compare_id)


def _unknown(compare_id: str) -> ConfigError:
    return ConfigError(f"No comparison {compare_id!r:.80} is in the log. Was it deleted?")


def plan_of_runs(details: Sequence[RunDetail], types: Types) -> ExperimentPlan:
    """What a comparison of an earlier version did, which stored runs and no plan."""
    first, by_place = details[0], dict[int, RunDetail]()
    prompts: dict[str, dict[int, RunDetail]] = {}
    for run in details:
        by_place.setdefault(int(run.labels["place"]), run)
        turns = prompts.setdefault(run.labels["prompt"], {})
        turns.setdefault(int(run.labels.get("turn", 0)), run)
    configurations = [
        {
            "name": run.labels["configuration"],
            "title": run.labels["configuration"],
            "lossless": run.lossless,
            "config": dict(run.method),
        }
        for _, run in sorted(by_place.items())
    ]
    values = {
        "kind": "compare",
        "target": {"name": first.target, "hub": first.target},
        "dtype": first.dtype,
        "configurations": configurations,
        "items": [_item(turns) for turns in prompts.values()],
        "repeats": 1 + max(int(run.labels["repeat"]) for run in details),
        "sampling": dict(first.sampling),
        "limits": dict(first.limits),
    }
    return ExperimentPlan.stored(values, types)


def _item(turns: Mapping[int, RunDetail]) -> Item:
    """A prompt from the runs of its turns."""
    run = turns[min(turns)]
    labels, history = run.labels, tuple(dict(message) for message in run.messages[:-1])
    texts = tuple(turns[turn].prompt_text for turn in sorted(turns))
    suite, group = labels.get("suite", ""), labels.get("group", labels["category"])
    name, category = labels["prompt"], labels["category"]
    return Item(suite, name, category, group, texts, not run.messages, history)


def _setup_sentence(run: RunDetail) -> str:
    """What is the same for every configuration."""
    sampling, length = Sampling.parse(run.sampling), run.limits["max_new_tokens"]
    drawn = sampling.words if sampling.greedy else f"{sampling.words}, seed {sampling.seed}"
    device = run.environment.get("device_name") or run.device
    return f"{run.target} · {run.dtype} · {device} · {drawn} · at most {length} tokens"


def _prompt_line(labels: Mapping[str, str], text: str) -> str:
    """A prompt's category and begin, for a menu."""
    flat = " ".join(text.split())
    begin = flat if len(flat) <= 60 else flat[:59] + "…"
    return begin if labels["category"] == labels["suite"] else f"{labels['category']}: {begin}"


def _settings_sentence(configuration: Configuration) -> str:
    """The settings that are not the method's defaults."""
    try:
        changed = configuration.config.changed_flat
    except ConfigError:
        return "settings of another version"
    return ", ".join(f"{key} {_short(value)}" for key, value in changed.items())


def _short(value: Any) -> str:
    return f"of {len(value)}" if isinstance(value, list) and len(str(value)) > 24 else str(value)


def _by_prompt(pairs: Sequence[Pair]) -> list[tuple[str, float]]:
    """Every prompt's own speedup, in the order of the prompts."""
    of_prompt: dict[str, list[Pair]] = {}
    for pair in pairs:
        of_prompt.setdefault(pair[0].prompt, []).append(pair)
    speedups = {prompt: speedup_of(its) for prompt, its in of_prompt.items()}
    ratios = ((prompt, one.ratio if one else None) for prompt, one in speedups.items())
    return [(prompt, ratio) for prompt, ratio in ratios if ratio is not None]


# ---- the verdict in a sentence


def _verdict(log: RunLog, section: Section) -> dict[str, Any]:
    """What the page says about losslessness; `near_tie` and `gap` where texts part."""
    kind, label, sentence = verdict_sentence(section)
    first = section.verdict.divergences[:1] if section.verdict is not None else ()
    return {
        "kind": kind,
        "label": label,
        "sentence": sentence,
        "near_tie": first[0].near_tie if first and kind == "diverged" else None,
        "gap": first[0].gap if first else (),
        "parting": _parting(log, first[0]) if first else None,
    }


def verdict_sentence(section: Section) -> tuple[Kind, str, str]:
    """A kind, two or three words, and a sentence."""
    verdict = section.verdict
    if section.reference and not section.num_unsteady:
        return "baseline", "baseline", "The others are compared with this one."
    if section.reference:
        many = f"{section.num_unsteady} of {section.num_prompts} prompts"
        return "baseline", "not repeatable", UNSTEADY.format(many)
    if verdict is None and section.overall.speedup is None:
        return "none", "not compared", "There is no finished run of plain decoding to compare with."
    if verdict is None:
        return ("sampled", "not comparable", SAMPLED) if section.lossless else LOSSY_SAMPLED
    compared = verdict.num_compared
    if verdict.identical:
        texts = f"{compared} texts" if compared > 1 else "1 text"
        same = f"{verdict.num_tokens} tokens in {texts}, all identical to plain decoding's."
        if section.lossless:
            return "identical", "identical", same
        return "lossy", "lossy", f"Lossy by design, yet identical here: {same}"
    first = verdict.divergences[0]
    texts = (
        f"{compared - verdict.num_identical} of {compared} texts" if compared > 1 else "the text"
    )
    where = f"Differs from plain decoding in {texts}, first at token {first.at + 1}"
    if not section.lossless:
        return "lossy", "lossy", f"{LOSSY} {where}."
    why = f"{where}: {NEAR_TIES[first.near_tie]}."
    return "diverged", f"differs at token {first.at + 1}", why


def _parting(log: RunLog, first: Divergence) -> dict[str, Any]:
    """Where two texts part: the last words in common, and what each says next."""
    ours, theirs = pieces(log, first.run_id), pieces(log, first.reference_run_id)
    at = first.at
    return {
        "prompt": first.prompt,
        "repeat": first.repeat,
        "index": at,
        "own_run": first.run_id,
        "plain_run": first.reference_run_id,
        "before": "".join(theirs[max(0, at - SHOWN_BEFORE) : at]),
        "own": "".join(ours[at : at + SHOWN_TOKENS]),
        "plain": "".join(theirs[at : at + SHOWN_TOKENS]),
    }


def pieces(log: RunLog, run_id: str) -> list[str]:
    """A stored run's text, one piece per token."""
    detail = log.get(run_id)
    first = [] if detail is None else [detail.first_text]
    return first + [piece for row in log.steps(run_id) for piece in row.committed_texts]
