"""What steps cost, from the steps that were made: commit to commit, by the wall clock.

    plain step                     base
    step that verifies n rows      base · (1 + slope · (curve(n) / curve(1) - 1))
    draft of d levels              its running mean; between two depths, a straight line

`curve` is the target's latency curve, measured once; `base` and `slope` are what the run says of
it: long texts and busy machines make steps and rows dearer. While no plain step is made, drafted
ones keep `base` up to date.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.proposal import Budget
from engine.tree import MAX_NODES
from engine.tuning.latency import LatencyCurve, StepLatency
from engine.tuning.timing import time_drafts

PRIOR_GROWTH = 0.5
"""Growth of steps, in plain steps, that is assumed to have been as the curve says."""
Kind = Literal["copy", "chain", "tree"]
"""What a draft is: copied by a combination's first part, or a chain or tree with a time of its own
where trees cost more to draft."""
KINDS: tuple[Kind, ...] = ("chain", "tree")
"""Chains compete with trees where these cost more to draft; elsewhere all are of one kind."""
FRESH = 8
"""Steps for which the last plain step tells what a plain step takes now."""
LEAST_DRIFT, STALE = 0.8, 1_000_000
"""A drafted step that disagrees more with what is known is no measure of a plain one."""
DOUBT = 0.8
"""Per text that a drafter slept through, what reading a prompt is still believed to take: else one
that was measured on a busy machine would keep it asleep for ever."""
LARGEST_STEP = 3.0
"""A step that takes so many times what was expected was held up by something else: a hiccup."""
PARDON = 40.0
"""Milliseconds of hiccups in drafted steps that are never charged to drafting."""
PARDON_RATE = 2.0
"""Beyond that, so many times as much of their time as hiccups take of plain steps' time."""


@dataclass(slots=True)
class Costs:
    """Running means in milliseconds.

    Attributes:
        base: of a plain step; 0 = none was made yet.
        slope: price of further rows, over what the curve says.
        draft: of drafts, by their kind and number of levels.
        reading: of a prompt's token, by the kind of the drafts.
    """

    curve: LatencyCurve
    base: float = 0.0
    slope: float = 1.0
    draft: dict[Kind, dict[int, float]] = field(default_factory=dict)
    reading: dict[Kind, float] = field(default_factory=dict)
    since_plain: int = 0
    _held_up: bool = False
    _over: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _growth: Any = None

    def __post_init__(self) -> None:
        curve, one = self.curve, self.curve.at(1)
        self.base = self.base or one
        self._growth = functools.cache(
            lambda rows, depth: max(0.0, curve.at(rows, depth) / one - 1)
        )

    def verify_ms(self, rows: int, depth: int | None = None) -> float:
        """Of a step that verifies so many rows, without the draft."""
        growth: float = self._growth(rows, depth)
        return self.base * (1 + self.slope * growth)

    def observe_plain(self, ms: float) -> None:
        """A step that only the target made; a hiccup tells nothing, two of them in a row do."""
        self._held_up, is_known = ms > LARGEST_STEP * self.base, self._held_up
        if self._held_up and not is_known:
            return
        # Far off is seldom noise: the machine has changed.
        weight = 0.3 if self.since_plain > FRESH or not 0.75 < ms / self.base < 1.33 else 0.1
        self.base += weight * (min(ms, LARGEST_STEP * self.base) - self.base)
        self.since_plain = 0

    def observe_verify(self, ms: float, rows: int, depth: int) -> None:
        """What a drafted step took beside its draft."""
        self.since_plain = 0 if rows == 1 else self.since_plain + 1
        ms = min(ms, LARGEST_STEP * self.verify_ms(rows, depth))
        growth: float = self._growth(rows, depth)
        if self.since_plain > FRESH or rows == 1:
            implied = ms / (1 + self.slope * growth)
            if LEAST_DRIFT < self.base / implied < 1 / LEAST_DRIFT:
                self.base += 0.05 * (implied - self.base)
            else:  # rows or the machine are not what they were: a plain step must tell
                self.since_plain = STALE
        elif growth > 0.02:
            # Sums, not a mean of ratios: where a row costs little, a ratio is mostly noise.
            self._over[0] = 0.95 * self._over[0] + ms / self.base - 1
            self._over[1] = 0.95 * self._over[1] + growth
            over, growth = self._over
            self.slope = min(max((over + PRIOR_GROWTH) / (growth + PRIOR_GROWTH), 0.5), 4.0)

    def draft_ms(self, kind: Kind, levels: int) -> float:
        """Of a draft with so many levels; a tenth of a step where none was made."""
        seen = self.draft.get(kind)
        if not seen:
            return 0.1 * self.base
        if levels in seen:
            return seen[levels]
        nearest = min(seen, key=lambda one: abs(one - levels))
        beyond = (levels - nearest) * self.level_ms(kind)
        return max(0.2 * seen[nearest], seen[nearest] + beyond)

    def level_ms(self, kind: Kind) -> float:
        """What one more level costs."""
        seen = self.draft.get(kind, {})
        if len(seen) < 2:
            return 0.0
        low, high = min(seen), max(seen)
        return max(0.0, (seen[high] - seen[low]) / (high - low))

    def deepest(self, kind: Kind) -> int:
        """Levels of the deepest draft so far, or a few."""
        return max(self.draft.get(kind, ()), default=0) or 4

    def observe_draft(self, kind: Kind, levels: int, ms: float) -> None:
        """A draft that read no prompt."""
        seen = self.draft.setdefault(kind, {})
        before = seen.get(levels, ms)
        seen[levels] = before + 0.2 * (min(ms, LARGEST_STEP * before) - before)

    def time_drafts(self, drafter: Drafter, target: Target) -> None:
        """Measure drafts of every kind, as deep as may be and one level deep."""
        kinds = KINDS if drafter.branches else KINDS[:1]
        for kind in kinds:
            width = 1 if kind == "chain" and drafter.branches else MAX_NODES
            for budget in (Budget(64, width=width), Budget(1, width=width)):
                reading_ms, draft_ms, depth = time_drafts(drafter, target, budget)
                self.observe_draft(kind, depth, draft_ms)
            self.observe_reading(kinds, reading_ms, 1)

    def times(self, drafter: Drafter) -> bool:
        """Whether it is known what its drafts take."""
        return any(kind in self.draft for kind in (KINDS if drafter.branches else KINDS[:1]))

    def reading_ms(self, kind: Kind, tokens: int) -> float:
        """Of a prompt with so many tokens; 0 where it is not known."""
        return self.reading.get(kind, 0.0) * tokens

    def observe_reading(self, kinds: Sequence[Kind], ms: float, tokens: int) -> None:
        """The drafter that makes these drafts read so much of a prompt."""
        each = max(0.0, ms / tokens)
        for kind in kinds:
            self.reading[kind] = 0.5 * (self.reading.get(kind, each) + each)

    def doubt_reading(self, kinds: Sequence[Kind]) -> None:
        """The drafter was not started in a text, so nobody learnt whether reading takes less."""
        for kind in kinds:
            if kind in self.reading:
                self.reading[kind] *= DOUBT

    def latency(self) -> StepLatency:
        """The same as the curves that predictions are made with; of trees, if there were any.

        Without `slope`: what runs say of a few rows is no measure of a large tree.
        """
        verify = self.curve.scaled(self.base / self.curve.at(1))
        kind: Kind = "tree" if "tree" in self.draft else "chain"
        level_ms = self.level_ms(kind)
        return StepLatency(verify, max(0.0, self.draft_ms(kind, 1) - level_ms), level_ms)

    def to_dict(self) -> dict[str, Any]:
        """What is worth keeping, as plain JSON."""
        names = ("slope", "reading", "draft")
        return {name: getattr(self, name) for name in names}

    def restored(self, stored: Mapping[str, Any]) -> Self:
        """With what `to_dict` stored."""
        self.slope, reading = stored.get("slope", 1.0), stored.get("reading")
        self.reading = reading if isinstance(reading, dict) else {}
        for kind, seen in stored.get("draft", {}).items():
            self.draft[kind] = {int(levels): ms for levels, ms in seen.items()}
        return self


@dataclass(slots=True)
class Account:
    """What drafting has lost in a text, in milliseconds.

    A program that draws or compiles on the same cores holds up a step now and then for many times
    what it takes. Such a hiccup meets drafted steps as it meets plain ones, and is no loss of
    drafting as long as it is not much more frequent there.

    Attributes:
        elapsed: since the text began.
    """

    elapsed: float = 0.0
    _settled: float = 0.0
    _pending: float = 0.0
    _tokens: int = 0
    _drafted: float = 0.0
    _drafted_hiccups: float = 0.0
    _plain_hiccups: float = 0.0

    def drafted(self, ms: float, tokens: int, hiccup: float = 0.0) -> float:
        """A step that drafted; what is charged of it.

        Args:
            hiccup: by how much something held it up, of `ms`.
        """
        before = self._pardoned
        self.elapsed += ms
        self._drafted += ms
        self._pending += ms
        self._tokens += tokens
        self._drafted_hiccups += hiccup
        return ms - max(0.0, min(hiccup, self._pardoned - before))

    def plain(self, ms: float, before: float, now: float) -> None:
        """A plain step, whose usual time it has changed from `before` to `now`."""
        self.elapsed += ms
        if ms > LARGEST_STEP * before:
            self._plain_hiccups += ms - before
        # The steps since the last plain one are judged by what plain steps took before and after.
        self._settled += self._pending - self._tokens * (before + now) / 2
        self._pending, self._tokens = 0.0, 0

    def loss(self, base: float) -> float:
        """Negative where drafting has gained; `base` is the time of a plain step."""
        return self._settled + self._pending - self._tokens * base - self._pardoned

    @property
    def _pardoned(self) -> float:
        """Hiccups of drafted steps that are not charged."""
        quiet = self.elapsed - self._drafted - self._plain_hiccups
        rate = self._plain_hiccups / quiet if quiet else 0.0
        usual = rate * (self._drafted - self._drafted_hiccups)
        return min(self._drafted_hiccups, PARDON + PARDON_RATE * usual)
