"""A draft model with any vocabulary: it continues the text, and its output is retokenized.

    target's tokens    … "fast" "er" | root " than"
    the model's        … "faster" " than"            the same text in its own tokens
    its output         " the" " speed" " of"
    drafts             " thes" …                     that text in the target's tokens

Any model can draft for any target, with its whole vocabulary.
Lossless: drafts follow from the committed text alone; the target verifies its own tokens.
Source: transformers' universal assisted generation (`assistant_tokenizer`);
arXiv:2502.05202, Alg. 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.drafters.base import Start, root_only
from engine.drafters.draft_model import ModelDrafter
from engine.metrics import common_len
from engine.model.target import Target
from engine.model.text import REPLACEMENT, Retokenizer
from engine.proposal import Budget, Needs, Proposal
from engine.steps import Bypass
from engine.tree import TreeShape, upload

WINDOW = 64
"""The last tokens, at least this many, are retokenized at every step."""
CONTEXT = 10
"""Tokens of context with which the draft's text is retokenized."""


class TextDrafter(ModelDrafter):
    """Drafts a chain with a model that shares only the text with the target.

    Its cache keeps the prefix that its tokens have in common from step to step.
    """

    def __init__(
        self, target: Target, model: Target, max_draft_len: int, confidence_threshold: float
    ) -> None:
        """Raises VocabularyError: a model has no tokenizer."""
        super().__init__(target, model, rewinds=max_draft_len + 2)
        self._to_model, self._to_target = Retokenizer(target, model), Retokenizer(model, target)
        self._length, self._threshold = max_draft_len, confidence_threshold
        self._ends = self._to_target.special | model.eos_ids

    def start(self, start: Start) -> None:
        self._settled: list[int] = []
        self._num_settled = 0
        super().start(start)
        self._ids = self._ids[: self._cache.length]

    def propose(self, budget: Budget) -> Proposal:
        """Empty within a character of several tokens, and at the end of the model's context."""
        ids = self._encode(self.text)
        room = self.model.context_len - len(ids) + 1
        length = min(self._length, room, budget.depth, budget.nodes)
        drafts: list[int] = []
        if ids and length > 0:
            continuation = self._continuation(ids, length)
            drafts = self._to_target.continued(ids[-CONTEXT:], continuation, self.text[-CONTEXT:])
        if not drafts:
            bypass: Bypass = "no_text" if room > 0 else "draft_context"
            return root_only(self.text[-1], self._device, bypass)
        tokens = torch.tensor([self.text[-1], *drafts[: budget.depth]])
        return Proposal(upload(tokens, self._device), TreeShape.chain(len(tokens) - 1))

    def _encode(self, tokens: Sequence[int]) -> list[int]:
        """The text in the model's tokens; empty where it ends within a character."""
        end = len(tokens) - WINDOW
        if end - self._num_settled >= WINDOW:
            while self._to_model.text(tokens[self._num_settled : end])[-1:] == REPLACEMENT:
                end -= 1
            self._settled += self._to_model(tokens[self._num_settled : end])
            self._num_settled = end
        tail = tokens[self._num_settled :]
        if self._to_model.text(tail)[-1:] == REPLACEMENT:
            return []
        return [*self._settled, *self._to_model(tail)]

    def _continuation(self, ids: list[int], length: int) -> list[int]:
        """Up to `length` tokens that the model generates after these, without special ones."""
        self._cache.truncate(common_len(self._ids, ids[:-1]))
        device, tokens = self.model.device, list[int]()
        inputs = upload(torch.tensor(ids[self._cache.length :]), device)
        if not self._threshold:
            drafts = self.model.draft_chain(inputs, self._cache, length)
            tokens = (self._chain(inputs, length) if drafts is None else drafts[0]).tolist()
            self._ids = [*ids, *tokens[:-1]]
            ends = (i for i, token in enumerate(tokens) if token in self._ends)
            return tokens[: next(ends, len(tokens))]
        while len(tokens) < length:
            logits = self.model.prefill(inputs, self._cache, Needs()).logits[-1]
            best = logits.float().softmax(dim=-1).max(dim=-1)
            confidence, token = torch.stack([best.values.double(), best.indices.double()]).tolist()
            if confidence < self._threshold or token in self._ends:
                break
            tokens.append(int(token))
            inputs = upload(torch.tensor([int(token)]), device)
        self._ids = [*ids, *tokens][: self._cache.length]
        return tokens

    def _chain(self, inputs: Tensor, length: int) -> Tensor:
        """`length` greedy tokens; the host reads none before the last."""
        drafts: list[Tensor] = []
        for _ in range(length):
            logits = self.model.prefill(inputs, self._cache, Needs()).logits[-1:]
            inputs = logits.argmax(dim=-1)
            drafts.append(inputs)
        return torch.cat(drafts)
