"""A smaller model of the same vocabulary drafts a chain, the target verifies it.

The draft model keeps its own cache over the whole generation. After a step it holds the rows of the
root and of all drafts but the last; those that were accepted stay, and the next draft begins with
the tokens it has not seen: one after a rejection, two after a fully accepted draft.

    committed  … r        cache  … r a b         drafts a b c (c was never fed)
    accepted a b, then x  keep   … r a b         feed x
    accepted a b c, x     keep   … r a b         feed c x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.config import Sampling
from engine.drafters.base import Drafter, Start, Workbench, root_only
from engine.drafters.method import MethodConfig
from engine.errors import DrafterError
from engine.model.text import common_vocabulary
from engine.proposal import DraftDists, Needs, Outcome, Proposal
from engine.sampling import Draws, SeededDraws, inverse_cdf, probabilities
from engine.tree import TreeShape, upload


class DraftTargetConfig(MethodConfig):
    """Settings of drafting with a smaller model."""

    title: ClassVar[str] = "Draft model"
    summary: ClassVar[str] = "A smaller model of the same vocabulary drafts a chain of tokens."
    paper: ClassVar[str | None] = "2211.17192"

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    speculative_model: str | None = Field(
        None, description="draft model: a target preset's name, a local path or a hub id"
    )
    max_draft_len: int = Field(4, ge=1, le=64, description="most tokens to draft")
    use_draft_probs: bool = Field(
        True,
        description="when sampling: sample the drafts too and verify them with their "
        "probabilities; off = likeliest tokens",
    )
    confidence_threshold: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="stop drafting where the draft model's best token is less likely; 0 = never",
    )

    def build(self, bench: Workbench) -> DraftTargetDrafter:
        return DraftTargetDrafter(self, bench)


class DraftTargetDrafter(Drafter):
    """Drafts with a model of its own, whose cache is never filled twice with the same tokens."""

    def __init__(self, config: DraftTargetConfig, bench: Workbench) -> None:
        """Load the draft model.

        Raises:
            DrafterError: none is named, or its vocabulary differs.
            SourceError, TargetError: it cannot be found or loaded.
        """
        if config.speculative_model is None:
            raise DrafterError(
                "speculative_model must name the draft model, got nothing. "
                "Give a target preset, a local path or a hub id."
            )
        self._config = config
        self._device = bench.target.device
        self._vocab = bench.target.vocab_size
        self._model = bench.load(bench.resolve(bench.locate(config.speculative_model)))
        self._common = common_vocabulary(bench.target, self._model)
        self._cache = self._model.new_cache(0)
        self._sampling = Sampling()
        self._draws: Draws = SeededDraws(0)
        self._sequence: list[int] = []
        self._drafted: Tensor | None = None

    def start(self, start: Start) -> None:
        self.finish()
        self._sequence = [*start.prompt_ids, start.root]
        self._sampling, self._draws = start.sampling, start.draws
        self._cache = self._model.new_cache(min(len(self._sequence) + 512, self._model.context_len))

    def propose(self, max_depth: int) -> Proposal:
        """A chain, empty where the draft model's context ends before the target's."""
        room = self._model.context_len - len(self._sequence) + 1
        length = min(self._config.max_draft_len, max_depth, room)
        draft = self._draft(length) if length > 0 else _Chain([], [], [])
        if not draft.tokens:
            self._drafted = None
            return root_only(self._sequence[-1], self._device)
        self._drafted = torch.stack(draft.tokens)
        root = self._drafted.new_full((1,), self._sequence[-1])
        return Proposal(
            torch.cat([root, self._drafted]),
            TreeShape.chain(len(draft.tokens)),
            draft_probs=torch.stack([torch.ones_like(draft.probs[0]), *draft.probs]),
            dists=draft.dists(self._vocab),
        )

    def _draft(self, length: int) -> _Chain:
        """Up to `length` tokens; the choice of every token stays on the device."""
        chain = _Chain([], [], [])
        samples = self._config.use_draft_probs and not self._sampling.greedy
        drawn = [self._draws.uniform() for _ in range(length)] if samples else []
        uniforms = upload(torch.tensor(drawn, dtype=torch.float64), self._device)
        feed = self._unseen()
        for i in range(length):
            logits = self._model.prefill(feed, self._cache, Needs()).logits[-1, : self._common]
            confidence = logits.float().softmax(dim=-1)
            # Decided before a token is drawn: depending on the draw would bias what is accepted.
            if self._unsure(confidence):
                break
            if samples:
                chain.drawn_from.append(probabilities(logits, self._sampling))
                token = inverse_cdf(chain.drawn_from[-1], uniforms[i])
            else:
                token = logits.argmax()
            chain.tokens.append(token)
            chain.probs.append(confidence[token])
            feed = token[None]
        return chain

    def _unseen(self) -> Tensor:
        """Committed tokens that the draft model has not read, as ids that it knows."""
        unseen = upload(torch.tensor(self._sequence[self._cache.length :]), self._device)
        return unseen.clamp_max_(self._model.vocab_size - 1)

    def _unsure(self, confidence: Tensor) -> bool:
        threshold = self._config.confidence_threshold
        return threshold > 0 and float(confidence.max()) < threshold

    def observe(self, outcome: Outcome) -> None:
        """Keep the rows of drafts that were committed."""
        drafted = [] if self._drafted is None else self._drafted.tolist()
        # The last committed token is the next root: fed again even where it was drafted.
        agreed = 0
        for ours, theirs in zip(drafted, outcome.committed[:-1], strict=False):
            if ours != theirs:
                break
            agreed += 1
        self._cache.truncate(len(self._sequence) + agreed)
        self._sequence.extend(outcome.committed)
        self._drafted = None

    def finish(self) -> None:
        self._cache.free()
        self._sequence = []
        self._drafted = None


@dataclass(frozen=True, slots=True)
class _Chain:
    """Drafted tokens and their probabilities (scalars), and what they were drawn from."""

    tokens: list[Tensor]
    probs: list[Tensor]
    drawn_from: list[Tensor]

    def dists(self, vocab: int) -> DraftDists | None:
        """Draft distributions over the target's vocabulary; None if the tokens were not drawn."""
        if not self.drawn_from:
            return None
        rows = torch.stack(self.drawn_from)
        rows = torch.nn.functional.pad(rows, (0, vocab - rows.shape[-1]))
        return DraftDists(rows, {i: i for i in range(len(rows))})
