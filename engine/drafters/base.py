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
from engine.proposal import Budget, Needs, Outcome, Proposal, SharedRows, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Bypass
from engine.tree import TreeShape, upload


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
    """The beginning of a generation.

    Attributes:
        root: the first new token, already chosen by the target.
        output: the target's features for every prompt row (logits for the last row only).
        num_cached: prompt tokens that were in the target's cache; None = no prefix caching, and the
            drafter reads the whole prompt, too.
        sampling: how the target samples, and a drafter that samples its drafts.
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
    `start` and `observe`. It never touches the target's cache. Its weights are freed with the last
    reference to it, so nothing that it holds may refer back to it.
    """

    needs: Needs = Needs()
    drafts: bool = True
    """False for plain decoding."""
    notes: tuple[str, ...] = ()
    """Remarks on how well drafter and target fit, one sentence each."""
    has_network: bool = False
    """Whether drafting and reading the prompt take forwards of a network."""
    branches: bool = False
    """Whether a tree costs more than a chain; it then drafts chains for a budget of width 1."""
    remembers: bool = False
    """Whether it learns from text to text."""
    reads_logits: bool = False
    """Whether it needs the target's logits also of steps that it did not draft for."""
    match_len: int | None = None
    """Length of the context by which the last draft was looked up; None = it was not looked up."""
    min_match_len: int = 0
    """A drafter that looks up drafts nothing at shorter matches; a combination sets it."""
    text: list[int]
    """Committed tokens, prompt first; the last one is the root."""
    num_shared: int = 0
    """Prompt tokens shared with the previous run, if its state may be kept."""

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Drafters that take turns: at each step, the first one that finds a draft."""
        return (self,)

    def start(self, start: Start) -> None:
        """Begin a generation; only state of the prefix shared with the last one may be kept."""
        previous = getattr(self, "text", ())
        self.num_shared = common_len(previous, start.prompt_ids) if start.num_cached else 0
        self.text = [*start.prompt_ids, start.root]

    @abstractmethod
    def propose(self, budget: Budget) -> Proposal:
        """A draft tree rooted at the last committed token.

        A network computes no level beyond the budget; a deeper draft is cut.
        """

    def observe(self, outcome: Outcome) -> None:
        """Record what was accepted."""
        self.text.extend(outcome.committed)

    def rule(self, sampling: Sampling) -> Rule:
        """How a text's drafts are accepted; lossless unless the method is lossy by design."""
        return Lossless(sampling)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Ranks of the true tokens of a finished text, as drafted from every root.

        Returns:
            `(roots, depths)` int64, `UNRANKED` for tokens that it cannot draft; fewer columns if it
            cannot draft as deep. Undefined where `TargetTrace.true_tokens` is −1.
        """
        raise ConfigError(f"{type(self).__name__} ranks no tokens. Measure it by running it.")

    def finish(self) -> None:  # noqa: B027 - most drafters have nothing to release
        """Release the generation's state after its end or cancellation."""


def features_of(output: TargetOutput | TargetTrace) -> Tensor:
    """The features `(rows, width)` that the drafter needs."""
    features = output.hidden if output.layers is None else output.layers
    assert features is not None, "the drafter needs no features"
    return features


class FeatureDrafter(Drafter):
    """Collects the features of committed rows until its network reads them.

    They can be of several steps, because not every step calls `propose`.
    """

    has_network = True
    _unread: tuple[tuple[Tensor, Tensor], ...] = ()

    def start(self, start: Start) -> None:
        super().start(start)
        features, rows = features_of(start.output), self._resume(max(0, self.num_shared - 1))
        tokens = upload(torch.tensor(self.text[1 + rows :]), features.device)
        self._unread = ((features[rows:], tokens),)

    @abstractmethod
    def _resume(self, rows: int) -> int:
        """Keep at most `rows` rows of the previous run; returns how many are kept."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        features = features_of(outcome.output)
        rows = upload(torch.tensor([outcome.path, outcome.committed]), features.device)
        self._unread += ((features[rows[0]], rows[1]),)

    def unread(self) -> tuple[Tensor, Tensor]:
        """Features `(n, width)` and the token after each position `(n,)`."""
        features, tokens = zip(*self._unread, strict=True)
        return torch.cat(features), torch.cat(tokens)

    def finish(self) -> None:
        self._unread = ()


class LastRowDrafter(Drafter):
    """Drafts from the target's last hidden state at the last accepted row, `hidden (1, size)`.

    `shared` are keys and values of the layers that it needs.
    """

    has_network = True
    needs = Needs(hidden=True)
    hidden = torch.empty(0)
    shared: tuple[SharedRows, ...] = ()

    def start(self, start: Start) -> None:
        super().start(start)
        self.hidden, self.shared = features_of(start.output)[-1:], start.output.shared

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.hidden = features_of(outcome.output)[outcome.path[-1] :][:1]
        self.shared = outcome.output.shared

    def finish(self) -> None:
        self.hidden, self.shared = torch.empty(0), ()


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
