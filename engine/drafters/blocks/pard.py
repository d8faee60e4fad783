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

from typing import Literal

import torch

from engine.config import setting
from engine.drafters.base import BuildContext, root_only
from engine.drafters.blocks.base import AT_ONCE, BlockMethod
from engine.drafters.draft_target import DraftModelMethod, ModelDrafter, ModelSession
from engine.drafters.heads.checkpoint import mask_token
from engine.drafters.heads.config import beyond_transformers, check_unread
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import draft_len
from engine.model.target import Target
from engine.model.text import common_vocabulary
from engine.proposal import Budget, Needs, Proposal
from engine.tree import TreeShape, upload

_MASKS = ("pard_token", "ptd_token_id")


class PardConfig(BlockMethod, DraftModelMethod):
    """Settings of PARD; named as in TensorRT-LLM.

    Of earlier texts the model keeps keys and values of 1 GiB at most (`prefixes.MAX_BYTES`).
    """

    title = "PARD"
    summary = "A smaller model trained with mask tokens drafts a whole block in one forward."
    paper = "2504.18583"

    decoding_type: Literal["PARD"] = "PARD"
    speculative_model: str | None = setting(
        None,
        "PARD model",
        "a draft model trained with mask tokens: a target preset's name, a local path or a hub id",
    )
    max_draft_len: int = draft_len(12, AT_ONCE)

    def build(self, context: BuildContext) -> PardDrafter:
        return PardDrafter(self, self.load(context), context.target)


class PardSession(ModelSession["PardDrafter"]):
    """Fills a block behind the text, whose rows its cache keeps."""

    def propose(self, budget: Budget) -> Proposal:
        """Empty where the model's context ends before the target's."""
        drafter, model = self.drafter, self.drafter.model
        room = model.context_len - len(self.text) + 1
        length = min(drafter.config.max_draft_len, budget.depth, room)
        if length < 1:
            return root_only(self.root, drafter.device, "draft_context")
        self.read()
        unread = torch.tensor(self._ids[self.cache.length :])
        max_rows = drafter.config.max_draft_len + 1
        prompt, last = unread[:-max_rows], unread[-max_rows:]
        if len(prompt):  # only its end needs logits
            model.prefill(upload(prompt, model.device), self.cache, Needs())
        rows = torch.cat([last, torch.full((length - 1,), drafter.mask)])
        block = Proposal(upload(rows, model.device), TreeShape.chain(len(rows) - 1))
        logits = model.verify(block, self.cache, Needs()).logits
        self.cache.commit(tuple(range(len(last))))
        logits = logits[len(last) - 1 :, : drafter.vocabulary.size].to(drafter.device)
        return drafter.config.fill(self.root, logits, drafter.vocabulary)


class PardDrafter(ModelDrafter):
    session = PardSession

    def __init__(self, config: PardConfig, model: Target, target: Target) -> None:
        """Raises DrafterError: the model has no mask; VocabularyError: it is of another family."""
        super().__init__(target, model)
        self.config = config
        masks = [getattr(model.config, name, None) for name in _MASKS]
        check_unread(beyond_transformers(model.config), model.name, *_MASKS)
        self.mask = mask_token((config.mask_token_id, *masks), model.name, model.vocab_size)
        self.vocabulary = Vocabulary(None, common_vocabulary(target, model))
