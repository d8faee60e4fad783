"""The controller drafts what pays, loses no more than it may, and never changes the text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Sampling
from engine.drafters import parse_method
from engine.drafters.base import Traits
from engine.drafters.combined import CombinedDrafter
from engine.model.target import Target
from engine.proposal import Budget, ExtraRows, Proposal
from engine.tree import ChoiceTree
from engine.tuning.controller import ControlledDrafter, build_drafter
from engine.tuning.costs import Costs
from engine.tuning.experience import MAX_LOSS_SHARE, Experience, ExperienceStore
from engine.tuning.latency import LatencyCurve
from engine.tuning.survival import Survival, TrackedDraft
from tests.engine.drafters.judges import slow, write
from tests.engine.methods import drafter_for
from tests.engine.tuning.controlled import FLAT, PROMPT, STEEP, AtRandom, OnAMachine, Oracle
from tests.models import build_context, tiny_target

NEVER: Callable[[int], bool] = lambda position: False  # noqa: E731
ALWAYS: Callable[[int], bool] = lambda position: True  # noqa: E731


class Slow(Oracle):
    draft_ms = 50.0


class Sure(Oracle):
    """Says how likely its tokens are: all of them very."""

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        return replace(proposal, draft_probs=torch.full((len(proposal.shape),), 0.9))


class Windowed(Oracle):
    """Feeds rows beside its drafts, as lookahead does."""

    def propose(self, budget: Budget) -> Proposal:
        proposal, m = super().propose(budget), 15
        visible = torch.zeros(m, len(proposal.shape) + m, dtype=torch.bool)
        visible[:, 0] = True
        visible[:, len(proposal.shape) :] = torch.eye(m, dtype=torch.bool)
        extra = ExtraRows(torch.full((m,), 7), torch.ones(m, dtype=torch.int64), visible, 1)
        return replace(proposal, extra=extra)


def on_a_machine(
    machine: LatencyCurve, right: Callable[[int], bool], kind: type[Oracle] = Oracle, **how: Any
) -> OnAMachine:
    return OnAMachine(lambda target, output: kind(target, output, right), machine, **how)


def random_right(share: float) -> Callable[[int], bool]:
    rng = random.Random(7)
    known = [rng.random() < share for _ in range(2000)]
    return lambda position: known[position]


ADVERSARIES: dict[str, tuple[LatencyCurve, Callable[[int], bool], dict[str, Any]]] = {
    "right for 20 steps, then never": (STEEP, lambda position: position < 60, {}),
    "never": (STEEP, NEVER, {}),
    "never, and slow": (FLAT, NEVER, {"kind": Slow}),
    "right, and slow": (FLAT, ALWAYS, {"kind": Slow}),
    "at random": (STEEP, random_right(0.3), {}),
    "sure of itself and wrong": (STEEP, NEVER, {"kind": Sure}),
    "rows beside the drafts": (STEEP, NEVER, {"kind": Windowed}),
    "half as fast from the middle": (
        LatencyCurve((1, 8), (10.0, 14.0)),
        random_right(0.3),
        {"pace": lambda step: 1.0 if step < 60 else 2.0},
    ),
    "twice as fast from the middle": (
        LatencyCurve((1, 8), (10.0, 14.0)),
        random_right(0.3),
        {"pace": lambda step: 1.0 if step < 60 else 0.5},
    ),
    "rows dearer than the curve says": (
        LatencyCurve((1, 8), (10.0, 40.0)),
        random_right(0.5),
        {"curve": FLAT},
    ),
}


@pytest.mark.parametrize("texts", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_text_loses_more_than_it_may(name: str, texts: int) -> None:
    machine, right, how = ADVERSARIES[name]
    drafter = on_a_machine(machine, right, **how)
    for _ in range(texts):
        drafter.write()
    assert drafter.lost_ms <= 0.03 * drafter.plain_ms + 50


def test_a_drafter_that_is_right_is_used_to_its_full_depth_from_the_second_step_on() -> None:
    drafter = on_a_machine(FLAT, ALWAYS)
    drafted = [step.num_drafted for step in drafter.write()]
    assert drafted[0] == 0 and sorted(drafted)[len(drafted) // 2] == 6
    assert drafter.lost_ms < -0.6 * drafter.plain_ms


def test_what_never_pays_is_hardly_tried_and_does_not_run_meanwhile() -> None:
    drafter = on_a_machine(STEEP, NEVER)
    steps = drafter.write(230)
    assert 2 <= drafter.oracle.num_proposed < 150, "it must look again from time to time"
    assert sum(step.num_drafted > 0 for step in steps) < 10
    assert all(step.bypass == "not_worth_it" for step in steps if not step.num_drafted)


def test_a_drafter_that_is_not_wanted_is_not_even_started() -> None:
    drafter = on_a_machine(FLAT, NEVER, Slow)
    for _ in range(3):
        drafter.write(60)
    assert drafter.oracle.num_started == 1, "by the first text it is known what a draft takes"


def test_what_reading_took_on_a_busy_machine_does_not_keep_a_drafter_asleep_for_ever() -> None:
    drafter = on_a_machine(FLAT, ALWAYS)
    drafter.experience.costs.prompt_token_ms = {"chain": 60.0}
    for text in range(20):
        drafter.write()
        assert text or not drafter.oracle.num_started, "at first it is believed"
    assert 5 < drafter.oracle.num_started < 19
    assert drafter.experience.costs.prompt_token_ms["chain"] < 20


class Reading(Oracle):
    start_ms = 15.0


def test_reading_the_prompt_and_catching_up_are_charged_and_not_taken_for_a_drafts_time() -> None:
    drafter = on_a_machine(FLAT, NEVER, Reading, prompt=PROMPT * 10)
    costs = drafter.experience.costs
    for text in range(2):
        before_ms = drafter.lost_ms
        drafter.write(100)
        assert drafter.oracle.num_started == text + 1 and drafter.lost_ms > before_ms + 15
        loss_ms = drafter.loss_ms
        assert loss_ms == pytest.approx(drafter.lost_ms - before_ms, abs=0.5)
        assert costs.draft_ms("chain", 4) == pytest.approx(0.2)
        assert costs.prompt_ms("chain", 40) == pytest.approx(15.0)
        costs.prompt_token_ms.clear()  # else it would not start again


def test_no_more_is_drafted_than_pays() -> None:
    drafter = on_a_machine(LatencyCurve((1, 8), (10.0, 30.0)), lambda position: position % 3 != 2)
    late = [step.num_drafted for step in drafter.write()[20:-2] if step.num_drafted]
    assert late and sorted(late)[len(late) // 2] in (2, 3)


class ShortSighted(Oracle):
    """A head that is always right about one token and never about two."""

    traits = Traits(has_network=True)

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        levels = next(
            d for d in range(1, 99) if d == len(proposal.shape) - 1 or 0.8**d < budget.min_prob
        )
        self.levels = levels
        self.num_proposed += levels - 1
        proposal = proposal.keep(range(1 + levels))
        proposal.tokens[2:] = (proposal.tokens[2:] + 1) % self._vocab
        return replace(proposal, draft_probs=torch.full((1 + levels,), 0.8))


def test_a_level_that_is_never_right_is_soon_no_longer_drafted() -> None:
    a_millisecond_a_row = LatencyCurve((1, 64), (10.0, 73.0))
    drafter = on_a_machine(a_millisecond_a_row, ALWAYS, ShortSighted)
    steps = drafter.write()
    assert drafter.oracle.levels == 1
    assert sum(step.num_committed == 2 for step in steps) > 0.8 * len(steps)


def test_a_text_that_begins_to_repeat_itself_is_soon_drafted_whole() -> None:
    """Though only one token was right till then, and what was cut was not verified."""
    machine = LatencyCurve((1, 8), (10.0, 17.0))
    right: Callable[[int], bool] = lambda position: position > 100 or position % 2 == 0  # noqa: E731
    steps = on_a_machine(machine, right).write(240)
    ends = list(accumulate(len(step.committed) for step in steps))
    drafted = [step.num_drafted for step in steps]
    before = [num for num, end in zip(drafted, ends, strict=True) if 60 < end < 100 and num]
    after = [num for num, end in zip(drafted, ends, strict=True) if 140 < end < 230 and num]
    assert max(before) <= 2 and min(after) == 6


def test_a_draft_is_judged_by_the_text_as_far_as_that_goes() -> None:
    def levels(*committed: list[int]) -> list[float]:
        chain, survival = Proposal(torch.arange(4), ChoiceTree.chain(3).shape), Survival()
        draft = TrackedDraft(chain)
        for tokens in committed:
            if draft.is_open:
                draft.follow(tokens)
        survival.observe_tracked(draft)
        own = {name: counts[0] for name, counts in survival.groups.items()}
        return [own[name] for name in sorted(own) if name[0] == "l"]

    assert levels([1], [2]) == [1, 1], "nobody knows about the third"
    assert levels([1], [9, 3]) == [1, 0]
    assert levels([1, 2], [3, 4]) == [1, 1, 1]
    assert levels([9]) == [0] and levels() == []


def test_experience_goes_on_from_text_to_text_and_is_kept(tmp_path: Path) -> None:
    drafter = on_a_machine(FLAT, ALWAYS)
    drafter.write()
    steps = drafter.write()
    assert sum(step.num_drafted > 0 for step in steps[1:]) >= len(steps) - 3
    stored = drafter.experience.to_dict()
    assert Experience.new(FLAT, stored).to_dict() == stored
    target, config = tiny_target(), parse_method({"decoding_type": "NGram"})
    store = ExperienceStore(tmp_path)
    store.save(config, target, drafter.experience)
    again, other = ExperienceStore(tmp_path), config.replace(max_draft_len=3)
    assert again.load(config, target).to_dict() == stored != again.load(other, target).to_dict()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"rows": 3}', '{"survival": 3}', '{"returns": {"chain": [1]}}']
)
def test_a_damaged_file_is_as_none(tmp_path: Path, content: str) -> None:
    target, config = tiny_target(), parse_method({"decoding_type": "NGram"})
    store = ExperienceStore(tmp_path)
    store.save(config, target, store.load(config, target))
    for file in tmp_path.iterdir():
        file.write_text(content)
    known = ExperienceStore(tmp_path).load(config, target)
    assert not known.speedups and known.costs.curve.at(1) > 0


class Unsure(Oracle):
    """Finds something in every other dozen of tokens only."""

    match_len = 2

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        return proposal.keep(range(1)) if len(self.text) // 12 % 2 else proposal


class Both(CombinedDrafter):
    """Says what its parts have taken in all."""

    num_proposed, num_started, start_ms = 1, 0, 0.0

    @property
    def draft_ms(self) -> float:
        return sum(one.draft_ms * one.num_proposed for one in self.parts if isinstance(one, Oracle))


def test_a_combination_copies_where_its_model_does_not_pay() -> None:
    """Each is judged by what its own drafts brought, also after texts in which the model lost."""

    def make(target: Target, output: list[int]) -> Both:
        copies, model = Unsure(target, output, ALWAYS), Slow(target, output, NEVER)
        return Both(copies, model, 2)

    drafter = OnAMachine(make, FLAT)
    _, model = drafter.oracle.parts
    for _ in range(3):
        before, asked = drafter.lost_ms, model.num_proposed
        drafter.write()
    assert drafter.lost_ms - before < -0.3 * drafter.plain_ms / 3
    assert model.num_proposed == asked, "by then it is known that it loses"
    assert drafter.experience.speedup_of("copy").value > 1.5


def test_every_step_says_what_was_expected_and_why() -> None:
    drafter = on_a_machine(FLAT, random_right(0.5))
    steps = drafter.write()
    assert all(step.decision and step.expected for step in steps)
    tokens = sum(step.expected[0] for step in steps if step.expected)
    seconds = sum(step.expected[1] for step in steps if step.expected)
    written = sum(len(step.committed) for step in steps)
    took_s = (drafter.verify_ms + 0.2 * drafter.oracle.num_proposed) / 1000
    assert tokens / seconds == pytest.approx(written / took_s, rel=0.15)


def test_a_smaller_tree_keeps_a_prefix_of_siblings_and_every_parent() -> None:
    tree = ChoiceTree.parse([[0], [1], [2], [0, 0], [1, 0], [1, 1]])
    proposal = Proposal(torch.arange(7), tree.shape, tree.ranks)
    chances = Survival({"d1 r2": [50.0, 7.0]}).path_probs(proposal)
    assert chances[3] <= chances[2] <= chances[1]
    for node, parent in enumerate(tree.shape.parents[1:], start=1):
        assert chances[node] <= chances[parent]


def test_a_drafter_that_is_too_sure_of_itself_is_corrected() -> None:
    shape = ChoiceTree.chain(2).shape
    survival = Survival()
    proposal = Proposal(torch.arange(3), shape, draft_probs=torch.tensor([1.0, 0.8, 0.8]))
    assert survival.path_probs(proposal)[1] == pytest.approx(0.8)
    for _ in range(60):
        survival.observe(proposal, (0,))
    assert survival.path_probs(proposal)[1] < 0.1
    assert survival.calibration < 0.1


def test_a_draft_that_a_grammar_cuts_costs_the_rows_that_were_verified() -> None:
    """Not those that the drafter proposed, whose price would fall to nothing."""
    target = tiny_target(eos_token_id=None)
    booked = list[int]()

    class Booking(Costs):
        def observe_verify(self, ms: float, rows: int, depth: int) -> None:
            booked.append(rows)
            super().observe_verify(ms, rows, depth)

    drafter = AtRandom.around(drafter_for(target, "recycling"), target)
    drafter.experience.costs = Booking(FLAT)
    sampling = Sampling(structured_output="regex", grammar="(ab|ba|[cd]{2}){20}!")
    steps = write(target, drafter, target.encode("abba abcd"), sampling=sampling, tokens=60).steps
    verified = [len(step.tokens) for step in steps[:-1] if len(step.tokens) > 1]
    assert sum(step.num_cut for step in steps) > 20
    assert [rows for rows in booked if rows > 1] == verified


def test_a_first_draft_that_was_held_up_does_not_fix_what_drafts_take() -> None:
    costs = Costs(FLAT)
    for depth, ms in ((3, 9.0), (3, 0.1), (10, 0.1), (12, 30.0)):
        costs.observe_draft("chain", depth, ms)
    assert costs.draft_times == {"chain": {3: 0.1, 10: 0.1, 12: pytest.approx(0.3)}}


def test_as_set_is_the_bare_drafter_and_auto_the_controller() -> None:
    context = build_context(tiny_target())
    for kind, drafting in (("NGram", "as set"), ("NGram", "auto"), ("Autoregressive", "auto")):
        config = parse_method({"decoding_type": kind, "drafting": drafting})
        is_controlled = isinstance(build_drafter(config, context), ControlledDrafter)
        assert is_controlled == ((kind, drafting) == ("NGram", "auto"))


def test_what_a_text_leaves_of_its_share_is_credit_for_the_next() -> None:
    experience = Experience.new(FLAT)
    before = experience.credit
    experience.end_text(loss_ms=0.0, elapsed_ms=1000.0, num_tokens=100)
    assert experience.credit == pytest.approx(before + 100 * MAX_LOSS_SHARE)
    experience.end_text(loss_ms=500.0, elapsed_ms=1000.0, num_tokens=100)
    assert experience.credit == 0.0


def test_hiccups_of_a_busy_machine_are_not_charged_to_drafting() -> None:
    """A page that begins to draw on the same cores holds up the first steps, drafted or not."""
    held_up = {0, 2, 3, 10}
    pace: Callable[[int], float] = lambda step: 10.0 if step in held_up else 1.0  # noqa: E731
    drafter = on_a_machine(FLAT, random_right(0.5), pace=pace)
    steps = drafter.write()
    assert all(steps[step].num_drafted for step in (2, 3)) and not steps[0].num_drafted
    drafted = [step.num_drafted > 0 for step in steps]
    assert sum(drafted) > 0.8 * len(drafted)
    assert drafter.loss_ms < 0


class Sparse(Oracle):
    """Finds something at every fourth position only, as copying does."""

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        is_found = (len(self.text) - self.log.num_prompt) % 4 == 0
        return proposal if is_found else proposal.keep([0])


class InBursts(Oracle):
    """A costly lookup that finds something in ten of sixty positions."""

    draft_ms = 0.8

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        is_found = (len(self.text) - self.log.num_prompt) % 60 >= 50
        return proposal if is_found else proposal.keep([0])


def test_lookups_that_find_nothing_do_not_end_the_search() -> None:
    drafter = on_a_machine(FLAT, ALWAYS, InBursts)
    num_drafted = [sum(step.num_drafted > 0 for step in drafter.write(240)) for _ in range(4)]
    assert min(num_drafted) >= 6, "two in every burst"
    assert drafter.lost_ms < 0


@pytest.mark.parametrize(
    ("steps_ms", "plain_ms"),
    [
        ([50.0], 10.0),
        ([50.0, 60.0], 50.0),
        ([50.0, 10.0, 50.0], 10.0),
        ([2.0], 10.0),
        ([2.0, 1.0], 2.0),
        ([50.0, 2.0], 10.0),
    ],
    ids=["a hiccup", "now slower", "two hiccups", "fast once", "now faster", "both ways"],
)
def test_a_plain_step_takes_what_most_take(steps_ms: list[float], plain_ms: float) -> None:
    costs = Costs(FLAT)
    for ms in steps_ms:
        costs.observe_plain(ms)
    assert costs.plain_ms == plain_ms


def test_steps_without_a_find_are_not_charged_on_a_machine_that_has_become_slow() -> None:
    """Ten times as slow as measured, as where another program takes the same cores."""
    drafter = on_a_machine(FLAT, ALWAYS, Sparse, pace=lambda step: 10.0)
    steps = drafter.write()
    assert drafter.loss_ms < 0
    assert sum(step.num_drafted > 0 for step in steps) > 0.2 * len(steps)


@pytest.mark.parametrize("kind", [Oracle, Sparse], ids=["drafts", "seldom finds"])
def test_cold_caches_are_not_taken_for_the_speed_of_plain_decoding(kind: type[Oracle]) -> None:
    """A text's first step takes 25% longer; steps that verify a draft, or follow one, 10%."""

    def pace(step: int) -> float:
        if step % 200 == 0:
            return 1.25
        return 1.1 if drafter.num_rows > 1 or drafter.opened._follows_draft else 1.0

    drafter = on_a_machine(FLAT, random_right(0.5), kind, pace=pace)
    estimates = []
    for _ in range(4):
        drafter.step = 0
        drafted = [step.num_drafted > 0 for step in drafter.write()]
        estimates.append(drafter.experience.costs.plain_ms)
    assert sum(drafted) > 0.2 * len(drafted)
    assert estimates[1:] == pytest.approx([10.0] * 3, rel=0.04)
    assert drafter.experience.costs.disturbance == pytest.approx(0.1, abs=0.05)


class Copying(Oracle):
    """A lookup that finds nothing at a fifth of the positions, and drafts ten tokens elsewhere."""

    draft_ms = 0.05

    def __init__(self, target: Target, output: list[int]) -> None:
        super().__init__(target, output, lambda position: position % 9 != 0, depth=10)

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        is_found = (len(self.text) - self.log.num_prompt) % 30 >= 6
        return proposal if is_found else proposal.keep([0])


class Interrupted(OnAMachine):
    """Other programs hold up a draft now and then, as they hold up steps."""

    draw: random.Random | None = None
    _held_up_ms, _num_seen = 0.0, 0

    def _now(self) -> float:
        if self.draw is not None and self.oracle.num_proposed > self._num_seen:
            self._num_seen = self.oracle.num_proposed
            self._held_up_ms += self.draw.uniform(3, 20) if self.draw.random() < 0.06 else 0.0
        return super()._now() + self._held_up_ms / 1000


QUIET_CURVE = LatencyCurve((1, 2, 4, 8, 16, 32), (13.9, 14.0, 14.6, 21.5, 38.5, 75.0))
BUSY_CURVE = LatencyCurve((1, 2, 4, 8, 16, 32), (26.3, 37.5, 37.5, 42.3, 97.9, 311.2))
"""A model of 0.5B on two cores, measured alone and beside two busy programs."""
SLOWDOWNS = json.loads(Path(__file__).with_name("busy_machine.json").read_text())
"""Time of forward after forward of that model, over what each took alone."""


@pytest.mark.parametrize(
    "curve", [QUIET_CURVE, slow(BUSY_CURVE)], ids=["quiet curve", "busy curve"]
)
@pytest.mark.parametrize("programs", SLOWDOWNS)
def test_copies_are_drafted_beside_busy_programs(programs: str, curve: LatencyCurve) -> None:
    slowdowns = SLOWDOWNS[programs]

    def num_accepted(first: int | None, curve: LatencyCurve) -> list[int]:
        """Draft tokens accepted in each of two texts."""

        def pace(step: int) -> float:
            return 1.0 if first is None else slowdowns[(first + step) % len(slowdowns)]

        drafter = Interrupted(Copying, QUIET_CURVE, curve=curve, pace=pace)
        drafter.draw = None if first is None else random.Random(first)
        return [160 - len(drafter.write(160)) for _ in "12"]

    quiet = num_accepted(None, QUIET_CURVE)
    starts = range(0, len(slowdowns), len(slowdowns) // 4)
    busy = [num_accepted(first, curve) for first in starts]
    for alone, beside in zip(quiet, zip(*busy, strict=True), strict=True):
        assert sum(beside) / len(beside) >= 0.8 * alone
        assert min(beside) >= 0.5 * alone, "not one text may be without drafts"


def test_one_long_stall_does_not_keep_a_drafter_asleep_for_ever() -> None:
    stalls = [1000.0]

    def pace(step: int) -> float:
        made = drafter.opened._step
        return stalls.pop() if stalls and made and made.plan and made.plan.trial else 1.0

    machine = LatencyCurve((1, 8), (10.0, 14.0))
    drafter = on_a_machine(machine, lambda position: not stalls, pace=pace)
    for _ in range(6):
        drafted = [step.num_drafted > 0 for step in drafter.write()]
    assert not stalls and sum(drafted) > 0.8 * len(drafted)


def test_a_drafter_that_holds_up_steps_itself_is_charged_for_them() -> None:
    draw = random.Random(1)

    class Jammed(LatencyCurve):
        """Holds up steps of several rows, and never plain ones."""

        def at(self, n: float, depth: int | None = None) -> float:
            is_held_up = n > 1 and draw.random() < 0.3
            return super().at(n, depth) * (12.0 if is_held_up else 1.0)

    machine = Jammed(STEEP.rows, STEEP.ms)
    drafter = on_a_machine(machine, lambda position: position % 3 != 2, curve=STEEP)
    drafter.write(230)
    assert drafter.lost_ms <= 0.03 * drafter.plain_ms + 100
