"""Finished texts to tune on: their tokens, the target's features of them, and what comes after.

A text of P prompt tokens and N output tokens has N - 1 possible roots, the outputs 0 … N - 2: with
the last output as the root the text is over. A step near the end may accept tokens that were cut
off (by EOS or a length limit), so the target writes the text a little further, greedily.

    token index     0 … P-1 | P … P+N-2 | P+N-1 | P+N …
                    prompt  | roots     | last  | tail, never recorded
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.config import Limits
from engine.errors import PromptError
from engine.model.target import Target
from engine.proposal import Needs

_CHUNK = 1024
"""Rows of a text that go through the target at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a run wrote.

    Attributes:
        output_ids: new tokens, cut as the run cut them.
        category: kind of task, e.g. a suite's category; may be empty.
        limits: the run's; look-up drafters stop drafting where they would exceed them.
        source: where it comes from, e.g. the run's id.
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


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as the target sees it; all tensors on the CPU.

    Attributes:
        tokens: `(t,)` int64: prompt, output and tail.
        context_len: the target's; no draft token may lie beyond it.
        hidden: `(rows, hidden)` last hidden states of prompt and output; None unless asked for.
        layers: `(rows, width)` inputs of the layers asked for.
    """

    text: Text
    tokens: Tensor
    context_len: int
    hidden: Tensor | None = None
    layers: Tensor | None = None

    @property
    def first(self) -> int:
        """Index in `tokens` of the first root."""
        return len(self.text.prompt_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of tokens and features."""
        tensors = (self.tokens, self.hidden, self.layers)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def true_tokens(self, depths: int) -> Tensor:
        """What a draft would have to guess: `(roots, depths)` int64; −1 where none can be drafted.

        Row r, column d − 1 is the token d places behind the r-th root. Nothing is drafted beyond
        the context, and nothing is known beyond the tail.
        """
        index = torch.arange(self.text.num_roots)[:, None] + torch.arange(1, depths + 1)
        index = index + self.first
        known = index < min(len(self.tokens), self.context_len)
        return torch.where(known, self.tokens[index.clamp_max(len(self.tokens) - 1)], -1)


@torch.inference_mode()
def read(target: Target, text: Text, needs: Needs, *, tail: int) -> Reading:
    """One forward over the whole text, and `tail` greedy tokens more (fewer at the context's end).

    Raises:
        PromptError: longer than the target's context, empty, or of another vocabulary.
    """
    ids = [*text.prompt_ids, *text.output_ids]
    _check(target, text, ids)
    cache = target.new_cache(len(ids) + tail)
    hidden: list[Tensor] = []
    layers: list[Tensor] = []
    try:
        for chunk in torch.tensor(ids).split(_CHUNK):
            output = target.prefill(chunk, cache, needs)
            if output.hidden is not None:
                hidden.append(output.hidden.cpu())
            if output.layers is not None:
                layers.append(output.layers.cpu())
        for _ in range(tail):
            ids.append(int(output.logits[-1].argmax()))
            if cache.length >= target.context_len:
                break
            output = target.prefill(ids[-1:], cache, Needs())
    finally:
        cache.free()
    return Reading(
        text,
        torch.tensor(ids),
        target.context_len,
        torch.cat(hidden) if hidden else None,
        torch.cat(layers) if layers else None,
    )


def _check(target: Target, text: Text, ids: list[int]) -> None:
    where = f" of {text.source}" if text.source else ""
    if not text.prompt_ids or not text.output_ids:
        raise PromptError(f"The text{where} must have a prompt and an output. Choose another run.")
    if len(ids) > target.context_len:
        raise PromptError(
            f"The text{where} has {len(ids)} tokens, but {target.name}'s context holds "
            f"{target.context_len}. Choose runs of this target."
        )
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < target.vocab_size:
        raise PromptError(
            f"The text{where} has token {worst}, but {target.name} has {target.vocab_size} tokens. "
            "Choose runs of this target."
        )
