"""Runs a drafter along a finished text without the target, exactly as it would have run with it.

What a drafter learns from the target is known of a finished text: which of its tokens are right,
and the features along the true path. So the real drafter, whatever its settings, is fed these, and
its steps are the steps of a real greedy run (in float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Sampling
from engine.drafters.base import Drafter, Start, Workbench
from engine.drafters.dynamic_tree import DynamicPlan
from engine.drafters.eagle import EagleConfig, EagleDrafter, Plan, check_width
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.medusa import MedusaConfig, MedusaDrafter, read_heads
from engine.drafters.method import MethodConfig
from engine.drafters.redrafter import ReDrafterConfig, ReDrafterDrafter, read_head
from engine.drafters.static_tree import StaticPlan
from engine.errors import ConfigError
from engine.proposal import Needs, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.tree import ChoiceTree
from engine.tuning.texts import Reading

OFFLINE = ("Draft_Target", "Eagle", "Eagle3", "Medusa", "NGram", "ReDrafter", "Suffix")
"""Methods that read nothing of the target but tokens and features along the accepted path."""


@dataclass(frozen=True, slots=True)
class OfflineStep:
    """One step made offline.

    Attributes:
        root: which output of the text is the root.
        path: accepted nodes in path order, root excluded.
    """

    root: int
    proposal: Proposal
    path: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def num_drafted(self) -> int:
        return len(self.proposal.shape) - 1


@torch.inference_mode()
def run_offline(drafter: Drafter, reading: Reading, device: torch.device) -> Iterator[OfflineStep]:
    """The steps that the drafter makes on this text.

    Raises:
        ConfigError: a draft went on where the text is not known; read it with a longer tail.
    """
    tokens, first = reading.tokens.tolist(), reading.first
    start = Start(
        reading.text.prompt_ids,
        tokens[first],
        _shown(reading, slice(0, first), device),
        Sampling(),
        SeededDraws(0),
        reading.text.limits,
    )
    drafter.start(start)
    try:
        root = 0
        while root < reading.text.num_roots:
            at = first + root
            max_depth = reading.context_len - 1 - at
            proposal = drafter.propose(max_depth).cut(max_depth)
            path = follow(proposal, tokens[at + 1 :])
            committed = tuple(tokens[at + 1 : at + len(path) + 2])
            if len(committed) <= len(path):
                raise ConfigError(
                    f"A draft is {proposal.shape.max_depth} tokens deep, further than the text is "
                    "known beyond its end. Read the text with a longer tail."
                )
            yield OfflineStep(root, proposal, path)
            output = _shown_on_path(reading, at, path, device)
            drafter.observe(Outcome(proposal, output, (0, *path), committed))
            root += len(path) + 1
    finally:
        drafter.finish()


def follow(proposal: Proposal, true: Sequence[int]) -> tuple[int, ...]:
    """The accepted path: from the root, the child that carries the next true token."""
    tokens = proposal.tokens.tolist()
    at, path = 0, list[int]()
    for wanted in true:
        match = [c for c in proposal.shape.children[at] if tokens[c] == wanted]
        if not match:
            break
        at = match[0]
        path.append(at)
    return tuple(path)


def _shown(reading: Reading, rows: slice, device: torch.device) -> TargetOutput:
    def part(features: Tensor | None) -> Tensor | None:
        return None if features is None else features[rows].to(device)

    return TargetOutput(
        torch.empty(0, 0, device=device), part(reading.hidden), part(reading.layers)
    )


def _shown_on_path(
    reading: Reading, at: int, path: tuple[int, ...], device: torch.device
) -> TargetOutput:
    """Features of the rows on the path, where a verify forward has them; other rows are unread."""
    known = _shown(reading, slice(at, at + len(path) + 1), device)

    def spread(features: Tensor | None) -> Tensor | None:
        if features is None:
            return None
        rows = features.new_zeros(max((0, *path)) + 1, features.shape[1])
        rows[list((0, *path))[: len(features)]] = features
        return rows

    return TargetOutput(known.logits, spread(known.hidden), spread(known.layers))


Maker = Callable[[MethodConfig], Drafter]
"""Makes a drafter for other settings of the same weights."""


def drafter_maker(config: MethodConfig, bench: Workbench) -> tuple[Maker, Needs]:
    """A maker of drafters that share one copy of the weights, and the features they need.

    Raises:
        ConfigError: the method learns more from the target than a text's features.
        SourceError, DrafterError: as when building the method's drafter.
    """
    if config.decoding_type not in OFFLINE:
        raise ConfigError(
            f"decoding_type must be one of {', '.join(OFFLINE)} to draft without the target, got "
            f"{config.decoding_type}. Measure other methods by running them."
        )
    if isinstance(config, MedusaConfig) and config.speculative_model is not None:
        heads = read_heads(bench.locate(config.speculative_model), bench.target)

        def medusa(other: MethodConfig) -> Drafter:
            assert isinstance(other, MedusaConfig)
            tree = ChoiceTree(other.medusa_choices)
            tree.check_fits(depth=heads.count, ranks=bench.target.vocab_size, what="the drafter")
            return MedusaDrafter(other, heads, tree)

        return medusa, MedusaDrafter.needs
    if isinstance(config, ReDrafterConfig) and config.speculative_model is not None:
        head = read_head(bench.locate(config.speculative_model), bench.target)

        def redrafter(other: MethodConfig) -> Drafter:
            assert isinstance(other, ReDrafterConfig)
            return ReDrafterDrafter(other, head)

        return redrafter, ReDrafterDrafter.needs
    if isinstance(config, EagleConfig | Eagle3Config):
        return _eagle_maker(config.build(bench), bench)
    return lambda other: other.build(bench), Needs()


def _eagle_maker(built: EagleDrafter, bench: Workbench) -> tuple[Maker, Needs]:
    head, needs, device = built.head, built.needs, bench.target.device

    def eagle(other: MethodConfig) -> Drafter:
        assert isinstance(other, EagleConfig | Eagle3Config)
        plan: Plan
        if isinstance(other, EagleConfig) and not other.use_dynamic_tree:
            tree = ChoiceTree(other.eagle_choices)
            tree.check_fits(depth=tree.depth, ranks=head.draft_vocab_size, what="the drafter")
            plan = StaticPlan(tree, device)
        else:
            check_width(other.size.top_k, head)
            plan = DynamicPlan(other.size)
        return EagleDrafter(head, plan, needs, device)

    return eagle, needs
