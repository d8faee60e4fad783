"""Token recycling: drafts from the target's last top-k predictions after every token.

An adjacency matrix holds, for each token of the vocabulary, the target's k best next tokens at its
last occurrence. A static choice tree of ranks is filled from the matrix breadth first from the
root; after verification every row of the forward, rejected ones too, updates the row of its token.
Nothing is trained, and the matrix takes vocabulary · k integers. The tokens that followed a token
in the prompt come first in its row; the target's own predictions there would take a product with
its output matrix per token, which does not pay off.

Worked example, k = 2, matrix rows 5 → [7, 8], 7 → [9, 5], root 5, choice tree [0], [1], [0, 1]:
the draft tree is 7 and 8 below the root, and 5 below 7. With row 7 unknown it ends at 7 and 8.

Lossless under sampling: the matrix, and so the tree, is fixed by the texts and forwards before the
step's random draws.
Source: arXiv:2408.08696, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start, Traits
from engine.drafters.lookup.paths import most_probable_tree
from engine.drafters.method import ChoiceLimits, MethodConfig
from engine.kernels.cpu.operators import topk
from engine.metrics import common_len
from engine.proposal import Budget, Outcome, Proposal
from engine.tree import ChoicePaths, ChoiceTree, upload

RANK_PROBS = (0.45, 0.14, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Approximate frequency of each rank of the true token, at any depth; shapes the default tree."""
UNKNOWN = -1
"""An entry without a successor so far; never drafted."""


class TokenRecyclingConfig(MethodConfig):
    """Settings of token recycling.

    The matrix takes 8 bytes · vocabulary · `matrix_top_k`.
    """

    title = "Token recycling"
    summary = (
        "Fills a static tree from a matrix that holds, for each token, the tokens that "
        "the target last ranked highest after it. No weights."
    )
    paper = "2408.08696"
    main_settings = "drafting recycling_choices matrix_top_k"

    decoding_type: Literal["Token_Recycling"] = "Token_Recycling"
    matrix_top_k: int = setting(
        8,
        "Successors per token",
        "successors kept per token; ranks of the tree are below this",
        ge=1,
        le=32,
    )
    recycling_choices: ChoicePaths = setting(
        most_probable_tree(40, [RANK_PROBS] * 40).paths,
        "Choice tree",
        "choice tree: paths of ranks; all candidates, or only the ends of paths",
    )

    @model_validator(mode="after")
    def _ranks_fit(self) -> TokenRecyclingConfig:
        ChoiceTree(self.recycling_choices).check_fits(
            depth=len(self.recycling_choices),
            ranks=self.matrix_top_k,
            what=f"matrix_top_k = {self.matrix_top_k}",
        )
        return self

    def choice_limits(self, locate: Callable[[str], str]) -> ChoiceLimits:
        return ChoiceLimits(ranks=self.matrix_top_k, what=f"matrix_top_k = {self.matrix_top_k}")

    def build(self, context: BuildContext) -> TokenRecyclingDrafter:
        return TokenRecyclingDrafter(context, self)


class TokenRecyclingSession(DraftSession["TokenRecyclingDrafter"]):
    def __init__(self, drafter: TokenRecyclingDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self._num_read = 0

    def read(self) -> None:
        """Take in what followed each token, where the target's predictions are not known."""
        log, drafter = self.log, self.drafter
        if not self._num_read:
            known = common_len(drafter.last_text, self.text) if log.num_cached else 0
            drafter.recycle(log.prompt_ids[max(0, known - 1) :])
            if log.prompt_logits is not None and len(log.prompt_logits):
                drafter.write(log.prompt_ids[-1:], log.prompt_logits)
            self._num_read = log.num_prompt + 1
        drafter.recycle(self.text[self._num_read - 1 :])
        self._num_read = len(self.text)

    def propose(self, budget: Budget) -> Proposal:
        self.read()
        drafter, tree = self.drafter, self.drafter.tree
        tokens = torch.full((len(tree) + 1,), self.root, device=drafter.device)
        for begin, end, parents, ranks in drafter.levels:
            tokens[begin:end] = drafter.matrix[tokens[parents], ranks]
        proposal = Proposal(tokens, tree.shape, ranks=tree.ranks)
        nodes = [node for node, token in enumerate(tokens.tolist()) if token != UNKNOWN]
        return proposal if len(nodes) == len(tokens) else proposal.keep(nodes)

    def observe(self, outcome: Outcome) -> None:
        if not len(outcome.output.logits):
            return
        tokens = outcome.tokens()
        self.drafter.write(tokens, outcome.output.logits[: len(tokens)], outcome.path)
        self._num_read = len(self.text)

    def close(self) -> None:
        self.read()
        self.drafter.last_text = self.text


class TokenRecyclingDrafter(Drafter):
    session = TokenRecyclingSession
    traits = Traits(remembers=True)

    def __init__(self, context: BuildContext, config: TokenRecyclingConfig) -> None:
        self.device = context.target.device
        self.tree = ChoiceTree(config.recycling_choices)
        self.levels = _levels(self.tree, self.device)
        # Without successors at first; its last row is that of `UNKNOWN` itself.
        shape = context.target.vocab_size + 1, config.matrix_top_k
        self.matrix = torch.full(shape, UNKNOWN, device=self.device)
        self.last_text: list[int] = []

    def write(self, ids: Sequence[int], logits: Tensor, path: Sequence[int] = ()) -> None:
        """Replace the rows of n tokens by the best of `logits` `(n, vocab)`.

        Where a token occurs in several rows, one on the accepted path wins, then the last one.
        """
        best = topk(logits, self.matrix.shape[1], with_logsumexp=False).ids
        # For few tokens a dictionary is faster than tensors.
        rows = dict(zip(ids, range(len(ids)), strict=True))
        rows |= {ids[node]: node for node in path}
        pair = upload(torch.tensor([list(rows), list(rows.values())]), self.device)
        self.matrix[pair[0]] = best[pair[1]]

    def recycle(self, tokens: Sequence[int]) -> None:
        """Put the successors of each token first in its row, the latest foremost.

        Example: k = 3, tokens 5 7 5 8, row 5 → [9, 7, 1]: row 5 becomes [8, 7, 9].
        """
        successors: dict[int, dict[int, None]] = {}
        for token, after in pairwise(tokens):
            own = successors.setdefault(token, {})
            own.pop(after, None)
            own[after] = None
        if not successors:
            return
        index = upload(torch.tensor(list(successors)), self.device)
        rows = self.matrix[index].tolist()
        for own, row in zip(successors.values(), rows, strict=True):
            # Unknown entries are at the end of a row, and stay there.
            ids = list(dict.fromkeys([*reversed(own), *row]))[: len(row)]
            row[:] = ids + [UNKNOWN] * (len(row) - len(ids))
        self.matrix[index] = upload(torch.tensor(rows), self.device)


def _levels(tree: ChoiceTree, device: torch.device) -> list[tuple[int, int, Tensor, Tensor]]:
    """Per depth: the nodes `begin … end - 1`, their parents and their ranks."""
    depths = tree.shape.depths.tolist()
    levels = []
    for depth in range(1, tree.depth + 1):
        begin = depths.index(depth)
        end = begin + depths.count(depth)
        pair = torch.tensor([tree.shape.parents[begin:end], tree.ranks[begin:end]])
        levels.append((begin, end, *upload(pair, device)))
    return levels
