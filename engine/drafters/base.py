"""The drafter interface: propose a draft tree, then be told what was accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.accept import Lossless, Rule
from engine.config import Limits, Sampling
from engine.drafters.texts import TargetTrace
from engine.errors import ConfigError
from engine.metrics import common_len
from engine.model.sources import Locate, TargetSpec, as_named
from engine.model.target import Target
from engine.proposal import Needs, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Bypass
from engine.tree import TreeShape


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a method may use to build its drafter.

    Attributes:
        target: a drafter may read its modules and never its cache.
        resolve: a target preset's name, hub id or path → where that model's weights are.
        load: loads (or shares) another model; `dtype` and `device` by keyword, else the target's.
        locate: a shipped drafter's or corpus's name → its folder; any other text as it is.
    """

    target: Target
    resolve: Callable[[str], TargetSpec]
    load: Callable[..., Target]
    locate: Locate = as_named

    def weights(self, named: str | None, what: str) -> str:
        """Where the weights are that a method's settings name; ConfigError if they name none.

        A name alone is looked for in the target's own folder first.
        """
        if named is None:
            raise ConfigError(f"speculative_model must name {what}, got none. Set it.")
        own = Path(self.target.model.config.name_or_path or "")
        is_name = Path(named).name == named != ".."
        # A hub id is no folder here, and the working folder is nobody's own.
        if own.is_absolute() and is_name and (own / named).is_dir():
            return str(own / named)
        return self.locate(named)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a drafter is told when a generation begins.

    Attributes:
        root: the first new token, already decided by the target.
        output: the target's features for every prompt row (logits for the last row only).
        num_cached: prompt tokens that the target did not have to read again; None = nothing is kept
            from run to run, and a drafter reads everything too.
        sampling: how the target samples; a drafter that samples its drafts follows it.
    """

    prompt_ids: Sequence[int]
    root: int
    output: TargetOutput
    sampling: Sampling
    draws: SeededDraws
    limits: Limits = field(default_factory=Limits)
    num_cached: int | None = None


class Drafter(ABC):
    """Proposes draft trees for one generation at a time; reusable from run to run.

    A subclass sets `needs` and implements `propose`; where it keeps more than the text, it extends
    `start` and `observe`. It never touches the target's cache.
    """

    needs: Needs = Needs()
    drafts: bool = True
    """Whether it is more than plain decoding, to which nothing is added."""
    notes: tuple[str, ...] = ()
    """Remarks for people on how well the drafter and the target fit, one sentence each."""
    least_prob: float = 0.0
    """Set by a controller: a draft need not go on after a path that is less likely than this."""
    match_len: int | None = None
    """Tokens of the text that the last draft was looked up by; None = it does not tell."""
    num_ranks: int | None = None
    """Ranks that it can offer; None = its whole vocabulary."""
    text: list[int]
    """Committed tokens, prompt first; the last one is the root."""
    num_known: int = 0
    """Tokens of the prompt that the run before began with too, if what was read may be kept."""

    def start(self, start: Start) -> None:
        """Begin a new generation; of the last one only what they have in common may be kept."""
        before = getattr(self, "text", ())
        self.num_known = common_len(before, start.prompt_ids) if start.num_cached else 0
        self.text = [*start.prompt_ids, start.root]

    @abstractmethod
    def propose(self, max_depth: int) -> Proposal:
        """A draft tree rooted at the last committed token.

        The context ends at `max_depth`; the loop cuts off deeper nodes, so it may be ignored.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn what was accepted."""
        self.text.extend(outcome.committed)

    def rule(self, sampling: Sampling) -> Rule:
        """How drafts are accepted; lossless unless the method is lossy by design."""
        return Lossless(sampling)

    def ranks(self, reading: TargetTrace, depths: int) -> Tensor:
        """Ranks that the true tokens of a finished text have, drafting along it from every root.

        Returns:
            `(roots, depths)` int64, `UNRANKED` for tokens that it cannot offer; fewer columns if it
            drafts less deep. Without meaning where `TargetTrace.true_tokens` is −1.
        """
        raise ConfigError(f"{type(self).__name__} ranks no tokens. Measure it by running it.")

    def finish(self) -> None:  # noqa: B027 - most drafters have nothing to release
        """The generation ended (or was cancelled): release what only it needed."""

    def close(self) -> None:  # noqa: B027 - most drafters own no weights
        """Release the weights."""


def root_only(root: int, device: torch.device, bypass: Bypass | None = None) -> Proposal:
    """A proposal without drafts, and why: one plain decoding step."""
    # Filled there: a copy from the host would wait for the device.
    tokens = torch.full((1,), root, device=device)
    return Proposal(tokens, TreeShape.chain(0), bypass=bypass)


def chain(root: int, drafted: Tensor, probs: Tensor) -> Proposal:
    """The root and `drafted` `(n,)` one after the other, each with its probability `(n,)`."""
    tokens = torch.cat([drafted.new_full((1,), root), drafted])
    draft_probs = torch.cat([probs.new_ones(1), probs])
    return Proposal(tokens, TreeShape.chain(len(drafted)), draft_probs=draft_probs)
