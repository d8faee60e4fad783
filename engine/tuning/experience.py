"""What is known of a method on a target and a device: kept from text to text and run to run."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import Settings
from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.sources import Locate, as_named
from engine.model.target import Target
from engine.safe_text import cpuinfo
from engine.tuning import OnProgress, ignore, part
from engine.tuning.costs import Costs, Kind
from engine.tuning.latency import LatencyCurve, Prediction, StepLatency
from engine.tuning.survival import Survival
from engine.tuning.timing import measure_curve

SHARE = 0.015
"""Of the elapsed time, the most that drafting may lose."""
FIRST_CREDIT_MS, CREDIT_MS, GAIN_SHARE = 8.0, 40.0, 0.1
"""What the first text may lose beside its share, what any text may, and how much of what texts gain
is put by for it."""
FIRST_RETURN = 1.1
"""Speed of a drafted step over plain decoding, before any was made."""
LONG, SHORT, LOOKUP = (0.99, 10.0), (0.93, 6.0), (0.98, 20.0)
"""Memory per drafted step, and drafted steps assumed at first: over all texts; within one; the same
of drafters without a network, which find something to copy in few steps, and cost little in the
others."""
ROWS, TREE_ROWS = (1, 2, 4, 8, 16, 32), (4, 16)
"""Row counts that are measured of a target before its first draft, in a second or two."""
FINE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""And where somebody asks for it."""
TRUE_SLOPES, LEAST_AGE_S = (0.6, 1.7), 3600.0
"""Prices of rows over the curve's, beyond which a curve of this age was not measured on the machine
as it is: something else ran beside, or the kernels have become faster."""


class Returns:
    """Speed of recent drafted steps over plain ones, as measured.

    Args:
        first: what is assumed of the first ones.
        memory, weight: of the past per step; of what is assumed, in steps.
    """

    def __init__(self, first: float, memory: float, weight: float) -> None:
        self._memory = memory
        self.plain, self.took = first * weight, weight

    @property
    def speedup(self) -> float:
        return self.plain / self.took

    def observe(self, steps: float, tokens: int) -> None:
        """A drafted step that took as long as so many plain ones."""
        self.plain = self._memory * self.plain + tokens
        self.took = self._memory * self.took + steps


@dataclass(slots=True)
class Experience:
    """What is known of a method on a target and a device, from text to text.

    Attributes:
        returns: by kind of draft, of all texts.
        credit: milliseconds that a text may lose before it has a share of its own to lose: what
            earlier texts have left of theirs.
        answer_len: usual number of tokens of a text; 0 = none has ended yet.
    """

    survival: Survival
    costs: Costs
    returns: dict[Kind, Returns] = field(default_factory=dict)
    credit: float = FIRST_CREDIT_MS
    answer_len: float = 0.0

    @classmethod
    def new(cls, curve: LatencyCurve, stored: Mapping[str, Any] | None = None) -> Experience:
        """Of a target with this curve; goes on from what `to_dict` stored."""
        values = stored or {}
        costs = Costs(curve).restored(values.get("costs", {}))
        own = cls(Survival(values.get("survival")), costs)
        for kind, (plain, took) in values.get("returns", {}).items():
            own.of_kind(kind).plain, own.of_kind(kind).took = plain, took
        own.credit = values.get("credit", own.credit)
        own.answer_len = values.get("answer_len", 0.0)
        return own

    def on(self, curve: LatencyCurve) -> Experience:
        """The same, with a curve of which `slope` does not know yet."""
        costs = Costs(curve).restored({**self.costs.to_dict(), "slope": 1.0})
        return replace(self, costs=costs)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "survival": self.survival.groups,
            "costs": self.costs.to_dict(),
            "returns": {kind: [own.plain, own.took] for kind, own in self.returns.items()},
            "credit": self.credit,
            "answer_len": self.answer_len,
        }

    def as_set(self, config: MethodConfig) -> Prediction | None:
        """What drafting as set is expected to bring; None where too little is known."""
        try:
            depth, nodes = config.largest_draft
        except ConfigError:  # as a combination, which drafts as one of its methods or the other
            return None
        mat, offered = self.survival.tokens(depth), self.survival.offered
        if mat is None or offered is None or not self.costs.draft:
            return None
        return self.costs.latency().predict(mat, num_nodes=offered * nodes, depth=depth)

    def of_kind(self, kind: Kind) -> Returns:
        """Over all texts."""
        if kind not in self.returns:
            self.returns[kind] = Returns(FIRST_RETURN, *LONG)
        return self.returns[kind]

    def end_text(self, lost_ms: float, elapsed_ms: float, num_tokens: int) -> None:
        """A text has ended, in which drafting lost so much."""
        left = SHARE * elapsed_ms - (lost_ms if lost_ms > 0 else GAIN_SHARE * lost_ms)
        self.credit = min(max(0.0, self.credit + left), CREDIT_MS)
        before = self.answer_len or num_tokens
        self.answer_len = 0.7 * before + 0.3 * num_tokens


class Prior(Settings):
    """How often a method's drafts are accepted, on certain weights and on any device.

    Attributes:
        weights, drafter: fingerprints of the target's and of the drafter's.
        method: its settings, but how much to draft.
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
        groups = {name: [round(count, 2) for count in own] for name, own in survival.groups.items()}
        return cls(weights=weights, drafter=drafter, method=_settings(config), survival=groups)


def drafter_digest(config: MethodConfig, locate: Locate) -> str | None:
    """SHA-256 of the weights that a method drafts with; None where they are not on this machine."""
    digest = hashlib.sha256()
    for one in (config, *config.within().values()):
        for name in ("speculative_model", "datastore"):
            place = getattr(one, name, None)
            if place is None:
                continue
            files = sorted(Path(locate(place)).glob("*.safetensors"))
            if not files and name == "speculative_model":
                return None
            for file in files:
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _same_drafter(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two files are of one target and network, whose drafts may differ in size."""
    names = ("decoding_type", "speculative_model", "use_dynamic_tree", "vocabulary")
    methods = (one["method"], other["method"])
    same = all(methods[0].get(name) == methods[1].get(name) for name in names)
    return same and one["target"] == other["target"]


def _settings(config: MethodConfig) -> dict[str, Any]:
    """Settings by which experience is found again: all but how much to draft."""
    return config.model_dump(mode="json", exclude={"drafting"})


class ExperienceStore:
    """Experience and latency curves in a folder; without one, in memory.

    A file per method and target, named by the weights, the device and the settings.

    Args:
        priors: what is known of methods before their first draft here.
    """

    def __init__(self, folder: Path | None, priors: Sequence[Prior] = ()) -> None:
        self._folder, self._priors = folder, priors
        self._curves: dict[str, LatencyCurve] = {}

    def of(self, config: MethodConfig, target: Target, locate: Locate = as_named) -> Experience:
        """What is known of a method; the target's latency curve is measured if it is not known."""
        curve = self.curve(target)
        if values := self._read(_name(target, config)):
            try:
                learnt = Experience.new(curve, values)
                is_same = values.get("measured", _digest(curve)) == _digest(curve)
                if is_same and not TRUE_SLOPES[0] <= learnt.costs.slope <= TRUE_SLOPES[1]:
                    curve = self._renewed(target)
                    is_same = curve is learnt.costs.curve
                return learnt if is_same else learnt.on(curve)
            except (AttributeError, TypeError, ValueError):  # of another version, or damaged
                pass
        return Experience.new(curve, {"survival": self._prior(config, target, locate)})

    def _renewed(self, target: Target) -> LatencyCurve:
        """The curve measured again, if that is long ago."""
        file = None if self._folder is None else self._folder / _name(target)
        if file and file.is_file() and time.time() - file.stat().st_mtime > LEAST_AGE_S:
            return self._measure_curve(target)
        return self.curve(target)

    def _prior(self, config: MethodConfig, target: Target, locate: Locate) -> dict[str, Any]:
        weights, settings = target.provenance.get("weights"), _settings(config)
        mine = [one for one in self._priors if (one.weights, one.method) == (weights, settings)]
        if not mine or mine[0].drafter != drafter_digest(config, locate):
            return {}
        return mine[0].survival

    def stored(
        self, target: str, config: MethodConfig, *, any_size: bool = False
    ) -> Experience | None:
        """What is kept of a method on a target, given by name, that need not be loaded.

        None where there is nothing. Of several (dtypes, devices), the newest.

        Args:
            any_size: drafts of other sizes with the same weights will do.
        """
        folder, wanted = self._folder, {"target": target, "method": _settings(config)}
        files = [] if folder is None or not folder.is_dir() else folder.glob("*.json")
        for file in sorted(files, key=lambda file: -file.stat().st_mtime):
            values = self._read(file.name)
            about = values.get("about")
            if about != wanted and not (any_size and about and _same_drafter(about, wanted)):
                continue
            try:
                curve = LatencyCurve.from_dict(self._read(values["curve"]))
                experience = Experience.new(curve, values)
                experience.costs.base = float(values["base"])
            except (ConfigError, AttributeError, KeyError, TypeError, ValueError):
                continue
            return experience
        return None

    def latency(self, target: str, config: MethodConfig) -> StepLatency | None:
        """What a method's steps take on this machine, as known; None before its first draft."""
        known = self.stored(target, config) or self.stored(target, config, any_size=True)
        return known.costs.latency() if known and known.costs.draft else None

    def measure(
        self, config: MethodConfig, context: BuildContext, *, on_progress: OnProgress = ignore
    ) -> StepLatency:
        """Time the target and the method's drafts anew, and keep what they take.

        Raises:
            SourceError, DrafterError: the drafter cannot be had.
            StoppedError: somebody stopped it.
        """
        target, drafter = context.target, config.build(context)
        tell = part(on_progress, 0.0, 0.8)
        curve = measure_curve(target, rows=FINE_ROWS, tree_rows=TREE_ROWS, on_progress=tell)
        self._curves[_name(target)] = curve
        self._write(_name(target), curve.to_dict())
        experience = self.of(config, target, context.locate)
        experience.costs.draft.clear()
        experience.costs.time_drafts(drafter.parts[-1], target)
        drafter.close()
        self.keep(config, target, experience)
        on_progress(1.0)
        return experience.costs.latency()

    def keep(self, config: MethodConfig, target: Target, experience: Experience) -> None:
        about = {"target": target.name, "method": _settings(config)}
        values = {**experience.to_dict(), "about": about, "curve": _name(target)}
        values["base"], values["measured"] = experience.costs.base, _digest(experience.costs.curve)
        self._write(_name(target, config), values)

    def curve(self, target: Target) -> LatencyCurve:
        """The target's latency curve; what steps take now, every run finds out itself."""
        name = _name(target)
        if name not in self._curves:
            try:
                self._curves[name] = LatencyCurve.from_dict(self._read(name))
            except ConfigError:
                return self._measure_curve(target)
        return self._curves[name]

    def _measure_curve(self, target: Target) -> LatencyCurve:
        curve = measure_curve(target, rows=ROWS, tree_rows=TREE_ROWS, repeats=2)
        self._curves[_name(target)] = curve
        self._write(_name(target), curve.to_dict())
        return curve

    def _read(self, name: str) -> dict[str, Any]:
        """Empty where nothing is kept, or it cannot be read."""
        if self._folder is None:
            return {}
        try:
            values = json.loads((self._folder / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _write(self, name: str, values: dict[str, Any]) -> None:
        """Best effort: a full disk must not end a run."""
        if self._folder is None:
            return
        part = self._folder / f"{name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(values))
            part.replace(self._folder / name)
        except OSError:
            part.unlink(missing_ok=True)


def _digest(curve: LatencyCurve) -> str:
    """Tells one measurement from another."""
    return hashlib.sha256(json.dumps(curve.to_dict()).encode()).hexdigest()[:16]


def _name(target: Target, config: MethodConfig | None = None) -> str:
    """Of a file: the weights, where they run, and the method's settings."""
    where = target.environment()
    keys = ("target", "weights", "revision", "dtype", "device_name", "threads", "forward")
    facts = [where.get(key) for key in keys]
    facts += [cpuinfo(key) for key in ("cpu family", "model")]  # names of processors say little
    settings = None if config is None else config.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps([facts, settings], default=str).encode()).hexdigest()
    return f"{digest[:32]}.json"
