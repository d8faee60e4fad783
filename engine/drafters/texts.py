"""Finished texts that drafters are tuned on: the target's features and the ranks of their tokens.

A text of P prompt tokens and N output tokens has N - 1 possible roots, the outputs 0 … N - 2: the
text ends at the last output. A step near the end may accept tokens that were cut off (by EOS or a
length limit), so the target continues the text by a few greedy tokens, the tail.

    token index     0 … P-1 | P … P+N-2 | P+N-1 | P+N …
                    prompt  | roots     | last  | tail, never recorded

A drafter ranks the true tokens of all roots in one batch. The ranks are those of decoding, because
each method's draft at depth d depends only on the features up to the root and on the path to the
node. In float32 a rank differs only where two logits agree to the last bits; in half precision a
batch of another shape rounds differently, and ties are common.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.config import Limits

MAX_LOGIT_ROWS = 128
"""The most positions whose full-vocabulary logits are in memory at a time."""
UNRANKED = 1 << 30
"""Rank of a token that the drafter cannot draft."""


@dataclass(frozen=True, slots=True)
class Text:
    """A run's prompt and output, cut at the end of the text; `source` is the run's id.

    Lookup drafters do not draft beyond the run's `limits`.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    category: str = ""
    limits: Limits = field(default_factory=Limits)
    source: str = ""

    @property
    def num_roots(self) -> int:
        """Outputs that can be the root of a step."""
        return max(0, len(self.output_ids) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class TargetTrace:
    """The target's features along a text; all tensors on the CPU.

    Attributes:
        tokens: `(t,)` int64: prompt, output and tail.
        hidden: `(rows, hidden)` last hidden states of prompt and output; None if not needed.
        layers: `(rows, width)` inputs of the needed layers, likewise.
    """

    text: Text
    tokens: Tensor
    context_len: int
    hidden: Tensor | None = None
    layers: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """`(rows, width)` that the drafter needs."""
        features = self.hidden if self.layers is None else self.layers
        assert features is not None, "the drafter needs no features"
        return features

    @property
    def first(self) -> int:
        """Index in `tokens` of the first root."""
        return len(self.text.prompt_ids)

    def true_tokens(self, depths: int) -> Tensor:
        """The tokens after each root: `(roots, depths)` int64; −1 where nothing can be drafted.

        Row r, column d − 1 is the token d positions after the r-th root. Drafts end at the end of
        the context, and the text at the end of the tail.
        """
        index = torch.arange(self.text.num_roots)[:, None] + torch.arange(1, depths + 1)
        index = index + self.first
        inside = index < min(len(self.tokens), self.context_len)
        return torch.where(inside, self.tokens[index.clamp_max(len(self.tokens) - 1)], -1)

    def hidden_before_roots(self) -> Tensor:
        """`(roots, hidden)` the last hidden state from which each root was predicted."""
        assert self.hidden is not None
        return self.hidden[self.first - 1 :][: self.text.num_roots]


def rank_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Rank of each of `token_ids (…)` by `logits (…, vocab)`, then by id.

    Example: logits 1 3 2 3, token 3 → 1, because token 1 ties and has the lower id.
    """
    token_logits = logits.gather(-1, token_ids[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    is_tie_before = (logits == token_logits) & (ids < token_ids[..., None])
    before = (logits > token_logits) | is_tie_before
    return before.sum(dim=-1)
