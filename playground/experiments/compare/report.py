"""A comparison as it stands, live or from the log alone, and its report as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.config import Sampling
from engine.errors import ConfigError
from playground.experiments.finished import FinishedRequest, Pair, RunGroup, details_of, in_pairs
from playground.experiments.plan import Types, stored_config
from playground.experiments.report.audits import audits_of_pairs
from playground.experiments.report.report import Section, make_report
from playground.experiments.report.statistics import speedup_of
from playground.experiments.report.verdict import NEAR_TIES, Divergence
from playground.host.stream import stored_badge
from storage import RunDetail, RunLog

LEFT_OUT = ("groups", "latency", "by_context")
"""What a section has for benchmarks only."""
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
        plan: its configurations and sampling, as `ExperimentPlan.to_dict` writes them.
        setup: what is the same for all, in a sentence; empty before the first run.
        prompts: name of every prompt, and its begin.
        runs: id in the log of every run so far, unfinished ones too.
        faults: configurations that could not go on, and why.
        skipped: prompts that the target cannot take, and why.
        planned: how many requests there will be; None once it is over.
        interrupted: whether the process ended before the comparison did.
    """

    id: str
    plan: Mapping[str, Any]
    setup: str = ""
    prompts: dict[str, str] = field(default_factory=dict)
    runs: dict[RunKey, str] = field(default_factory=dict)
    finished: list[FinishedRequest] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    planned: int | None = None
    interrupted: bool = False

    @classmethod
    def stored(cls, log: RunLog, compare_id: str) -> Comparison:
        """One from its runs in the log."""
        details = stored_runs(log, compare_id)
        by_place: dict[int, RunDetail] = {}
        for run in details:
            by_place.setdefault(int(run.labels["place"]), run)
        configurations = [
            {
                "name": run.labels["configuration"],
                "title": run.labels["configuration"],
                "lossless": run.lossless,
                "config": dict(run.method),
            }
            for _, run in sorted(by_place.items())
        ]
        sampling = dict(details[0].sampling)
        comparison = cls(compare_id, {"configurations": configurations, "sampling": sampling})
        for run in details:
            comparison.add(run)
        rounds = {(r.labels["prompt"], r.labels.get("turn"), r.labels["repeat"]) for r in details}
        expected = len(rounds) * len(set(comparison.names) - set(comparison.faults))
        done = [r for r in comparison.finished if r.configuration not in comparison.faults]
        comparison.planned = expected if len(done) < expected else None
        return comparison

    def add(self, run: RunDetail) -> None:
        """A run of the log that is over."""
        labels = run.labels
        self.setup = self.setup or _setup_sentence(run)
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
        return [c["name"] for c in self.plan["configurations"]]

    def median_runs(self, prompt: str) -> list[str]:
        """Of every configuration the run on this prompt that decoded for the median time.

        Of an even number it is the faster of the two in the middle; one that finished nothing
        shows the last that it began.
        """
        found: list[str] = []
        for name in self.names:
            finished = (r for r in self.finished if (r.prompt, r.configuration) == (prompt, name))
            timed = sorted(finished, key=lambda request: request.decode_s)
            begun = [run for (p, _, n), run in self.runs.items() if (p, n) == (prompt, name)]
            found += [timed[(len(timed) - 1) // 2].run_id] if timed else begun[-1:]
        return found

    def shown_prompt(self) -> str | None:
        """The last prompt that as many configurations finished as any other."""
        counts = {
            prompt: len({r.configuration for r in self.finished if r.prompt == prompt})
            for prompt, _, _ in self.runs
        }
        most = max(counts.values(), default=0)
        return next((p for p in reversed(counts) if counts[p] == most), None)

    def to_json(self, log: RunLog, types: Types) -> str:
        """Everything under the panels, and which run is whose."""
        by_name = {n: [r for r in self.finished if r.configuration == n] for n in self.names}
        plain = by_name[self.names[0]]
        pairs = {name: in_pairs(own, plain) for name, own in by_name.items()}
        audits = {k: v for name in self.names for k, v in audits_of_pairs(log, pairs[name]).items()}
        report = make_report(self.plan, self.finished, audits, planned=self.planned)
        rows = []
        for section, own in zip(report.configurations, self.plan["configurations"], strict=True):
            figures = {k: v for k, v in asdict(section).items() if k not in LEFT_OUT}
            badge = stored_badge(own["config"], lossless=section.lossless)
            rows.append(
                {
                    **figures,
                    "badge": "baseline" if section.reference else badge,
                    "settings": _settings_sentence(own["config"], types),
                    "fault": self.faults.get(section.name),
                    "speedup": None
                    if section.overall.speedup is None or section.reference
                    else section.overall.speedup.text,
                    "by_prompt": _by_prompt(pairs[section.name]),
                    "verdict": _verdict(log, section),
                }
            )
        return json.dumps(
            {
                "id": self.id,
                "setup": self.setup,
                "headline": report.headline,
                "fastest": report.fastest,
                "num_repeats": 1 + max((repeat for _, repeat, _ in self.runs), default=-1),
                "configurations": rows,
                "prompts": list(self.prompts.items()),
                "skipped": list(self.skipped.items()),
                "runs": [[*key, run] for key, run in self.runs.items()],
                "medians": {prompt: self.median_runs(prompt) for prompt in self.prompts},
            }
        )


def stored_runs(log: RunLog, compare_id: str) -> list[RunDetail]:
    """All runs of a comparison, in the order in which they ran."""
    details = details_of(log, RunGroup(labels={"compare": compare_id}))
    found = [run for run in details if {"place", "prompt"} <= set(run.labels)]
    if not found:
        raise ConfigError(f"No comparison {compare_id!r:.80} is in the log. Was it deleted?")
    return found


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


def _settings_sentence(values: Mapping[str, Any], types: Types) -> str:
    """The settings that are not the method's defaults."""
    try:
        changed = stored_config(values, types).changed_flat
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
    found = {prompt: speedup_of(its) for prompt, its in of_prompt.items()}
    return [(prompt, one.ratio) for prompt, one in found.items() if one and one.ratio is not None]


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
