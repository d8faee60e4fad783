"""Records of a generation: one prefill, one record per step, one end.

Plain immutable values without tensors, read by the page, the database, the command line and the
what-if, so that nothing is measured twice. Seconds are wall-clock seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""`context`: the model's context is full; `cancelled`: the user stopped the run."""
Bypass = Literal[
    "no_match", "unsure", "draft_context", "no_text", "room", "grammar", "not_worth_it"
]
"""Why a step drafted nothing."""
BYPASSES: dict[str, str] = {
    "no_match": "the drafter found nothing to propose",
    "unsure": "the draft model was not sure enough of a token",
    "draft_context": "the text is longer than the draft model's context",
    "no_text": "the draft model wrote nothing that the target's tokens can spell",
    "room": "the length limit leaves no room for a draft",
    "grammar": "structured output forbids the whole draft",
    "not_worth_it": "drafting would not have paid off",
}
"""The reasons in words."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt was read and the first token committed; not a step."""

    token_id: int
    num_prompt_tokens: int
    ttft_s: float
    """Request in the engine → first commit."""
    num_cached: int = 0
    """Prompt tokens that were in the cache already, from an earlier run."""


@dataclass(frozen=True, slots=True)
class Step:
    """One draft → verify → accept → commit.

    Per node (index 0 is the root, which was committed by the step before): `tokens`, `parents`
    (-1 for the root), `ranks` (the drafter's rank among its siblings' candidates), `draft_probs`
    (None where the drafter has no probability), `target_probs` (probability of the node's token
    under the target's untempered softmax at its parent; None for the root).
    """

    index: int
    context_len: int
    """Tokens in the target's cache before this step; the root's position."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    draft_probs: tuple[float | None, ...]
    target_probs: tuple[float | None, ...]
    accepted: tuple[int, ...]
    """Accepted nodes in path order, root excluded."""
    bonus: int
    """The token the target adds after the accepted path: the next root."""
    num_committed: int
    """New tokens this step added to the output, after any cut by EOS, stop string or length."""
    num_extra_rows: int
    """Rows of the verify forward that were not draft tokens (lookahead's window)."""
    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    at_s: float
    """Request in the engine → this step's commit."""
    decision: str = ""
    """The controller's decision for this step, for readers; empty where drafts are as set."""
    expected: tuple[float, float] | None = None
    """The controller's estimate of tokens committed and seconds taken, made before the step."""
    bypass: Bypass | None = None
    """Why nothing was drafted; None where something was, and for plain decoding."""
    num_cut: int = 0
    """Draft tokens that the grammar forbids, cut before verification; not among `tokens`."""
    num_forced: int = 0
    """Nodes at the end that were added because the grammar leaves no other token."""
    rollback_s: float = 0.0
    """Part of `other_s`: rolling recurrent states back to the accepted path; 0 without recurrent
    layers."""

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

    @property
    def committed(self) -> tuple[int, ...]:
        """Tokens appended by this step before any cut: accepted path, then bonus."""
        return (*(self.tokens[node] for node in self.accepted), self.bonus)

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True)
class End:
    """The generation is over."""

    output_ids: tuple[int, ...]
    """New tokens only, cut at EOS and stop tokens (kept), stop strings (their last token kept) and
    length."""
    finish_reason: FinishReason
    num_steps: int


Record = Prefill | Step | End
