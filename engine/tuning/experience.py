"""What has been learnt of a method on a target and a device, kept between texts and runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from engine.config import Settings
from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.model.files import read_settings
from engine.model.sources import Locate, as_named, atomic_write
from engine.model.target import Target
from engine.safe_text import cpuinfo
from engine.tuning import OnProgress, no_progress, progress_range
from engine.tuning.account import RunningSpeedup
from engine.tuning.costs import Costs, DraftKind
from engine.tuning.latency import LatencyCurve, Prediction, StepLatency
from engine.tuning.survival import Survival
from engine.tuning.timing import measure_curve

MAX_LOSS_SHARE = 0.015
"""Of the elapsed time, the most that drafting may lose."""
INITIAL_CREDIT_MS, MAX_CREDIT_MS, CREDIT_GAIN_SHARE = 8.0, 40.0, 0.1
"""What the first text may lose beyond its share, what any text may, and the share of a text's gain
that is added to the next one's credit."""
MIN_CREDIT_STEPS = 1.0
"""In plain steps, what both are at least: where steps take long, on a busy machine for one, a draft
may lose more than those milliseconds."""
INITIAL_SPEEDUP = 1.1
"""Assumed of drafted steps before any was made."""
LONG_TERM = (0.995, 15.0)
"""The same over all texts. So many steps in which nothing was gained must pass before a method is
no longer tried; the account bounds what they lose."""
QUICK_ROWS = (1, 2, 4, 8, 16, 32)
"""Row counts timed before a target's first draft, in a second or two."""
FINE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Row counts timed where a user asks for a measurement."""
PLAUSIBLE_ROW_SCALES, MIN_REMEASURE_AGE_S = (0.6, 1.7), 3600.0
"""A curve of at least this age is measured again where steps put `Costs.row_scale` outside these
bounds: another program ran during the measurement, or the kernels have become faster since."""
_CURVE = TypeAdapter(LatencyCurve)


@dataclass(slots=True)
class Experience:
    """What is known of a method on a target and a device, updated from text to text.

    Attributes:
        speedups: by kind of draft, over all texts.
        credit: what a text may lose beyond its share, in plain steps: what earlier texts have left
            of theirs.
        trial_debts_ms: by kind, what trials in earlier texts lost beyond their share.
        answer_len: usual number of new tokens; 0 = no text has ended yet.
    """

    survival: Survival
    costs: Costs
    speedups: dict[DraftKind, RunningSpeedup] = field(default_factory=dict)
    credit: float = 0.0
    trial_debts_ms: dict[DraftKind, float] = field(default_factory=dict)
    answer_len: float = 0.0

    @classmethod
    def new(cls, curve: LatencyCurve, stored: Mapping[str, Any] | None = None) -> Experience:
        """On a target with this curve, and with what `to_dict` stored, if anything."""
        values = stored or {}
        costs = Costs.from_dict(curve, values.get("costs", {}))
        experience = cls(Survival(values.get("survival")), costs)
        for kind, (num_tokens, plain_steps) in values.get("returns", {}).items():
            speedup = experience.speedup_of(kind)
            speedup.num_tokens, speedup.plain_steps = num_tokens, plain_steps
        experience.credit = values.get("credit_steps", experience.in_steps(INITIAL_CREDIT_MS))
        experience.trial_debts_ms = dict(values.get("trial_debts", {}))
        experience.answer_len = values.get("answer_len", 0.0)
        return experience

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "survival": self.survival.groups,
            "costs": self.costs.to_dict(),
            "returns": {kind: [s.num_tokens, s.plain_steps] for kind, s in self.speedups.items()},
            "credit_steps": self.credit,
            "trial_debts": self.trial_debts_ms,
            "answer_len": self.answer_len,
        }

    def predict_as_set(self, config: MethodConfig) -> Prediction | None:
        """What drafting as set is expected to bring; None where too little is known."""
        try:
            depth, nodes = config.largest_draft
        except ConfigError:  # a combination: its drafts are one method's or the other's
            return None
        mat, draft_rate = self.survival.expected_mat(depth), self.survival.draft_rate
        if mat is None or draft_rate is None or not self.costs.draft_times:
            return None
        return self.costs.latency().predict(mat, num_nodes=draft_rate * nodes, depth=depth)

    def speedup_of(self, kind: DraftKind) -> RunningSpeedup:
        """Speedup of a kind of draft over all texts."""
        if kind not in self.speedups:
            self.speedups[kind] = RunningSpeedup(INITIAL_SPEEDUP, *LONG_TERM)
        return self.speedups[kind]

    def in_steps(self, credit_ms: float) -> float:
        """A credit in plain steps."""
        return max(credit_ms / self.costs.plain_ms, MIN_CREDIT_STEPS)

    def end_text(self, loss_ms: float, elapsed_ms: float, num_tokens: int) -> None:
        """Record a finished text and what drafting lost in it; negative for a gain."""
        charged_ms = loss_ms if loss_ms > 0 else CREDIT_GAIN_SHARE * loss_ms
        left = (MAX_LOSS_SHARE * elapsed_ms - charged_ms) / self.costs.plain_ms
        self.credit = min(max(0.0, self.credit + left), self.in_steps(MAX_CREDIT_MS))
        before = self.answer_len or num_tokens
        self.answer_len = 0.7 * before + 0.3 * num_tokens


class Prior(Settings):
    """How often a method's drafts are accepted with given weights, on any device.

    Attributes:
        weights, drafter: digests of the target's and of the drafter's weights.
        method: the method's settings without `drafting`.
        survival: as `Survival.groups`.
    """

    weights: str
    drafter: str
    method: dict[str, Any]
    survival: dict[str, list[float]]

    @classmethod
    def of(
        cls, config: MethodConfig, target: Target, locate: Locate, survival: Survival
    ) -> Prior | None:
        """None where the weights cannot be identified."""
        weights, drafter = target.provenance.get("weights"), drafter_digest(config, locate)
        if weights is None or drafter is None:
            return None
        groups = {name: [round(c, 2) for c in counts] for name, counts in survival.groups.items()}
        return cls(weights=weights, drafter=drafter, method=_settings(config), survival=groups)


def drafter_digest(config: MethodConfig, locate: Locate) -> str | None:
    """SHA-256 of the weights that a method drafts with; None where they are not on this machine."""
    digest = hashlib.sha256()
    for method in (config, *config.nested().values()):
        for name in ("speculative_model", "datastore"):
            location = getattr(method, name, None)
            if location is None:
                continue
            files = sorted(Path(locate(location)).glob("*.safetensors"))
            if not files and name == "speculative_model":
                return None
            for file in files:
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _same_drafter(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two files are of the same target and drafter, whatever the size of the drafts."""
    names = ("decoding_type", "speculative_model", "use_dynamic_tree", "vocabulary")
    method, other_method = one["method"], other["method"]
    same = all(method.get(name) == other_method.get(name) for name in names)
    return same and one["target"] == other["target"]


def _settings(config: MethodConfig) -> dict[str, Any]:
    """The settings that identify a method's experience: all but `drafting`."""
    return config.model_dump(mode="json", exclude={"drafting"})


class ExperienceStore:
    """Experience and latency curves in a folder; without one, curves in memory.

    One file per method and target, named by a digest of weights, device and settings.

    Args:
        priors: acceptance of methods before their first draft on this machine.
    """

    def __init__(self, folder: Path | None, priors: Sequence[Prior] = ()) -> None:
        self._folder, self._priors = folder, priors
        self._curves: dict[str, LatencyCurve] = {}

    def load(self, config: MethodConfig, target: Target, locate: Locate = as_named) -> Experience:
        """A method's experience, or a new one; measures the target's latency curve if need be."""
        curve = self.curve(target)
        if values := self._read(_file_name(target, config)):
            try:
                return self._on_current_curve(values, curve, target)
            except (AttributeError, TypeError, ValueError):  # of another version, or damaged
                pass
        weights, settings = target.provenance.get("weights"), _settings(config)
        priors = [p for p in self._priors if (p.weights, p.method) == (weights, settings)]
        if priors and priors[0].drafter == drafter_digest(config, locate):
            return Experience.new(curve, {"survival": priors[0].survival})
        return Experience.new(curve)

    def _on_current_curve(
        self, values: Mapping[str, Any], curve: LatencyCurve, target: Target
    ) -> Experience:
        """Stored experience on the target's curve, which is measured again where it is doubtful."""
        experience = Experience.new(curve, values)
        costs, digest = experience.costs, _digest(curve)
        is_same = values.get("measured", digest) == digest
        low, high = PLAUSIBLE_ROW_SCALES
        if is_same and not low <= costs.row_scale <= high:
            curve = self._remeasure_if_old(target)
            is_same = curve is costs.curve
        if not is_same:  # `row_scale` was learnt relative to the old curve
            experience.costs = Costs.from_dict(curve, {**costs.to_dict(), "slope": 1.0})
        return experience

    def _remeasure_if_old(self, target: Target) -> LatencyCurve:
        file = None if self._folder is None else self._folder / _file_name(target)
        if file and file.is_file() and time.time() - file.stat().st_mtime > MIN_REMEASURE_AGE_S:
            return self._measure_curve(target)
        return self.curve(target)

    def find(
        self, target: str, config: MethodConfig, *, any_size: bool = False
    ) -> Experience | None:
        """Stored experience of a method on a target that is given by name and need not be loaded.

        None where there is none. Of several (dtypes, devices), the newest.

        Args:
            any_size: also of the same weights with drafts of another size.
        """
        folder, wanted = self._folder, {"target": target, "method": _settings(config)}
        files = [] if folder is None else folder.glob("*.json")
        for file in sorted(files, key=lambda file: -file.stat().st_mtime):
            values = self._read(file.name)
            about = values.get("about")
            if about != wanted and not (any_size and about and _same_drafter(about, wanted)):
                continue
            try:
                curve = _CURVE.validate_python(self._read(values["curve"]))
                experience = Experience.new(curve, values)
                experience.costs.plain_ms = float(values["base"])
            except (AttributeError, KeyError, TypeError, ValueError):
                continue
            return experience
        return None

    def step_latency(self, target: str, config: MethodConfig) -> StepLatency | None:
        """How long a method's steps take on this machine; None before its first draft."""
        experience = self.find(target, config) or self.find(target, config, any_size=True)
        return experience.costs.latency() if experience and experience.costs.draft_times else None

    def measure(
        self, config: MethodConfig, context: BuildContext, *, on_progress: OnProgress = no_progress
    ) -> StepLatency:
        """Time the target and the method's drafts anew, and store the result.

        Raises:
            SourceError, DrafterError: the drafter cannot be loaded.
            StoppedError: a user stopped it.
        """
        target, drafter = context.target, config.build(context)
        progress = progress_range(on_progress, 0.0, 0.8)
        curve = measure_curve(target, rows=FINE_ROWS, on_progress=progress)
        self._save_curve(target, curve)
        experience = self.load(config, target, context.locate)
        experience.costs.draft_times.clear()
        experience.costs.time_drafts(drafter.parts[-1], target)
        self.save(config, target, experience)
        on_progress(1.0)
        return experience.costs.latency()

    def save(self, config: MethodConfig, target: Target, experience: Experience) -> None:
        about = {"target": target.name, "method": _settings(config)}
        values = {**experience.to_dict(), "about": about, "curve": _file_name(target)}
        costs = experience.costs
        values["base"], values["measured"] = costs.plain_ms, _digest(costs.curve)
        self._write(_file_name(target, config), values)

    def curve(self, target: Target) -> LatencyCurve:
        """The target's latency curve; each run learns by itself what steps take at present."""
        name = _file_name(target)
        if name not in self._curves:
            try:
                self._curves[name] = _CURVE.validate_python(self._read(name))
            except ValueError:  # there is none, or it is damaged
                return self._measure_curve(target)
        return self._curves[name]

    def _measure_curve(self, target: Target) -> LatencyCurve:
        return self._save_curve(target, measure_curve(target, rows=QUICK_ROWS, repeats=2))

    def _save_curve(self, target: Target, curve: LatencyCurve) -> LatencyCurve:
        self._curves[_file_name(target)] = curve
        self._write(_file_name(target), asdict(curve))
        return curve

    def _read(self, name: str) -> dict[str, Any]:
        """Empty where the file is missing or cannot be read."""
        if self._folder is not None:
            with suppress(PlaygroundError, OSError):
                return read_settings(self._folder / name)
        return {}

    def _write(self, name: str, values: dict[str, Any]) -> None:
        """Best effort: a full disk must not stop a run."""
        if self._folder is not None:
            with suppress(ConfigError), atomic_write(self._folder / name) as partial:
                partial.write_text(json.dumps(values))


def _digest(curve: LatencyCurve) -> str:
    """Identifies a measurement."""
    return hashlib.sha256(json.dumps(asdict(curve)).encode()).hexdigest()[:16]


def _file_name(target: Target, config: MethodConfig | None = None) -> str:
    """By the weights, where they run, and the method's settings."""
    environment = target.environment()
    keys = ("target", "weights", "revision", "dtype", "device_name", "threads", "forward")
    facts = [environment.get(key) for key in keys]
    facts += [cpuinfo(key) for key in ("cpu family", "model")]  # a processor's name says little
    settings = None if config is None else config.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps([facts, settings], default=str).encode()).hexdigest()
    return f"{digest[:32]}.json"
