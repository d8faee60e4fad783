"""Which draft tokens are kept: pure functions from the target's logits to an accepted path.

A rule looks at one verified draft tree and returns the accepted path and the token that the target
adds after it. The greedy and the lossless rule reproduce the target exactly; typical and relaxed
acceptance trade that for length and are lossy by design.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.config import Sampling
from engine.errors import TargetError
from engine.proposal import DraftDists, Proposal, TargetOutput
from engine.readout import block_columns, tree_columns
from engine.sampling import NOT_FINITE, Draws, SeededDraws, normalised, probabilities
from engine.tree import TreeShape, upload


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted nodes in path order (root excluded), and the next root."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A draft tree and what the target says at each of its nodes.

    Attributes:
        tokens: token of each of the n nodes.
        logits: `(n, vocab)`; row i is the target's view after node i.
        dists: distributions of sampled drafts, None for deterministic ones.
        best: argmax of every row's logits, extra rows included, where it is known.
        largest: `(n,)` the logits there, where they are known.
        logsumexp: `(n,)` float32, logsumexp of the logits, where it is known.
        target_probs: as `token_probs` returns them, where they are known.
        draft_probs: as `Proposal.token_probs` returns them, where they were read with the rest.
        columns: of `engine.readout`, for the lossless rule; empty where it reads the logits itself.
    """

    tokens: Sequence[int]
    shape: TreeShape
    logits: Tensor
    dists: DraftDists | None = None
    best: Sequence[int] | None = None
    logsumexp: Tensor | None = None
    target_probs: Sequence[float] | None = None
    largest: Sequence[float] | None = None
    draft_probs: Sequence[float] | None = None
    columns: Sequence[Sequence[float]] = ()

    @classmethod
    def of(
        cls,
        proposal: Proposal,
        output: TargetOutput,
        rule: Rule | None = None,
        draws: SeededDraws | None = None,
    ) -> Self:
        """What the host needs of a verify forward; it waits for the device once.

        Args:
            rule, draws: what will judge it, so that what that needs is read along.
        """
        n = len(proposal.shape)
        logits = output.logits[:n]
        totals = None if output.logsumexp is None else output.logsumexp[:n]
        if logits.device.type != "cpu":
            columns: Sequence[Tensor] = ()
            if isinstance(rule, Lossless) and draws is not None:
                columns = rule.columns(proposal, logits, draws)
            return cls._read_at_once(proposal, output, columns)
        best = None if output.best is None else output.best[:n].tolist()
        tokens = proposal.tokens.tolist()
        return cls(tokens, proposal.shape, logits, proposal.dists, best, totals)

    @classmethod
    def _read_at_once(
        cls, proposal: Proposal, output: TargetOutput, columns: Sequence[Tensor]
    ) -> Self:
        n = len(proposal.shape)
        logits = output.logits[:n]
        totals = None if output.logsumexp is None else output.logsumexp[:n]
        where = output.logits.argmax(dim=-1)
        largest = output.logits.gather(1, where[:, None])[:n, 0]
        probs = _token_probs(proposal.tokens, proposal.shape, logits, totals)
        parts = [proposal.tokens, where, probs, largest, *columns]
        if proposal.draft_probs is not None:
            parts.append(proposal.draft_probs)
        # One tensor, one wait; float64 holds every id and every float32 exactly.
        numbers = iter(torch.cat([part.double() for part in parts]).tolist())
        values = [list(islice(numbers, len(part))) for part in parts]
        return cls(
            [int(token) for token in values[0]],
            proposal.shape,
            logits,
            proposal.dists,
            [int(token) for token in values[1]],
            totals,
            values[2],
            values[3],
            None if proposal.draft_probs is None else values[-1],
            values[4 : 4 + len(columns)],
        )

    def argmax(self, node: int) -> int:
        """The target's likeliest token after a node.

        On the CPU only the rows that are asked for are searched: over a whole vocabulary it costs
        as much as the rest of accepting.

        Raises TargetError: it is not finite; of a row that has NaN or infinity, it is the largest.
        """
        best = int(self.logits[node].argmax()) if self.best is None else self.best[node]
        largest = float(self.logits[node, best]) if self.largest is None else self.largest[node]
        if not math.isfinite(largest):
            raise TargetError(NOT_FINITE)
        return best

    def token_probs(self) -> Sequence[float]:
        """The target's softmax probability of every node's token at its parent; the root's is 1."""
        if self.target_probs is not None:
            return self.target_probs
        tokens = torch.tensor(self.tokens, device=self.logits.device)
        probs: list[float] = _token_probs(tokens, self.shape, self.logits, self.logsumexp).tolist()
        return probs


def _token_probs(
    tokens: Tensor, shape: TreeShape, logits: Tensor, logsumexp: Tensor | None
) -> Tensor:
    """`(n,)` float32, see `Verified.token_probs`."""
    ones = torch.ones(1, device=logits.device)
    if len(shape) == 1:
        return ones
    parents = shape.parents[1:]
    rows = upload(torch.tensor(parents), logits.device)
    mine = logits[rows, tokens[1:]].float()
    if logsumexp is None:
        # Leaves are half of a bushy tree: nothing needs their sums.
        inner = sorted(set(parents))
        place = {node: i for i, node in enumerate(inner)}
        sums = logits[upload(torch.tensor(inner), logits.device)].float().logsumexp(dim=-1)
        totals = sums[upload(torch.tensor([place[parent] for parent in parents]), logits.device)]
    else:
        totals = logsumexp[rows]
    return torch.cat([ones, (mine - totals).exp()])


class Rule(Protocol):
    """Decides the accepted path of one verified tree."""

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance: ...


def greedy(verified: Verified, draws: Draws | None = None) -> Acceptance:
    """Follow the child whose token is the target's argmax until there is none.

    Example: root's argmax 7, children of the root carry 5 and 7 (node 2); node 2's argmax 9 and no
    child carries 9 → path (2,), next token 9.
    """
    at = 0
    path: list[int] = []
    while True:
        best = verified.argmax(at)
        match = [c for c in verified.shape.children[at] if verified.tokens[c] == best]
        if not match:
            return Acceptance(tuple(path), best)
        at = match[0]
        path.append(at)


@dataclass(frozen=True, slots=True)
class Lossless:
    """Rejection sampling over the tree: the output follows the target's distribution exactly.

    Deterministic drafts are point masses: child x is accepted with probability target_probs[x];
    after a rejection its mass is removed and the rest renormalised. Sampled drafts use the
    recursive residual scheme: accept x with min(1, target_probs[x] / draft_probs[x]); after a
    rejection target_probs becomes max(target_probs - draft_probs, 0) renormalised and x leaves
    draft_probs (the children were drawn without replacement).
    Source: arXiv:2211.17192, Alg. 1 (chain); arXiv:2305.09781, Alg. 2 and arXiv:2401.15077 (tree).

    Attributes:
        block: whether a chain that was drawn at random is verified as a whole, which accepts more
            of it on average (arXiv:2403.10444, Alg. 2); token by token otherwise.
    """

    sampling: Sampling
    block: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        """As these settings say."""
        return cls(sampling, sampling.verification == "block")

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance:
        dists = verified.dists
        if self.sampling.greedy and dists is None:
            return greedy(verified)
        if verified.columns:
            return self._by_columns(verified, draws)
        if dists is not None and self._as_block(verified.shape, dists):
            return _accept_block(verified, dists, self.sampling, draws)
        at = 0
        path: list[int] = []
        while True:
            target_probs = probabilities(verified.logits[at], self.sampling)
            children = verified.shape.children[at]
            tokens = [verified.tokens[child] for child in children]
            if dists is None or at not in dists.row_of_parent:
                child_idx, target_probs = _accept_certain(target_probs, tokens, draws)
            else:
                draft_probs = dists.probs[dists.row_of_parent[at]]
                child_idx, target_probs = _accept_drawn(target_probs, draft_probs, tokens, draws)
            if child_idx is None:
                return Acceptance(tuple(path), draws.pick(target_probs))
            at = children[child_idx]
            path.append(at)

    def columns(self, proposal: Proposal, logits: Tensor, draws: SeededDraws) -> Sequence[Tensor]:
        """What `_by_columns` walks by, on the device; nothing where the argmaxes will do."""
        if self.sampling.greedy and proposal.dists is None:
            return ()
        make = block_columns if self._as_block(proposal.shape, proposal.dists) else tree_columns
        return make(proposal, logits, self.sampling, draws)

    def _as_block(self, shape: TreeShape, dists: DraftDists | None) -> bool:
        return self.block and dists is not None and _is_drawn_chain(shape, dists)

    def _by_columns(self, verified: Verified, draws: Draws) -> Acceptance:
        shape, dists = verified.shape, verified.dists
        target_probs, draft_probs, picks = verified.columns
        at, path = 0, list[int]()
        if self._as_block(shape, dists):
            chances, accepts = target_probs, draft_probs
            for place in range(1, len(shape)):
                if chances[place] == 0.0:
                    break
                at = place if draws.uniform() < accepts[place] else at
            path = list(range(1, at + 1))
        else:
            drawn = {} if dists is None else dists.row_of_parent
            child: int | None = 0
            while child is not None:
                at, left, child = child, 1.0, None
                for node in shape.children[at]:
                    if (
                        draws.uniform() * (draft_probs[node] if at in drawn else left)
                        < (target_probs[node])
                    ):
                        child = node
                        path.append(node)
                        break
                    left = max(0.0, left - target_probs[node])
        draws.uniform()  # the one that drew it
        if picks[at] < 0:
            raise TargetError(NOT_FINITE)
        return Acceptance(tuple(path), int(picks[at]))


def _accept_certain(
    target_probs: Tensor, tokens: list[int], draws: Draws
) -> tuple[int | None, Tensor]:
    """Which of some deterministic drafts is accepted, and what is left of the target if none is."""
    if not tokens:
        return None, target_probs
    left = 1.0
    for i, prob in enumerate(target_probs[tokens].tolist()):
        if draws.uniform() * left < prob:
            return i, target_probs
        left = max(0.0, left - prob)
    return None, _without(target_probs, tokens)


def _accept_drawn(
    target_probs: Tensor, draft_probs: Tensor, tokens: list[int], draws: Draws
) -> tuple[int | None, Tensor]:
    """The same of drafts that were drawn from `draft_probs` one after another."""
    for i, token in enumerate(tokens):
        drawn, chance = draws.uniform(), float(draft_probs[token])
        if chance > 0:
            if drawn * chance < float(target_probs[token]):
                return i, target_probs
            rest = (target_probs - draft_probs).clamp_min(0.0)
            target_probs = normalised(rest, target_probs)
        draft_probs = _without(draft_probs, [token])
    return None, target_probs


def _is_drawn_chain(shape: TreeShape, dists: DraftDists) -> bool:
    """Whether every draft of a chain was drawn from a distribution."""
    drafts = len(shape) - 1
    return shape.max_depth == drafts and all(node in dists.row_of_parent for node in range(drafts))


def _accept_block(
    verified: Verified, dists: DraftDists, sampling: Sampling, draws: Draws
) -> Acceptance:
    """Block verification of a drawn chain: the longest prefix that is accepted, and what follows.

    With p(0) = 1 and p(i) = min(1, p(i-1) · target(i) / draft(i)) of the i-th drafted token, its
    prefix is accepted with probability h(i) = r(i) / (r(i) + 1 - p(i)), the last one with p(i);
    r(i) is the sum of the residual max(p(i) · target - draft, 0) at the place behind it, from which
    the next token is drawn if that prefix is the longest. Later tokens may make up for an earlier
    one, and so at least as many are accepted on average as token by token.
    Source: arXiv:2403.10444, Alg. 2.

    Example: one drafted token, target .6, draft .8: accepted with .75, as token by token.
    """
    tokens, drafts = verified.tokens, len(verified.tokens) - 1
    chance, kept = 1.0, 0
    target_probs = following = probabilities(verified.logits[0], sampling)
    rest: Tensor | None = None
    for place in range(drafts + 1):
        if place:
            draft = float(dists.probs[dists.row_of_parent[place - 1]][tokens[place]])
            target = float(target_probs[tokens[place]])
            chance = min(1.0, chance * target / draft) if draft > 0 else 0.0
            if chance == 0.0:
                break
            target_probs = probabilities(verified.logits[place], sampling)
        if place == drafts:
            residual, accepts = None, chance
        else:
            draft_probs = dists.probs[dists.row_of_parent[place]]
            residual = (chance * target_probs - draft_probs).clamp_min(0.0)
            mass = float(residual.sum())
            accepts = mass / (mass + 1 - chance) if mass + 1 - chance > 0 else 1.0
        if not place or draws.uniform() < accepts:
            kept, following, rest = place, target_probs, residual
    probs = following if rest is None else normalised(rest, following)
    return Acceptance(tuple(range(1, kept + 1)), draws.pick(probs))


def _without(probs: Tensor, tokens: list[int]) -> Tensor:
    """`probs` with the mass of some tokens removed, renormalised."""
    rest = probs.clone()
    rest[tokens] = 0.0
    return normalised(rest, probs)


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
        passes, log_probs = torch.stack([(child_probs > bar).float(), child_probs.log()]).tolist()
        best, best_score = 0, (0, 0.0)
        scores = {0: best_score}
        for node, parent in enumerate(verified.shape.parents):
            if node and parent in scores and passes[node - 1]:
                depth, total = scores[parent]
                scores[node] = (depth + 1, total + log_probs[node - 1])
                if scores[node] > best_score:
                    best, best_score = node, scores[node]
        return Acceptance(verified.shape.path_to(best), verified.argmax(best))

    def judge(self, verified: Verified) -> tuple[Tensor, Tensor]:
        """Of nodes 1 … n-1, `(n - 1,)` float32: the token's probability and its bar."""
        rows = torch.tensor([verified.shape.parents[1:], verified.tokens[1:]], dtype=torch.int64)
        parents, tokens = upload(rows, verified.logits.device)
        probs = (verified.logits.float() / self.temperature).softmax(dim=-1)
        entropy = -(probs * (probs + 1e-5).log()).sum(dim=-1)
        bar = (self.posterior_alpha * (-entropy).exp()).clamp_max(self.posterior_threshold)
        return probs[parents, tokens], bar[parents]


@dataclass(frozen=True, slots=True)
class Relaxed:
    """While a reasoning model thinks, any plausible draft token will do. Lossy.

    A token passes if it is among the target's best `topk` and within `delta` of the best one, p
    being the target's untempered softmax at the parent: p(best) - p(token) <= delta, or with `logs`
    log p(best) - log p(token) <= delta. Of several passing children the likeliest is followed. The
    token after the path is the target's own. Outside the thinking phase `strict` decides.

    Example: p = 0.5, 0.3, 0.2 for tokens 7, 8, 9; topk 2, delta 0.25: 7 and 8 pass, 9 does not;
    with delta 0.1 only 7 does. In logarithms 8 lies log(0.5 / 0.3) = 0.51 below 7.
    Source: TensorRT-LLM's MTP (`use_relaxed_acceptance_for_thinking`). Its code subtracts the
    probabilities (tensorrt_llm/_torch/speculative/mtp.py, and its blog "DeepSeek R1 MTP
    Implementation and Optimization"), its guide the logarithms
    (docs/source/features/speculative-decoding.md).

    Attributes:
        thinking: asked once per step; the phase changes between steps only.
    """

    strict: Lossless
    topk: int
    delta: float
    thinking: Callable[[], bool]
    logs: bool = False

    def __call__(self, verified: Verified, draws: Draws) -> Acceptance:
        if not self.thinking():
            return self.strict(verified, draws)
        at = 0
        path: list[int] = []
        while True:
            logits = verified.logits[at]
            best = logits.float().softmax(dim=-1).topk(min(self.topk, len(logits)))
            values = best.values.log() if self.logs else best.values
            passes = (values >= values[0] - self.delta) & (best.values > 0)
            passing = best.indices[passes].tolist()
            child_of = {verified.tokens[c]: c for c in verified.shape.children[at]}
            match = [child_of[token] for token in passing if token in child_of]
            if not match:
                last = probabilities(logits, self.strict.sampling)
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
