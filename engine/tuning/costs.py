"""What steps cost, learnt from the steps that were made: wall-clock time from commit to commit.

    plain step                     plain_ms
    step that verifies n rows      plain_ms · (1 + disturbance + row_scale · overhead(n))
    draft of depth d               a running mean; linear between depths

`overhead(n)` is what n rows take longer than one on the target's latency curve, measured once, as a
share. The others follow the run: long texts and busy machines make steps and rows slower, and
drafting leaves the processor's caches cold for the forward (`disturbance`). Drafted steps that take
another time than they should tell that a plain step must be made, to time it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from engine.drafters.base import Drafter, Traits
from engine.model.target import Target
from engine.proposal import Budget
from engine.tree import MAX_NODES
from engine.tuning.latency import LatencyCurve, StepLatency
from engine.tuning.timing import time_drafts

PRIOR_OVERHEAD = 0.5
"""Verify overhead, in plain steps, that is assumed at first to be as on the curve."""
DraftKind = Literal["copy", "chain", "tree"]
"""`copy`: looked up by the first drafter of a combination. `chain` and `tree` are timed separately
where trees cost more to draft; elsewhere every draft counts as a chain."""
KINDS: tuple[DraftKind, ...] = ("chain", "tree")
"""Kinds that compete where trees cost more to draft than chains."""
FRESH_STEPS = 8
"""Steps for which the last plain step is taken as what a plain step costs now."""
MAX_DRIFT, NEVER_MEASURED = 1.15, 1_000_000
"""Mean ratio of the time of drafted steps to the expected one, either way, beyond which a plain
step is due, and the `steps_since_plain` that says so."""
QUIET_NOISE, NOISE_DRIFT, DOUBTED_NOISE = 0.1, 0.5, 0.2
"""How far plain steps deviate on a machine that does nothing else; what more than that (`noise`)
adds to `MAX_DRIFT`, since a running mean of noisy times deviates without cause; and the noise at
which a drafted step's time is half believed."""
PROMPT_DECAY = 0.8
"""Factor per text on the time of reading a prompt, while the drafter is not started: a value
measured on a busy machine must not rule it out for ever."""
MAX_DISTURBANCE = 0.25
"""Bound of `Costs.disturbance`."""
HICCUP_RATIO = 3.0
"""A step that takes this many times its expected time was held up by something else: a hiccup."""


def kinds_of(traits: Traits) -> tuple[DraftKind, ...]:
    """The kinds that a drafter makes."""
    return KINDS if traits.branches else KINDS[:1]


@dataclass(slots=True)
class Costs:
    """Running means in milliseconds.

    Attributes:
        curve: verify time by number of rows.
        plain_ms: of a plain step; by the curve, until one was made.
        row_scale: cost of further rows relative to the curve.
        disturbance: what a forward after drafting takes longer than in plain decoding, as a share.
        draft_times: of drafts, by kind and depth.
        prompt_token_ms: of reading one prompt token, by the first kind of a drafter's drafts.
        first_step_ratio: of a text's first step over a plain step: it finds the caches cold.
    """

    curve: LatencyCurve
    row_scale: float = 1.0
    draft_times: dict[DraftKind, dict[int, float]] = field(default_factory=dict)
    prompt_token_ms: dict[DraftKind, float] = field(default_factory=dict)
    first_step_ratio: float = 1.1
    disturbance: float = 0.0
    plain_ms: float = field(init=False)
    steps_since_plain: int = 0
    _first_step_ms: float | None = None
    _last_far_ms: float | None = None
    _drift: float = 1.0
    _deviation: float = 0.0
    _measured_overhead: float = 0.0
    _curve_overhead: float = 0.0
    _overhead: Any = field(init=False)
    """`(rows, depth)` → verify time over a plain step's, less 1, by the curve."""

    def __post_init__(self) -> None:
        curve, plain_ms = self.curve, self.curve.at(1)
        self.plain_ms = plain_ms
        self._overhead = functools.cache(
            lambda rows, depth: max(0.0, curve.at(rows, depth) / plain_ms - 1)
        )

    @classmethod
    def from_dict(cls, curve: LatencyCurve, values: Mapping[str, Any]) -> Self:
        """On this curve, with what `to_dict` stored."""
        draft_times = {
            kind: {int(depth): ms for depth, ms in times.items()}
            for kind, times in values.get("draft", {}).items()
        }
        scale, reading = values.get("slope", 1.0), dict(values.get("reading", {}))
        ratio, disturbance = values.get("first", 1.1), values.get("disturbance", 0.0)
        return cls(curve, scale, draft_times, reading, ratio, disturbance)

    def to_dict(self) -> dict[str, Any]:
        """What is worth keeping, as plain JSON."""
        return {
            "slope": self.row_scale,
            "reading": self.prompt_token_ms,
            "draft": self.draft_times,
            "first": self.first_step_ratio,
            "disturbance": self.disturbance,
        }

    @property
    def noise(self) -> float:
        """How far plain steps deviate from `plain_ms`, as a share, because of other programs."""
        return max(0.0, self._deviation - QUIET_NOISE)

    def verify_ms(self, rows: int, depth: int | None = None) -> float:
        """Expected time of a step that verifies this many rows, without its draft."""
        overhead: float = self._overhead(rows, depth)
        return self.plain_ms * (1 + self.disturbance + self.row_scale * overhead)

    def observe_plain(self, ms: float, *, follows_draft: bool = False) -> bool:
        """Record a step of one row. Two in a row that are far off alike are how it is now.

        Args:
            follows_draft: see `ControlledDrafter._record_plain_step`; alone, such a step says
                nothing of plain decoding.

        Returns:
            Whether it counted.
        """
        plain_ms, last_ms = self.plain_ms, self._last_far_ms
        deviation = min(abs(ms / plain_ms - 1), HICCUP_RATIO - 1)
        self._deviation += 0.1 * (deviation - self._deviation)
        is_far = self.is_far_from_plain(ms)
        self._last_far_ms = ms if is_far else None
        if is_far and last_ms is not None and (last_ms > plain_ms) == (ms > plain_ms):
            self.plain_ms = min(ms, last_ms, key=lambda one: abs(one - plain_ms))
        elif follows_draft or not 1 / HICCUP_RATIO < ms / plain_ms < HICCUP_RATIO:
            self.steps_since_plain += 1
            return False
        else:
            weight = 0.3 if self.steps_since_plain > FRESH_STEPS else 0.1
            self.plain_ms += weight * (ms - plain_ms)
        if self._first_step_ms is not None:
            ratio, self._first_step_ms = self._first_step_ms / ms, None
            self.first_step_ratio += 0.3 * (min(max(ratio, 1.0), 1.5) - self.first_step_ratio)
        self.steps_since_plain, self._drift = 0, 1.0
        return True

    def is_far_from_plain(self, ms: float) -> bool:
        """Whether a step of one row deviates by more than noise."""
        return not 0.75 < ms / self.plain_ms < 1.33

    def observe_first(self, ms: float) -> bool:
        """Record the first step of a text, which is plain; returns as `observe_plain`.

        It weighs little: if the text's plain steps take another time, the next ones will tell.
        """
        self._first_step_ms, self.steps_since_plain = None, 0
        counts = self.observe_plain(ms / self.first_step_ratio)
        self._first_step_ms = ms
        return counts

    def observe_verify(self, ms: float, rows: int, depth: int) -> None:
        """Record the time of a step that verified a draft, or that an attempt to draft disturbed.

        Without the time of drafting.
        """
        self.steps_since_plain, self._last_far_ms = self.steps_since_plain + 1, None
        usual_ms = self.verify_ms(rows, depth)
        ms = min(ms, HICCUP_RATIO * usual_ms)
        overhead: float = self._overhead(rows, depth)
        excess = self._believed_ms(ms, usual_ms) / self.plain_ms - 1
        self._drift += 0.1 * (min(ms / usual_ms, 2.0) - self._drift)
        max_drift = MAX_DRIFT + NOISE_DRIFT * self.noise
        if not 1 / max_drift < self._drift < max_drift:
            self.steps_since_plain = NEVER_MEASURED
        elif self.steps_since_plain > FRESH_STEPS:
            return
        elif overhead > 0.02:
            # Sums, not a mean of ratios: where a row costs little, a ratio is mostly noise.
            self._measured_overhead = 0.95 * self._measured_overhead + excess - self.disturbance
            self._curve_overhead = 0.95 * self._curve_overhead + overhead
            measured = self._measured_overhead + PRIOR_OVERHEAD
            scale = measured / (self._curve_overhead + PRIOR_OVERHEAD)
            self.row_scale = min(max(scale, 0.5), 4.0)
        else:
            change = 0.05 * (excess - self.disturbance)
            self.disturbance = min(max(self.disturbance + change, 0.0), MAX_DISTURBANCE)

    def split_hiccup(self, ms: float, usual_ms: float) -> tuple[float, float]:
        """Of a time, what a hiccup took, and what is learnt from it.

        The account charges a hiccup; it says little of later drafts.
        """
        most_ms = max(HICCUP_RATIO * usual_ms, usual_ms + self.plain_ms)
        hiccup_ms = ms - usual_ms if ms > most_ms else 0.0
        return hiccup_ms, self._believed_ms(min(ms, most_ms), usual_ms)

    def _believed_ms(self, ms: float, usual_ms: float) -> float:
        """A measured time, drawn towards the expected one on a machine whose plain steps vary."""
        return usual_ms + (ms - usual_ms) / (1 + self.noise / DOUBTED_NOISE)

    def draft_ms(self, kind: DraftKind, depth: int) -> float:
        """Expected time of a draft; a tenth of a plain step where none was made."""
        times = self.draft_times.get(kind)
        if not times:
            return 0.1 * self.plain_ms
        if depth in times:
            return times[depth]
        nearest = min(times, key=lambda timed_depth: abs(timed_depth - depth))
        extrapolated = times[nearest] + (depth - nearest) * self.level_ms(kind)
        return max(0.2 * times[nearest], extrapolated)

    def level_ms(self, kind: DraftKind) -> float:
        """What drafting one level more costs."""
        times = self.draft_times.get(kind, {})
        if len(times) < 2:
            return 0.0
        low, high = min(times), max(times)
        return max(0.0, (times[high] - times[low]) / (high - low))

    def max_depth(self, kind: DraftKind) -> int:
        """Depth of the deepest draft so far; 4 before the first one."""
        return max(self.draft_times.get(kind, ()), default=0) or 4

    def observe_draft(self, kind: DraftKind, depth: int, ms: float) -> None:
        """Record the time of a draft that read no prompt."""
        times = self.draft_times.setdefault(kind, {})
        usual_ms = self.draft_ms(kind, depth) if times else ms
        ms = min(ms, HICCUP_RATIO * usual_ms)
        # Whatever else the machine does only adds to a time: a much shorter one is believed.
        is_learnt = depth in times and ms > usual_ms / HICCUP_RATIO
        times[depth] = usual_ms + 0.2 * (ms - usual_ms) if is_learnt else ms

    def time_drafts(self, drafter: Drafter, target: Target) -> None:
        """Time drafts of every kind at full depth and at depth 1, unless any are known."""
        kinds = kinds_of(drafter.traits)
        if any(kind in self.draft_times for kind in kinds):
            return
        for kind in kinds:
            width = 1 if kind == "chain" and drafter.traits.branches else MAX_NODES
            for budget in (Budget(64, width=width), Budget(1, width=width)):
                timing = time_drafts(drafter, target, budget)
                self.observe_draft(kind, timing.depth, timing.draft_ms)
            self.observe_prompt(kinds[0], timing.prompt_token_ms, 1)

    def prompt_ms(self, kind: DraftKind, num_tokens: int) -> float:
        """Expected time of reading this much of a prompt; 0 where it is not known."""
        return self.prompt_token_ms.get(kind, 0.0) * num_tokens

    def observe_prompt(self, kind: DraftKind, ms: float, num_tokens: int) -> None:
        """Record how long a drafter read a prompt."""
        token_ms = max(0.0, ms / num_tokens)
        before_ms = self.prompt_token_ms.get(kind, token_ms)
        self.prompt_token_ms[kind] = 0.5 * (before_ms + token_ms)

    def decay_prompt_ms(self, kind: DraftKind) -> None:
        """Lower the estimate after a text in which the drafter was not started."""
        if kind in self.prompt_token_ms:
            self.prompt_token_ms[kind] *= PROMPT_DECAY

    def latency(self) -> StepLatency:
        """These costs as the curves that predictions use; of trees, where trees were drafted.

        Without `row_scale`, which is learnt from a few rows and says little of a large tree.
        """
        verify = self.curve.scaled(self.plain_ms / self.curve.at(1))
        kind: DraftKind = "tree" if "tree" in self.draft_times else "chain"
        level_ms = self.level_ms(kind)
        return StepLatency(verify, max(0.0, self.draft_ms(kind, 1) - level_ms), level_ms)
