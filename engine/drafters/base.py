"""The drafter interface: propose a draft tree, then observe what was accepted."""

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
from engine.proposal import Budget, Needs, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Bypass
from engine.tree import TreeShape


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a method may use to build its drafter.

    Attributes:
        target: a drafter may read its modules and never its cache.
        resolve: a target preset's name, hub id or path → the location of that model's weights.
        load: loads (or shares) another model; `dtype` and `device` by keyword, else the target's.
        locate: a shipped drafter's or corpus's name → its folder; any other text unchanged.
    """

    target: Target
    resolve: Callable[[str], TargetSpec]
    load: Callable[..., Target]
    locate: Locate = as_named

    def weights(self, name: str | None, what: str) -> str:
        """Location of the weights that a method's settings name; ConfigError if they name none.

        A name without a path is looked up in the target's own folder first.
        """
        if name is None:
            raise ConfigError(f"speculative_model must name {what}, got none. Set it.")
        folder = Path(self.target.model.config.name_or_path or "")
        is_name = Path(name).name == name != ".."
        # A relative folder is a hub id, or would be relative to the working folder.
        if folder.is_absolute() and is_name and (folder / name).is_dir():
            return str(folder / name)
        return self.locate(name)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The beginning of a generation.

    Attributes:
        root: the first new token, already decided by the target.
        output: the target's features for every prompt row (logits for the last row only).
        num_cached: prompt tokens that the target found in its cache; None = nothing is kept from
            run to run, and a drafter reads the whole prompt too.
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

    A subclass sets `needs` and implements `propose`; if it keeps more than the text, it extends
    `start` and `observe`. It never touches the target's cache.
    """

    needs: Needs = Needs()
    drafts: bool = True
    """False for plain decoding."""
    notes: tuple[str, ...] = ()
    """Remarks on how well the drafter and the target fit, one sentence each."""
    has_network: bool = False
    """Whether drafts cost forwards of a network, and reading the prompt does."""
    branches: bool = False
    """Whether a tree costs it more than a chain: it then drafts chains for a budget of width 1."""
    remembers: bool = False
    """Whether it learns from text to text."""
    reads_logits: bool = False
    """Whether it has to see the target's logits of steps that it did not draft for."""
    match_len: int | None = None
    """Length of the context that the last draft was looked up by; None = unknown."""
    num_ranks: int | None = None
    """Ranks that it can draft; None = its whole vocabulary."""
    text: list[int]
    """Committed tokens, prompt first; the last one is the root."""
    num_shared: int = 0
    """Prompt tokens shared with the previous run, if its state may be kept."""

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Drafters that take turns: at a step, the first that finds something drafts."""
        return (self,)

    def start(self, start: Start) -> None:
        """Begin a new generation; only state of the prefix shared with the last may be kept."""
        previous = getattr(self, "text", ())
        self.num_shared = common_len(previous, start.prompt_ids) if start.num_cached else 0
        self.text = [*start.prompt_ids, start.root]

    @abstractmethod
    def propose(self, budget: Budget) -> Proposal:
        """A draft tree rooted at the last committed token.

        A network runs no level deeper than the budget; what is drafted beyond it is cut.
        """

    def observe(self, outcome: Outcome) -> None:
        """Take note of what was accepted."""
        self.text.extend(outcome.committed)

    def rule(self, sampling: Sampling) -> Rule:
        """How drafts are accepted; lossless unless the method is lossy by design."""
        return Lossless.of(sampling)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Ranks of the true tokens of a finished text, drafting along it from every root.

        Returns:
            `(roots, depths)` int64, `UNRANKED` for tokens that it cannot draft; fewer columns if it
            drafts less deep. Undefined where `TargetTrace.true_tokens` is −1.
        """
        raise ConfigError(f"{type(self).__name__} ranks no tokens. Measure it by running it.")

    def finish(self) -> None:  # noqa: B027 - most drafters have nothing to release
        """Release the generation's state, after its end or its cancellation."""

    def close(self) -> None:  # noqa: B027 - most drafters own no weights
        """Release the weights."""


def root_only(root: int, device: torch.device, bypass: Bypass | None = None) -> Proposal:
    """A proposal without drafts, and why: one plain decoding step."""
    # Filled on the device: a copy from the host would wait for it.
    tokens = torch.full((1,), root, device=device)
    return Proposal(tokens, TreeShape.chain(0), bypass=bypass)


def chain(root: int, token_ids: Tensor, probs: Tensor) -> Proposal:
    """A chain below the root: `token_ids (n,)`, each with its probability `(n,)`."""
    tokens = torch.cat([token_ids.new_full((1,), root), token_ids])
    draft_probs = torch.cat([probs.new_ones(1), probs])
    return Proposal(tokens, TreeShape.chain(len(token_ids)), draft_probs=draft_probs)
