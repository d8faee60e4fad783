"""A draft model of any vocabulary: it continues the text, and what it wrote is tokenized again.

    target's tokens    … "fast" "er" | root " than"
    the model's        … "faster" " than"            reads the same text in tokens of its own
    it writes          " the" " speed" " of"
    drafts             " thes" …                      that text in the target's tokens

Any model can draft for any target, and unlike drafting by shared tokens it says whatever it likes.
Lossless: drafts follow from the committed text alone; the target verifies its own tokens.
Source: transformers' universal assisted generation (`assistant_tokenizer`);
arXiv:2502.05202, Alg. 2.
"""

from __future__ import annotations

import torch

from engine.drafters.base import Drafter, Start, root_only
from engine.metrics import common_len
from engine.model.target import Target
from engine.model.text import REPLACEMENT, Retokenizer
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape, upload

WINDOW = 64
"""Tokens of the text's end that are tokenized anew at every step, at least."""
CONTEXT = 10
"""Tokens before the draft that its text is joined to, so that tokens form as they would have."""


class TextDrafter(Drafter):
    """Drafts a chain with a model that shares no more with the target than the text.

    Its cache keeps what is the same in its tokens from step to step.
    """

    def __init__(
        self, target: Target, model: Target, max_draft_len: int, confidence_threshold: float
    ) -> None:
        """Raises VocabularyError: a model has no tokenizer."""
        self._device, self._model = target.device, model
        self._to_model, self._to_target = Retokenizer(target, model), Retokenizer(model, target)
        self._length, self._threshold = max_draft_len, confidence_threshold
        self._ends = self._to_target.special | model.eos_ids
        self._cache, self._keeps = model.new_cache(0), False

    def start(self, start: Start) -> None:
        super().start(start)
        rows = min(len(self.text) + 512, self._model.context_len)
        self._cache = self._model.new_cache(rows, rewinds=self._length + 2)
        self._fed: list[int] = []
        self._settled: list[int] = []
        self._num_settled = 0
        self._keeps = start.num_cached is not None
        ids = self._translated()
        if self._keeps and ids:
            self._model.prefixes.restore(ids, self._cache)
            self._fed = ids[: self._cache.length]

    def propose(self, max_depth: int) -> Proposal:
        """Nothing inside a character of several tokens, and where the model's context ends."""
        ids = self._translated()
        room = self._model.context_len - len(ids) + 1
        length = min(self._length, room)
        drafted: list[int] = []
        if ids and length > 0 and max_depth > 0:
            written = self._written(ids, length)
            drafted = self._to_target.continued(ids[-CONTEXT:], written, self.text[-CONTEXT:])
        if not drafted:
            return root_only(
                self.text[-1], self._device, "no_text" if room > 0 else "draft_context"
            )
        tokens = torch.tensor([self.text[-1], *drafted[:max_depth]])
        return Proposal(upload(tokens, self._device), TreeShape.chain(len(tokens) - 1))

    def _translated(self) -> list[int]:
        """The text in the model's tokens; none where it ends inside a character."""
        end = len(self.text) - WINDOW
        if end - self._num_settled >= WINDOW:
            while self._to_model.text(self.text[self._num_settled : end])[-1:] == REPLACEMENT:
                end -= 1
            self._settled += self._to_model(self.text[self._num_settled : end])
            self._num_settled = end
        tail = self.text[self._num_settled :]
        if self._to_model.text(tail)[-1:] == REPLACEMENT:
            return []
        return [*self._settled, *self._to_model(tail)]

    def _written(self, ids: list[int], length: int) -> list[int]:
        """Up to so many tokens that the model writes after these, special ones left out."""
        self._cache.truncate(common_len(self._fed, ids[:-1]))
        device, written = self._model.device, list[int]()
        feed = upload(torch.tensor(ids[self._cache.length :]), device)
        if not self._threshold:
            found = self._model.draft_chain(feed, self._cache, length)
            if found is not None:
                written = found[0].tolist()
                self._fed = [*ids, *written[:-1]]
                ends = (i for i, one in enumerate(written) if one in self._ends)
                return written[: next(ends, len(written))]
        while len(written) < length:
            logits = self._model.prefill(feed, self._cache, Needs()).logits[-1]
            token = int(logits.argmax())
            sure = not self._threshold or float(logits.float().softmax(-1)[token])
            if sure < self._threshold or token in self._ends:
                break
            written.append(token)
            feed = upload(torch.tensor([token]), device)
        self._fed = [*ids, *written][: self._cache.length]
        return written

    def finish(self) -> None:
        if self._keeps:
            self._model.prefixes.keep(self._fed, self._cache)
        self._keeps = False
        self._cache.free()
        self._fed = []
