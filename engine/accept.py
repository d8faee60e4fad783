"""Which draft tokens are kept: pure functions from the target's logits to an accepted path.

A rule looks at one verified draft tree and returns the accepted path and the token that the target
adds after it. The greedy and the lossless rule reproduce the target exactly; typical and relaxed
acceptance trade that for length and are lossy by design.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import Sampling
from engine.proposal import DraftDists
from engine.sampling import Draws, probabilities
from engine.tree import TreeShape


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted nodes in path order (root excluded), and the next root."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft tree and what the target says at each of its nodes.

    Attributes:
        tokens: token of each of the n nodes.
        logits: `(n, vocab)`; row i is the target's view after node i.
        dists: distributions of sampled drafts, None for deterministic ones.
        best: `(n,)` argmax of the logits, where it is known.
    """

    tokens: Sequence[int]
    shape: TreeShape
    logits: Tensor
    dists: DraftDists | None = None
    best: Tensor | None = None


class Rule(Protocol):
    """Decides the accepted path of one verified tree."""

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance: ...


def greedy(verified: Verified, draws: Draws | None = None) -> Acceptance:
    """Follow the child whose token is the target's argmax until there is none.

    Example: root's argmax 7, children of the root carry 5 and 7 (node 2); node 2's argmax 9 and no
    child carries 9 → path (2,), next token 9.
    """
    best_at = _argmax_by_row(verified)
    at = 0
    path: list[int] = []
    while True:
        best = best_at(at)
        match = [c for c in verified.shape.children[at] if verified.tokens[c] == best]
        if not match:
            return Acceptance(tuple(path), best)
        at = match[0]
        path.append(at)


def _argmax_by_row(verified: Verified) -> Callable[[int], int]:
    """Argmax of a row when it is asked for.

    On the CPU only the rows on the path are searched, because an argmax over a vocabulary costs as
    much as the rest of accepting; on a device all at once, for one synchronisation.
    """
    logits = verified.logits
    if verified.best is None and logits.device.type == "cpu":
        return lambda row: int(logits[row].argmax())
    best = logits.argmax(dim=-1) if verified.best is None else verified.best
    found: list[int] = best.tolist()
    return found.__getitem__


@dataclass(frozen=True, slots=True)
class Lossless:
    """Rejection sampling over the tree: the output follows the target's distribution exactly.

    Deterministic drafts are point masses: child x is accepted with probability target_probs[x];
    after a rejection its mass is removed and the rest renormalised. Sampled drafts use the
    recursive residual scheme: accept x with min(1, target_probs[x] / draft_probs[x]); after a
    rejection target_probs becomes max(target_probs - draft_probs, 0) renormalised and x leaves
    draft_probs (the children were drawn without replacement).
    Source: arXiv:2211.17192, Alg. 1 (chain); arXiv:2305.09781, Alg. 2 and arXiv:2401.15077 (tree).
    """

    sampling: Sampling

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance:
        if self.sampling.greedy and verified.dists is None:
            return greedy(verified)
        at = 0
        path: list[int] = []
        while True:
            target_probs = probabilities(verified.logits[at], self.sampling)
            child, target_probs = self._accept_child(verified, at, target_probs, draws)
            if child is None:
                return Acceptance(tuple(path), draws.pick(target_probs))
            at = child
            path.append(at)

    @staticmethod
    def _accept_child(
        verified: Verified, at: int, target_probs: Tensor, draws: Draws
    ) -> tuple[int | None, Tensor]:
        """The accepted child of node `at`, or None and what is left of the target's probability."""
        dists = verified.dists
        sampled = dists is not None and at in dists.row_of_parent
        draft_probs = dists.probs[dists.row_of_parent[at]].clone() if dists and sampled else None
        for child in verified.shape.children[at]:
            token = verified.tokens[child]
            drawn = draws.uniform()
            if draft_probs is None:
                if drawn < float(target_probs[token]):
                    return child, target_probs
                target_probs = _without(target_probs, token)
            else:
                chance = float(draft_probs[token])
                if chance > 0 and drawn * chance < float(target_probs[token]):
                    return child, target_probs
                if chance > 0:
                    target_probs = _residual(target_probs, draft_probs)
                draft_probs = _without(draft_probs, token)
        return None, target_probs


def _without(probs: Tensor, token: int) -> Tensor:
    """`probs` with one token's mass removed, renormalised; unchanged if nothing else has mass."""
    rest = probs.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else probs


def _residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(target - draft, 0) renormalised.

    Where rounding leaves nothing, the two agree and a rejection had probability zero: keep target.
    """
    rest = (target_probs - draft_probs).clamp_min(0.0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


@dataclass(frozen=True, slots=True)
class Typical:
    """Medusa's typical acceptance, deterministic variant. Lossy.

    Child c is accepted if p(c) > min(posterior_threshold, posterior_alpha · exp(-H)), with p the
    target's softmax at the parent and `temperature`, H its entropy. The longest accepted path
    wins, ties by the larger sum of log p; the next root is the plain argmax.
    Source: arXiv:2401.10774, section 2.3.1.
    """

    temperature: float
    posterior_threshold: float
    posterior_alpha: float

    def __call__(self, verified: Verified, draws: Draws | None = None) -> Acceptance:
        child_probs, bar = self.judge(verified)
        passes = (child_probs > bar).tolist()
        log_probs = child_probs.log().tolist()
        best, best_score = 0, (0, 0.0)
        scores = {0: best_score}
        for node, parent in enumerate(verified.shape.parents):
            if node and parent in scores and passes[node - 1]:
                depth, total = scores[parent]
                scores[node] = (depth + 1, total + log_probs[node - 1])
                if scores[node] > best_score:
                    best, best_score = node, scores[node]
        next_token = int(verified.logits[best].argmax())
        return Acceptance(verified.shape.path_to(best), next_token)

    def judge(self, verified: Verified) -> tuple[Tensor, Tensor]:
        """Of nodes 1 … n-1, `(n - 1,)` float32: the token's probability and its bar."""
        parents = torch.tensor(verified.shape.parents[1:], device=verified.logits.device).long()
        tokens = torch.tensor(verified.tokens[1:], device=verified.logits.device).long()
        probs = (verified.logits.float() / self.temperature).softmax(dim=-1)
        entropy = -(probs * (probs + 1e-5).log()).sum(dim=-1)
        bar = (self.posterior_alpha * (-entropy).exp()).clamp_max(self.posterior_threshold)
        return probs[parents, tokens], bar[parents]
