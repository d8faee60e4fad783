"""PARD: a small model drafts a whole block in one forward, by mask tokens behind the text.

It is an ordinary draft model that was trained with masks: it reads K - 1 of them, and the last K
rows each predict one token, the first one at the text's end. Keys and values of masks are dropped,
those of the text stay, so every committed token is read once.

    reads   … x root mask mask mask      cache keeps … x root
    drafts          d1   d2   d3   d4    accepted d1 d2, then y: next it reads d1 d2 y mask mask …

Unlike heads it reads no features of the target: one such model serves all targets of its
vocabulary. Source: arXiv:2504.18583, section 3; AMD-AGI/PARD. Checkpoints name the mask
`pard_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters.base import BuildContext, root_only
from engine.drafters.blocks.base import AT_ONCE, BlockMethod
from engine.drafters.draft_model import DraftDevice, DraftDtype, ModelDrafter, load_draft_model
from engine.drafters.heads.checkpoint import mask_token
from engine.drafters.heads.config import beyond_transformers, check_unread
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import DraftShape, draft_len
from engine.drafters.texts import ROWS, UNRANKED, TargetTrace
from engine.model.target import Target
from engine.model.text import common_vocabulary
from engine.proposal import Budget, Needs, Proposal
from engine.tree import TreeShape, upload

_MASKS = ("pard_token", "ptd_token_id")


class PardConfig(BlockMethod):
    """Settings of PARD; named as in TensorRT-LLM.

    Of earlier texts the model keeps keys and values of 1 GiB at most (`prefixes.MAX_BYTES`).
    """

    title: ClassVar[str] = "PARD"
    summary: ClassVar[str] = (
        "A smaller model trained with mask tokens drafts a whole block in one forward."
    )
    paper: ClassVar[str | None] = "2504.18583"

    decoding_type: Literal["PARD"] = "PARD"
    speculative_model: str | None = setting(
        None,
        "PARD model",
        "a draft model trained with mask tokens: a target preset's name, a local path or a hub id",
    )
    max_draft_len: int = draft_len(12, AT_ONCE)
    draft_dtype: DraftDtype = "target"
    draft_device: DraftDevice = "target"

    def build(self, context: BuildContext) -> PardDrafter:
        return PardDrafter(self, load_draft_model(self, context), context.target)

    def draft_shape(self) -> DraftShape:
        length = self.max_draft_len
        num_nodes = self.max_total_draft_tokens if self.use_dynamic_tree else length
        return DraftShape(length, num_nodes)


class PardDrafter(ModelDrafter):
    """Fills a block behind the text, whose rows its cache keeps."""

    def __init__(self, config: PardConfig, model: Target, target: Target) -> None:
        """Raises DrafterError: the model has no mask; VocabularyError: it is of another family."""
        super().__init__(target, model)
        self._config = config
        masks = [getattr(model.config, name, None) for name in _MASKS]
        check_unread(beyond_transformers(model.config), model.name, *_MASKS)
        self._mask = mask_token((config.mask_token_id, *masks), model.name, model.vocab_size)
        self._vocabulary = Vocabulary(None, common_vocabulary(target, model))

    def _encode(self, tokens: Sequence[int]) -> list[int]:
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]

    def propose(self, budget: Budget) -> Proposal:
        """Empty where the model's context ends before the target's."""
        room = self.model.context_len - len(self.text) + 1
        length = min(self._config.max_draft_len, budget.depth, budget.nodes, room)
        if length < 1:
            return root_only(self.text[-1], self._device, "draft_context")
        self._ids += self._encode(self.text[len(self._ids) :])
        unread = torch.tensor(self._ids[self._cache.length :])
        max_rows = self._config.max_draft_len + 1
        prompt, last = unread[:-max_rows], unread[-max_rows:]
        if len(prompt):  # only its end needs logits
            self.model.prefill(upload(prompt, self.model.device), self._cache, Needs())
        rows = torch.cat([last, torch.full((length - 1,), self._mask)])
        logits = self._logits(rows, TreeShape.chain(len(rows) - 1), len(last))[len(last) - 1 :]
        return self._config.fill(self.text[-1], logits.to(self._device), self._vocabulary)

    def _logits(self, rows: Tensor, shape: TreeShape, num_committed: int) -> Tensor:
        """Logits `(rows, size)` of rows behind the cache, which keeps the first ones."""
        proposal = Proposal(upload(rows, self.model.device), shape)
        logits = self.model.verify(proposal, self._cache, Needs()).logits
        self._cache.commit(tuple(range(num_committed)))
        return logits[:, : self._vocabulary.size]

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Exact for every chain: each root has its own masks, hidden from the other roots'.

        A section of the text is a chain, and each of its rows has a branch of masks.
        """
        first, labels = trace.first, trace.true_tokens(depths)
        ranks = torch.full(labels.shape, UNRANKED)
        roots = min(len(ranks), self.model.context_len - first)
        self._cache = self.model.new_cache(len(trace.tokens))
        text = torch.tensor(self._encode(trace.tokens.tolist()))
        self.model.prefill(text[:first].to(self.model.device), self._cache, Needs())
        size = max(1, ROWS // depths)
        try:
            for begin in range(0, roots, size):
                count = min(size, roots - begin)
                shape = branched_chain(count, depths - 1)
                rows = torch.full((len(shape),), self._mask)
                rows[:count] = text[first + begin :][:count]
                logits = self._logits(rows, shape, count)
                branches = torch.arange(count, len(shape)).view(count, depths - 1)
                at = torch.cat([torch.arange(count)[:, None], branches], dim=1)
                true = labels[begin : begin + count].to(logits.device)
                true = true.clamp(0, self._vocabulary.size - 1)
                of_roots = self._vocabulary.rank_of(logits[at.to(logits.device)], true)
                ranks[begin : begin + count] = of_roots.cpu()
        finally:
            self._cache.free()
        position = torch.arange(first, first + len(ranks))[:, None] + torch.arange(1, depths + 1)
        draftable = (labels < self._vocabulary.size) & (position <= self.model.context_len)
        return torch.where(draftable, ranks, UNRANKED)


def branched_chain(length: int, branch_len: int) -> TreeShape:
    """A chain of `length` nodes, each with a branch of `branch_len` nodes.

    Example: 2 nodes, branches of 2: parents [-1, 0, 0, 2, 1, 4].
    """
    parents = list(range(-1, length - 1))
    for node in range(length):
        begin = len(parents)
        parents += [node, *range(begin, begin + branch_len - 1)][:branch_len]
    return TreeShape(parents)
