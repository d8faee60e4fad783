"""How each method ranks tokens: for a whole text at once, what it would offer at every position.

A ranker drafts along the true path from every root of a text in one batch. That equals what the
drafter itself does when decoding, because each method's offer at depth d depends only on the
features up to the root and on the path to the node:

    Medusa        head d - 1 of the last hidden state before the root
    EAGLE         entries of the path behind the base entries up to the root
    draft model   the tokens before, whatever the root was
    ReDrafter     the recurrent state of the path; exact for beam_width 1, see `ReDrafterRanker`

In float32 a rank differs from the drafter's only where two logits agree to the last bits. In half
precision a batch of another shape rounds differently, and ties are common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.drafters.base import Workbench
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.eagle_head import DraftHead, HeadCache
from engine.drafters.medusa import MedusaConfig, read_heads
from engine.drafters.method import MethodConfig
from engine.drafters.redrafter import NUM_CANDIDATES, ReDrafterConfig, read_head
from engine.errors import ConfigError, DrafterError
from engine.model.text import common_vocabulary
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from engine.tuning.texts import Reading

ROWS = 128
"""Positions whose full-vocabulary logits are held at a time."""
BEYOND = 1 << 30
"""Rank of a token that the drafter cannot offer."""


class Ranker(ABC):
    """Ranks the true tokens of a text.

    Attributes:
        needs: features of the target that it reads.
        depths: how deep it drafts.
        num_ranks: most ranks that the drafter itself can offer; None = its whole vocabulary.
    """

    needs: Needs = Needs()
    depths: int
    num_ranks: int | None = None

    @abstractmethod
    def ranks(self, reading: Reading) -> Tensor:
        """`(roots, depths)` int64; without meaning where `Reading.true_tokens` is −1."""


def rank_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Tokens that come before each given one, by logit; equal logits by the lower id.

    Args:
        logits: `(…, vocab)`.
        token_ids: `(…)` int64.

    Example: logits 1 3 2 3, token 3 → 1, because token 1 ties and has the lower id.
    """
    own = logits.gather(-1, token_ids[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < token_ids[..., None]))
    return before.sum(dim=-1)


def make_ranker(config: MethodConfig, bench: Workbench, depths: int) -> Ranker:
    """The ranker of a method, with weights of its own.

    Args:
        depths: how deep to rank; Medusa ranks as deep as it has heads, if those are fewer.

    Raises:
        ConfigError: this method drafts nothing that ranks could describe.
        SourceError, DrafterError: as when building the method's drafter.
    """
    if isinstance(config, MedusaConfig):
        return MedusaRanker(config, bench, depths)
    if isinstance(config, EagleConfig | Eagle3Config):
        return EagleRanker(config, bench, depths)
    if isinstance(config, ReDrafterConfig):
        return ReDrafterRanker(config, bench, depths)
    if isinstance(config, DraftTargetConfig):
        return DraftModelRanker(config, bench, depths)
    raise ConfigError(
        f"{type(config).title} has no rank table: it does not rank tokens per depth. "
        "Choose Medusa, Eagle, Eagle3, ReDrafter, Draft_Target, NGram or Suffix."
    )


class MedusaRanker(Ranker):
    """Every head judges the token at its own distance. Exact for every tree."""

    needs = Needs(hidden=True)

    def __init__(self, config: MedusaConfig, bench: Workbench, depths: int) -> None:
        if config.speculative_model is None:
            raise ConfigError("speculative_model must name the Medusa heads, got none. Set it.")
        self._heads = read_heads(bench.locate(config.speculative_model), bench.target)
        self._device = bench.target.device
        self.depths = min(depths, self._heads.count)

    def ranks(self, reading: Reading) -> Tensor:
        assert reading.hidden is not None
        tokens = reading.true_tokens(self.depths).clamp_min(0).to(self._device)
        hidden = reading.hidden[reading.first - 1 :][: len(tokens)].to(self._device)
        size = max(1, ROWS // self.depths)
        found = []
        for rows, wanted in zip(hidden.split(size), tokens.split(size), strict=True):
            found.append(rank_of(self._heads.logits(rows, self.depths), wanted.T).T)
        return torch.cat(found).cpu()


class EagleRanker(Ranker):
    """All roots draft along their true paths at once, depth by depth. Exact for every static tree.

    The root at position p has the base entries 0 … p-1. Its entry of depth d carries the d-th true
    token behind it, sits at position p + d - 1 and sees those base entries, its own earlier
    entries and itself; entries of other roots are hidden from it.
    """

    def __init__(self, config: EagleConfig | Eagle3Config, bench: Workbench, depths: int) -> None:
        plain: dict[str, object] = {"use_dynamic_tree": False}
        if isinstance(config, EagleConfig):
            plain["eagle_choices"] = ((0,),)
        drafter = config.replace(**plain).build(bench)
        self.head: DraftHead = drafter.head
        self.needs = drafter.needs
        self.depths = depths
        self.num_ranks = self.head.draft_vocab_size
        self._device = bench.target.device
        self._draft_ids = _inverse(self.head, bench.target.vocab_size, self._device)

    def ranks(self, reading: Reading) -> Tensor:
        features = reading.hidden if reading.layers is None else reading.layers
        assert features is not None
        tokens = reading.tokens.to(self._device)
        wanted = reading.true_tokens(self.depths).to(self._device)
        first, end = reading.first - 1, reading.first - 1 + len(wanted)
        cache = HeadCache()
        found = []
        for begin in range(0, end, ROWS):
            entries = torch.arange(begin, min(begin + ROWS, end), device=self._device)
            fused = self.head.fuse(features[entries.cpu()].to(self._device))
            seen = torch.arange(len(entries) + begin, device=self._device) <= entries[:, None]
            roots = entries >= first
            fed, unused = tokens[entries + 1], not bool(roots.any())
            out = self.head(fused, fed, entries, cache, seen, last_only=unused)
            cache.keep()
            if not unused:
                found.append(self._along(out[roots], entries[roots], wanted, first, cache))
        return torch.cat(found).cpu()

    def _along(
        self, hidden: Tensor, entries: Tensor, wanted: Tensor, first: int, cache: HeadCache
    ) -> Tensor:
        """Ranks `(m, depths)` of the roots whose last base entries these m are."""
        m, base = len(entries), cache.num_base
        mine = wanted[entries - first]
        mask = torch.arange(base, device=self._device) <= entries[:, None]
        itself = torch.eye(m, dtype=torch.bool, device=self._device)
        columns = []
        for depth in range(self.depths):
            ids = self._draft_ids[mine[:, depth].clamp_min(0)]
            rank = rank_of(self.head.logits(hidden), ids.clamp_min(0))
            columns.append(torch.where(ids < 0, BEYOND, rank))
            if depth + 1 < self.depths:
                mask = torch.cat([mask, itself], dim=1)
                fed = mine[:, depth].clamp_min(0)
                hidden = self.head(hidden, fed, entries + depth + 1, cache, mask)
        cache.drop()
        return torch.stack(columns, dim=1)


def _inverse(head: DraftHead, vocab_size: int, device: torch.device) -> Tensor:
    """Draft id of every target id `(vocab,)`; −1 where the head cannot draft it."""
    draft_ids = torch.arange(head.draft_vocab_size, device=device)
    inverse = torch.full((vocab_size,), -1, device=device)
    inverse[head.target_ids(draft_ids)] = draft_ids
    return inverse


class ReDrafterRanker(Ranker):
    """The recurrence runs along the true path from every root at once.

    Rank 0 at depths 1 … d means that greedy drafting (`beam_width` 1) has d tokens right: for that
    the table is exact, at any length. Wider beams compete with each other, so whether the true
    path survives does not follow from its ranks; re-draft those offline (`engine.tuning.redraft`).
    """

    needs = Needs(hidden=True)
    num_ranks = NUM_CANDIDATES

    def __init__(self, config: ReDrafterConfig, bench: Workbench, depths: int) -> None:
        if config.speculative_model is None:
            raise ConfigError("speculative_model must name the ReDrafter head, got none. Set it.")
        self._head = read_head(bench.locate(config.speculative_model), bench.target)
        self._device = bench.target.device
        self.depths = depths

    def ranks(self, reading: Reading) -> Tensor:
        assert reading.hidden is not None
        wanted = reading.true_tokens(self.depths).clamp_min(0).to(self._device)
        contexts = reading.hidden[reading.first - 1 :][: len(wanted)].to(self._device)
        roots = reading.tokens[reading.first :][: len(wanted)].to(self._device)
        parts = zip(contexts.split(ROWS), roots.split(ROWS), wanted.split(ROWS), strict=True)
        return torch.cat([self._along(*part) for part in parts]).cpu()

    def _along(self, context: Tensor, fed: Tensor, wanted: Tensor) -> Tensor:
        state = torch.zeros_like(context)
        columns = []
        for depth in range(self.depths):
            state = self._head.advance(state, fed)
            fed = wanted[:, depth]
            columns.append(rank_of(self._head.logits(context, state), fed))
        return torch.stack(columns, dim=1)


class DraftModelRanker(Ranker):
    """The draft model reads the text once; a token's rank is the same from whichever root.

    Where it would have stopped (`confidence_threshold`, the end of its context) nothing is offered.
    Exact for chains of every length.
    """

    def __init__(self, config: DraftTargetConfig, bench: Workbench, depths: int) -> None:
        if config.speculative_model is None:
            raise DrafterError("speculative_model must name the draft model, got none. Set it.")
        self._threshold = config.confidence_threshold
        self._model = bench.load(bench.resolve(bench.locate(config.speculative_model)))
        self._common = common_vocabulary(bench.target, self._model)
        self.depths = depths

    def ranks(self, reading: Reading) -> Tensor:
        last = min(len(reading.tokens) - 1, self._model.context_len)
        ranks = torch.full((len(reading.tokens),), BEYOND)
        ranks[1 : last + 1] = self._of_each(reading.tokens[: last + 1])
        roots = torch.arange(reading.text.num_roots)[:, None] + reading.first
        index = roots + torch.arange(1, self.depths + 1)
        return ranks[index.clamp_max(len(ranks) - 1)]

    def _of_each(self, tokens: Tensor) -> Tensor:
        """Rank of every token but the first, given those before it."""
        model = self._model
        cache = model.new_cache(len(tokens))
        found = []
        try:
            fed = tokens[:-1].clamp_max(model.vocab_size - 1).to(model.device)
            wanted = tokens[1:].to(model.device)
            for rows, ids in zip(fed.split(ROWS), wanted.split(ROWS), strict=True):
                chain = Proposal(rows, TreeShape.chain(len(rows) - 1))
                logits = model.verify(chain, cache, Needs()).logits[:, : self._common]
                cache.commit(tuple(range(len(rows))))
                rank = rank_of(logits, ids.clamp_max(self._common - 1))
                sure = logits.float().softmax(dim=-1).amax(dim=-1) >= self._threshold
                found.append(torch.where(sure & (ids < self._common), rank, BEYOND).cpu())
        finally:
            cache.free()
        return torch.cat(found)
