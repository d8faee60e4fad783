"""DSpark: DFlash's block, and a small head that conditions every position on the token before it.

DFlash's positions are independent, so the end of a block fits its beginning less and less. Here the
forward is the same, and a low-rank matrix of token pairs then corrects the block from left to
right: base logits of position k plus those of tokens that follow the token at position k - 1.

    block    root mask mask mask      one forward, as DFlash; the root's row says the first token
    base       U1   U2   U3   U4
    drafts     d1   d2   d3   d4      d2 by U2 + W2 · W1[d1], d3 by U3 + W2 · W1[d2], …

A tree is expanded by confidence as EAGLE-2's. The head that predicts acceptance is ignored:
`drafting: auto` sizes drafts by the tokens' own probabilities.
Source: arXiv:2607.05147, section 3; layouts of deepseek-ai (DeepSpec) and of speculators.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from engine.drafters.base import BuildContext
from engine.drafters.blocks.dflash import DFlashDrafter, DFlashModel, FeatureBlockMethod
from engine.drafters.eagle.trees import DynamicTree
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.vocabulary import Vocabulary
from engine.proposal import Budget, Proposal


class DSparkConfig(FeatureBlockMethod):
    """Settings of DSpark; named as in TensorRT-LLM."""

    title = "DSpark"
    summary = (
        "DFlash's block with a small head beside it, so that every drafted token follows from the "
        "one before."
    )
    paper = "2607.05147"

    decoding_type: Literal["DSpark"] = "DSpark"

    def build(self, context: BuildContext) -> DSparkDrafter:
        return DSparkDrafter(self, self.checkpoint(context))


class MarkovHead(nn.Module):
    """Logits `(n, size)` that tokens add to those of the next position.

    `gated` weighs them by the position's hidden vector, `rnn` has a state over several tokens.
    """

    def __init__(self, kind: str, vocab: int, size: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        self.kind = kind

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and next state, of `tokens (n,)` before the positions of `hidden (n, width)`."""
        latent = self.markov_w1(tokens)
        if self.kind == "gated":
            latent = latent * self.gate_proj(torch.cat([hidden, latent], dim=-1)).sigmoid()
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, latent, hidden], dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = gate.sigmoid()
            state, latent = gate * state + (1 - gate) * candidate.tanh(), out.tanh()
        return self.markov_w2(latent), state


class _Block:
    """A block as a `TreeSource`: outputs are the Markov head's states."""

    def __init__(
        self, head: MarkovHead, vocabulary: Vocabulary, hidden: Tensor, base: Tensor, root: int
    ) -> None:
        self.head, self.vocabulary, self.hidden, self.base = head, vocabulary, hidden, base
        start = base.new_zeros(1, head.markov_w1.embedding_dim)
        token = torch.full((1,), root, device=base.device)
        added, self.output = head(token, hidden[:1], start)
        self.logits = base[:1] + added

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        position = self.hidden[depth].expand(len(tokens), -1)
        added, state = self.head(tokens, position, hidden)
        return state, self.base[depth] + added


class DSparkDrafter(DFlashDrafter):
    """Fills a block as DFlash does, then corrects it from left to right.

    Raises DrafterError: it is no DSpark model, or one for another target.
    """

    from_anchor = True

    def _network(self, checkpoint: HeadCheckpoint, model: DFlashModel) -> DFlashModel:
        rank = checkpoint.size("markov_head.markov_w1.weight", 1)
        checkpoint.agree(markov_rank=rank, dspark_markov_rank=rank)
        sizes = (self._target.vocab_size, self._vocabulary.size, rank, self._target.hidden_size)
        model.markov_head = MarkovHead(checkpoint.config.markov_head_type, *sizes)
        return model

    def _drafted(self, outputs: Tensor, root: int, budget: Budget) -> Proposal:
        config, head = self.config, self._model.markov_head
        assert isinstance(head, MarkovHead)
        block = _Block(head, self._vocabulary, outputs, self._logits(outputs), root)
        top_k, levels = config.top_k(self._vocabulary), len(outputs)
        keep = config.max_total_draft_tokens if config.use_dynamic_tree else levels
        return DynamicTree(top_k, levels, keep, top_k).expand(block, root, budget)
