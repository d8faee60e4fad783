"""The drafter interface: a drafter opens a session for every text, which proposes draft trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.accept import Lossless, Rule
from engine.config import Limits, Sampling
from engine.drafters.texts import TargetTrace
from engine.errors import ConfigError
from engine.feature_log import FeatureLog
from engine.metrics import common_len
from engine.model.cache import TreeCache
from engine.model.sources import Locate, TargetSpec, as_named
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, Proposal
from engine.sampling import SeededDraws
from engine.steps import Bypass
from engine.tree import TreeShape


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a method may use to build its drafter.

    Attributes:
        target: a drafter may read its modules, but never its cache.
        resolve: a target preset's name, hub id or path → where that model's weights are.
        load: loads (or shares) another model; `dtype` and `device` as keywords, else the target's.
        locate: the name of a shipped drafter or corpus → its folder; any other text unchanged.
        experience_dir: where the controller keeps its experience; None = in memory.
    """

    target: Target
    resolve: Callable[[str], TargetSpec]
    load: Callable[..., Target]
    locate: Locate = as_named
    experience_dir: Path | None = None

    def weights(self, name: str | None, what: str) -> str:
        """Location of the weights that a method's settings name; ConfigError if they name none.

        A name without a path is looked up in the target's own folder first.
        """
        if name is None:
            raise ConfigError(f"speculative_model must name {what}, got none. Set it.")
        folder = Path(self.target.model.config.name_or_path or "")
        is_name = Path(name).name == name != ".."
        # A relative name is a hub id; as a folder it would depend on the working folder.
        if folder.is_absolute() and is_name and (folder / name).is_dir():
            return str(folder / name)
        return self.locate(name)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The beginning of a text.

    Attributes:
        log: its tokens and the target's features; so far only the prompt's tokens are in it.
        sampling: how the target samples, and a drafter that samples its drafts.
        min_match_len: a method that looks up drafts nothing at shorter matches.
    """

    log: FeatureLog
    sampling: Sampling
    draws: SeededDraws
    limits: Limits = field(default_factory=Limits)
    min_match_len: int = 0


@dataclass(frozen=True, slots=True)
class Traits:
    """What a drafter is like, for those who decide when it drafts.

    Attributes:
        drafts: False for plain decoding.
        has_network: drafting and reading the prompt take forwards of a network.
        branches: a tree costs more than a chain; it then drafts chains for a budget of width 1.
        remembers: it learns from text to text.
    """

    drafts: bool = True
    has_network: bool = False
    branches: bool = False
    remembers: bool = False


class Drafter(ABC):
    """The weights and settings of a method; the state of a text is in the session that it opens.

    It is used for one text at a time. It never touches the target's cache. Its weights are freed
    with the last reference to it, so nothing that it holds may refer back to it.
    """

    session: type[DraftSession[Any]]
    """What `open` makes."""
    needs: Needs = Needs()
    traits: Traits = Traits()
    notes: tuple[str, ...] = ()
    """Remarks on how well drafter and target fit, one sentence each."""

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Drafters that take turns: at each step, the first one that finds a draft."""
        return (self,)

    def open(self, start: Start) -> DraftSession[Any]:
        """Begin a text. What takes time waits for the first draft, which may never be asked for."""
        return self.session(self, start)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Ranks of the true tokens of a finished text, as drafted from every root.

        Returns:
            `(roots, depths)` int64, `UNRANKED` for tokens that it cannot draft; fewer columns if it
            cannot draft as deep. Undefined where `TargetTrace.true_tokens` is −1.
        """
        raise ConfigError(f"{type(self).__name__} ranks no tokens. Measure it by running it.")


D = TypeVar("D", bound=Drafter)


class DraftSession(ABC, Generic[D]):
    """One text's drafting: a subclass implements `propose`, from the text and its log.

    Not every step asks for a draft, and a session may be asked for its first one late: what
    happened in between is in the log.

    Attributes:
        text: committed tokens, prompt first; the last one is the root. Not to be changed.
        match_len: length of the context by which the last draft was looked up; None = it was not
            looked up.
    """

    match_len: int | None = None

    def __init__(self, drafter: D, start: Start) -> None:
        self.drafter, self.start, self.log = drafter, start, start.log
        self.text = start.log.tokens

    @property
    def root(self) -> int:
        return self.text[-1]

    @property
    def parts(self) -> tuple[DraftSession[Any], ...]:
        """One session for each of the drafter's parts."""
        return (self,)

    def rule(self) -> Rule:
        """How the text's drafts are accepted; lossless unless the method is lossy by design."""
        return Lossless(self.start.sampling)

    def read(self) -> None:
        """Take in the tokens that the text has gained, where that is a work of its own."""

    @abstractmethod
    def propose(self, budget: Budget) -> Proposal:
        """A draft tree rooted at the last committed token.

        A network computes no level beyond the budget; a deeper draft is cut.
        """

    def observe(self, outcome: Outcome) -> None:
        """See the whole of a step, rejected rows too; of steps drafted by others, not always."""

    def close(self) -> None:
        """The text has ended, or was cancelled, perhaps before its first token."""


class FeatureDrafter(Drafter):
    """A network that keeps rows of its own, one for every committed token but the root."""

    traits = Traits(has_network=True)
    kept: tuple[list[int], TreeCache] | None = None
    """Under prefix caching: the last text and its rows, for one that begins alike."""

    @abstractmethod
    def new_cache(self) -> TreeCache:
        """Without rows."""


F = TypeVar("F", bound=FeatureDrafter)


class FeatureSession(DraftSession[F]):
    """Feeds the features of committed rows to the network, each row once.

    Attributes:
        cache: the network's rows; `cursor` is behind those that stay.
    """

    def __init__(self, drafter: F, start: Start) -> None:
        super().__init__(drafter, start)
        self.cursor, rows = start.log.open_cursor(), 0
        self.cache = drafter.new_cache()
        if drafter.kept is not None and self.log.num_cached:
            text, self.cache = drafter.kept
            # A row is of a token and the one after it.
            rows = max(0, common_len(text, self.text) - 1)
        drafter.kept = None
        self.cache.truncate(rows)
        self.cursor.row = self.cache.length

    def unread(self) -> tuple[Tensor, Tensor]:
        """Features `(n, width)` and the token after each position `(n,)`; moves no cursor."""
        return self.log.unread(self.cursor)

    def close(self) -> None:
        if self.log.num_cached is not None:
            self.cache.truncate(self.cursor.row)
            self.drafter.kept = (self.text, self.cache)


def root_only(
    root: int,
    device: torch.device,
    bypass: Bypass | None = None,
    decision: str = "",
    expected: tuple[float, float] | None = None,
) -> Proposal:
    """A proposal without drafts, and why: one plain decoding step."""
    # Filled on the device, because a copy from the host would wait.
    tokens = torch.full((1,), root, device=device)
    shape = TreeShape.chain(0)
    return Proposal(tokens, shape, bypass=bypass, decision=decision, expected=expected)


def chain(root: int, token_ids: Tensor, probs: Tensor) -> Proposal:
    """A chain below the root of `token_ids (n,)` with draft probabilities `(n,)`."""
    tokens = torch.cat([token_ids.new_full((1,), root), token_ids])
    draft_probs = torch.cat([probs.new_ones(1), probs])
    return Proposal(tokens, TreeShape.chain(len(token_ids)), draft_probs=draft_probs)
