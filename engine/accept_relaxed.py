"""Relaxed acceptance: while a reasoning model thinks, any plausible draft token will do. Lossy.

Source: TensorRT-LLM's MTP (`use_relaxed_acceptance_for_thinking`), documented in its blog "DeepSeek
R1 MTP Implementation and Optimization"; tensorrt_llm/_torch/speculative/mtp.py and mtpKernels.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.accept import Acceptance, Lossless, Verified
from engine.sampling import Draws, probabilities


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Accepts a draft token among the target's best `topk` that is at most `delta` less likely.

    A token passes if it is the argmax, or one of the `topk` likeliest with
    p(token) >= p(argmax) - delta, p the target's untempered softmax at the parent. Of several
    passing children the likeliest is followed. The token after the path is the target's own.
    Outside the thinking phase `strict` decides.

    Example: p = 0.5, 0.3, 0.2 for tokens 7, 8, 9; topk 2, delta 0.25: 7 and 8 pass, 9 does not;
    with delta 0.1 only 7 does.

    Attributes:
        thinking: asked once per step; the phase changes between steps only.
    """

    strict: Lossless
    topk: int
    delta: float
    thinking: Callable[[], bool]

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance:
        if not self.thinking():
            return self.strict(verified, draws)
        probs = verified.logits.float().softmax(dim=-1)
        best = probs.topk(min(self.topk, probs.shape[-1]), dim=-1)
        passing = [
            [t for t, p in zip(ids, ps, strict=True) if t == ids[0] or p >= ps[0] - self.delta]
            for ids, ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        at = 0
        path: list[int] = []
        while True:
            child_of = {verified.tokens[c]: c for c in verified.shape.children[at]}
            match = [child_of[token] for token in passing[at] if token in child_of]
            if not match:
                last = probabilities(verified.logits[at], self.strict.sampling)
                return Acceptance(tuple(path), draws.pick(last))
            at = match[0]
            path.append(at)


class ThinkingPhase:
    """Whether a text is between the tokens that begin and end a model's thinking.

    Attributes:
        active: the answer for the text so far.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.active = False
        self._begin = begin
        self._end = end

    def read(self, tokens: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        for token in tokens:
            if token in (self._begin, self._end):
                self.active = token == self._begin
