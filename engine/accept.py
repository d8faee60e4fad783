"""Acceptance rules: from the target's logits over a draft tree to the accepted path.

A rule takes one verified tree and returns the accepted path and the token that the target adds
after it. The greedy and the lossless rule reproduce the target exactly; typical and relaxed
acceptance trade that for length and are lossy by design.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from engine.config import Sampling
from engine.errors import TargetError
from engine.proposal import DraftDists, Proposal, TargetOutput
from engine.readout import block_columns, tree_columns
from engine.sampling import NOT_FINITE, SeededDraws, normalize, probabilities, widest_float
from engine.tree import TreeShape, upload


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted nodes in path order (root excluded), and the next root."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedTree:
    """A draft tree and the target's output at each of its n nodes.

    Attributes:
        tokens: token of each node.
        logits: `(n, vocab)`; row i is the target's output after node i.
        dists: distributions of sampled drafts, None for deterministic ones.
        best: argmax of every row's logits, extra rows included, if it is known.
        logsumexp: of the same rows, float32, if it is known.
        target_probs: as `token_probs` returns them, if they are known.
        largest: `(n,)` logits at `best`, if they are known.
        draft_probs: as `Proposal.token_probs` returns them, if they were read with the rest.
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
    def of(cls, proposal: Proposal, output: TargetOutput, rule: Rule, draws: SeededDraws) -> Self:
        """What the host, and a rule with these draws, need of a verify forward.

        Waits for the device once.
        """
        logits = output.logits[: len(proposal.shape)]
        if logits.device.type != "cpu":
            columns = rule.columns(proposal, logits, draws) if isinstance(rule, Lossless) else ()
            return cls._from_device(proposal, output, columns)
        best = None if output.best is None else output.best.tolist()
        tokens = proposal.tokens.tolist()
        return cls(tokens, proposal.shape, logits, proposal.dists, best, output.logsumexp)

    @classmethod
    def _from_device(
        cls, proposal: Proposal, output: TargetOutput, columns: Sequence[Tensor]
    ) -> Self:
        n = len(proposal.shape)
        logits = output.logits[:n]
        best = output.logits.argmax(dim=-1)
        largest = output.logits.gather(1, best[:, None])[:n, 0]
        probs = _token_probs(proposal.tokens, proposal.shape, logits, output.logsumexp)
        parts = [proposal.tokens, best, probs, largest, *columns]
        if proposal.draft_probs is not None:
            parts.append(proposal.draft_probs)
        # One tensor, one wait.
        wide = widest_float(logits.device)
        numbers = iter(torch.cat([part.to(wide) for part in parts]).tolist())
        values = [list(islice(numbers, len(part))) for part in parts]
        return cls(
            [int(token) for token in values[0]],
            proposal.shape,
            logits,
            proposal.dists,
            best=[int(token) for token in values[1]],
            logsumexp=output.logsumexp,
            target_probs=[1.0, *values[2]],
            largest=values[3],
            draft_probs=None if proposal.draft_probs is None else values[-1],
            columns=values[4 : 4 + len(columns)],
        )

    def argmax(self, node: int) -> int:
        """The target's most probable token after a node.

        Computed row by row on the CPU, where a search of the whole vocabulary costs as much as the
        rest of acceptance.

        Raises TargetError: the logits are not finite; argmax finds a NaN or an infinity.
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
        if len(self.shape) == 1:
            return (1.0,)
        tokens = torch.tensor(self.tokens, device=self.logits.device)
        probs: list[float] = _token_probs(tokens, self.shape, self.logits, self.logsumexp).tolist()
        return (1.0, *probs)


def _token_probs(
    tokens: Tensor, shape: TreeShape, logits: Tensor, logsumexp: Tensor | None
) -> Tensor:
    """`(n - 1,)` float32: `VerifiedTree.token_probs` without the root's."""
    parents = shape.parents[1:]
    rows = upload(torch.tensor(parents, dtype=torch.int64), logits.device)
    token_logits = logits[rows, tokens[1:]].float()
    if logsumexp is not None:
        return (token_logits - logsumexp[rows]).exp()
    # Leaves are half of a bushy tree, and theirs are not needed.
    inner = sorted(set(parents))
    index = {node: i for i, node in enumerate(inner)}
    inner_rows, indices = (
        upload(torch.tensor(values, dtype=torch.int64), logits.device)
        for values in (inner, [index[parent] for parent in parents])
    )
    return (token_logits - logits[inner_rows].float().logsumexp(dim=-1)[indices]).exp()


class Rule(ABC):
    """Decides the accepted path of one verified tree."""

    @abstractmethod
    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance: ...

    def read(self, tokens: Iterable[int]) -> None:  # noqa: B027 - most rules decide by the tree
        """The text goes on with these tokens, whoever drafted them; the prompt comes first."""


def greedy(verified: VerifiedTree) -> Acceptance:
    """Follow the child whose token is the target's argmax until there is none.

    Example: root's argmax 7, children of the root carry 5 and 7 (node 2); node 2's argmax 9 and no
    child carries 9 → path (2,), next token 9.
    """
    at, path = 0, list[int]()
    while True:
        best = verified.argmax(at)
        match = [c for c in verified.shape.children[at] if verified.tokens[c] == best]
        if not match:
            return Acceptance(tuple(path), best)
        at = match[0]
        path.append(at)


@dataclass(frozen=True, slots=True)
class Lossless(Rule):
    """Rejection sampling over the tree: the output follows the target's distribution exactly.

    Deterministic drafts are point masses: child x is accepted with probability target_probs[x];
    after a rejection its mass is removed and the rest renormalized. Sampled drafts use the
    recursive residual scheme: accept x with min(1, target_probs[x] / draft_probs[x]); after a
    rejection target_probs becomes max(target_probs - draft_probs, 0) renormalized and x leaves
    draft_probs (the children were drawn without replacement).
    A sampled chain is verified as a whole where the settings say so, which accepts more of it on
    average (arXiv:2403.10444, Alg. 2), instead of token by token.
    Source: arXiv:2211.17192, Alg. 1 (chain); arXiv:2305.09781, Alg. 2 and arXiv:2401.15077 (tree).
    """

    sampling: Sampling

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        dists = verified.dists
        if self.sampling.greedy and dists is None:
            return greedy(verified)
        if verified.columns:
            return self._by_columns(verified, draws)
        if dists is not None and self._as_block(verified.shape, dists):
            return _accept_block(verified, dists, self.sampling, draws)
        at, path = 0, list[int]()
        while True:
            target_probs = probabilities(verified.logits[at], self.sampling)
            children = verified.shape.children[at]
            tokens = [verified.tokens[child] for child in children]
            if dists is None or at not in dists.row_of_parent:
                child_idx, target_probs = _accept_deterministic(target_probs, tokens, draws)
            else:
                draft_probs = dists.probs[dists.row_of_parent[at]]
                child_idx, target_probs = _accept_sampled(target_probs, draft_probs, tokens, draws)
            if child_idx is None:
                return Acceptance(tuple(path), draws.pick(target_probs))
            at = children[child_idx]
            path.append(at)

    def columns(self, proposal: Proposal, logits: Tensor, draws: SeededDraws) -> Sequence[Tensor]:
        """On the device, what `_by_columns` decides by; empty where argmaxes are enough."""
        if self.sampling.greedy and proposal.dists is None:
            return ()
        make = block_columns if self._as_block(proposal.shape, proposal.dists) else tree_columns
        return make(proposal, logits, self.sampling, draws)

    def _as_block(self, shape: TreeShape, dists: DraftDists | None) -> bool:
        """Whether block verification applies: to a chain whose tokens were all sampled.

        Never under a grammar: which tokens it forces, and so whether all were sampled, depends on
        those drawn before, and a choice between the two by the draws themselves is not lossless.
        """
        by_token = self.sampling.verification == "token" or self.sampling.constrained
        if by_token or dists is None or not shape.is_chain:
            return False
        return all(node in dists.row_of_parent for node in range(len(shape) - 1))

    def _by_columns(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        """The same decisions from columns that were computed on the device."""
        shape, dists = verified.shape, verified.dists
        target_probs, draft_probs, next_tokens = verified.columns
        at, path = 0, list[int]()
        if self._as_block(shape, dists):
            chances, accept_probs = target_probs, draft_probs
            for node in range(1, len(shape)):
                if chances[node] == 0.0:
                    break
                at = node if draws.uniform() < accept_probs[node] else at
            path = list(range(1, at + 1))
        else:
            sampled = {} if dists is None else dists.row_of_parent
            child: int | None = 0
            while child is not None:
                at, mass, child = child, 1.0, None
                for node in shape.children[at]:
                    scale = draft_probs[node] if at in sampled else mass
                    if draws.uniform() * scale < target_probs[node]:
                        child = node
                        path.append(node)
                        break
                    mass = max(0.0, mass - target_probs[node])
        draws.uniform()  # the number that the next token was drawn with
        if next_tokens[at] < 0:
            raise TargetError(NOT_FINITE)
        return Acceptance(tuple(path), int(next_tokens[at]))


def _accept_deterministic(
    target_probs: Tensor, tokens: list[int], draws: SeededDraws
) -> tuple[int | None, Tensor]:
    """The index of the deterministic draft that is accepted, or None and the residual target."""
    if not tokens:
        return None, target_probs
    mass = 1.0
    for i, token in enumerate(tokens):
        prob = float(target_probs[token])
        if draws.uniform() * mass < prob:
            return i, target_probs
        mass = max(0.0, mass - prob)
    return None, _without(target_probs, tokens)


def _accept_sampled(
    target_probs: Tensor, draft_probs: Tensor, tokens: list[int], draws: SeededDraws
) -> tuple[int | None, Tensor]:
    """The same for drafts that were sampled from `draft_probs` without replacement."""
    for i, token in enumerate(tokens):
        uniform, draft_prob = draws.uniform(), float(draft_probs[token])
        if draft_prob > 0:
            if uniform * draft_prob < float(target_probs[token]):
                return i, target_probs
            residual = (target_probs - draft_probs).clamp_min(0.0)
            target_probs = normalize(residual, target_probs)
        draft_probs = _without(draft_probs, [token])
    return None, target_probs


def _accept_block(
    verified: VerifiedTree, dists: DraftDists, sampling: Sampling, draws: SeededDraws
) -> Acceptance:
    """Block verification of a sampled chain: the longest accepted prefix and the next token.

    With p(0) = 1 and p(i) = min(1, p(i-1) · target(i) / draft(i)) for the i-th draft token, the
    prefix of i tokens is accepted with probability h(i) = r(i) / (r(i) + 1 - p(i)), the whole chain
    with p(i); r(i) is the sum of the residual max(p(i) · target - draft, 0) at the next position,
    from which the next token is drawn if that prefix is the longest. Later tokens can make up for
    an earlier one, so on average at least as many are accepted as token by token.
    Source: arXiv:2403.10444, Alg. 2.

    Example: one drafted token, target .6, draft .8: accepted with .75, as token by token.
    """
    tokens, num_drafted = verified.tokens, len(verified.tokens) - 1
    chance, num_accepted = 1.0, 0
    target_probs = next_probs = probabilities(verified.logits[0], sampling)
    next_residual: Tensor | None = None
    for i in range(num_drafted + 1):
        if i:
            draft = float(dists.probs[dists.row_of_parent[i - 1]][tokens[i]])
            target = float(target_probs[tokens[i]])
            chance = min(1.0, chance * target / draft) if draft > 0 else 0.0
            if chance == 0.0:
                break
            target_probs = probabilities(verified.logits[i], sampling)
        if i == num_drafted:
            residual, accept_prob = None, chance
        else:
            draft_probs = dists.probs[dists.row_of_parent[i]]
            residual = (chance * target_probs - draft_probs).clamp_min(0.0)
            mass = float(residual.sum())
            accept_prob = mass / (mass + 1 - chance) if mass + 1 - chance > 0 else 1.0
        if not i or draws.uniform() < accept_prob:
            num_accepted, next_probs, next_residual = i, target_probs, residual
    probs = next_probs if next_residual is None else normalize(next_residual, next_probs)
    return Acceptance(tuple(range(1, num_accepted + 1)), draws.pick(probs))


def _without(probs: Tensor, tokens: list[int]) -> Tensor:
    """`probs` with the mass of some tokens removed, renormalized; itself if none is left."""
    residual = probs.clone()
    for token in tokens:
        residual[token] = 0.0
    total = float(residual.sum())
    return residual.div_(total) if total > 0 else probs


@dataclass(frozen=True, slots=True)
class Typical(Rule):
    """Medusa's typical acceptance, deterministic variant. Lossy.

    Child c is accepted if p(c) > min(posterior_threshold, posterior_alpha · exp(-H)), with p the
    target's softmax at the parent and `temperature`, H its entropy. The longest accepted path
    wins, ties by the larger sum of log p; the next root is the plain argmax.
    Source: arXiv:2401.10774, section 2.3.1.
    """

    temperature: float
    posterior_threshold: float
    posterior_alpha: float

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
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

    def judge(self, verified: VerifiedTree) -> tuple[Tensor, Tensor]:
        """`(n - 1,)` float32 each, for nodes 1 … n-1: the token's probability and its threshold."""
        rows = torch.tensor([verified.shape.parents[1:], verified.tokens[1:]], dtype=torch.int64)
        parents, tokens = upload(rows, verified.logits.device)
        probs = (verified.logits.float() / self.temperature).softmax(dim=-1)
        entropy = -(probs * (probs + 1e-5).log()).sum(dim=-1)
        bar = (self.posterior_alpha * (-entropy).exp()).clamp_max(self.posterior_threshold)
        return probs[parents, tokens], bar[parents]


@dataclass(frozen=True, slots=True)
class Relaxed(Rule):
    """While a reasoning model thinks, any plausible draft token is accepted. Lossy.

    A token passes if it is among the target's best `topk` and within `delta` of the best one, p
    being the target's untempered softmax at the parent: p(best) - p(token) <= delta, or with `logs`
    log p(best) - log p(token) <= delta. Of several passing children the most probable is followed.
    The token after the path is the target's own. Outside the thinking phase `strict` decides.

    Example: p = 0.5, 0.3, 0.2 for tokens 7, 8, 9; topk 2, delta 0.25: 7 and 8 pass, 9 does not;
    with delta 0.1 only 7 does. In logarithms 8 lies log(0.5 / 0.3) = 0.51 below 7.
    Source: TensorRT-LLM's MTP (`use_relaxed_acceptance_for_thinking`). Its code subtracts the
    probabilities (tensorrt_llm/_torch/speculative/mtp.py, and its blog "DeepSeek R1 MTP
    Implementation and Optimization"), its guide their logarithms
    (docs/source/features/speculative-decoding.md).

    Attributes:
        thinking: the phase of the text, which changes only between steps.
    """

    strict: Lossless
    topk: int
    delta: float
    thinking: ThinkingPhase
    logs: bool = False

    def read(self, tokens: Iterable[int]) -> None:
        self.thinking.read(tokens)

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        if not self.thinking.active:
            return self.strict(verified, draws)
        at, path = 0, list[int]()
        while True:
            logits = verified.logits[at]
            best = logits.float().softmax(dim=-1).topk(min(self.topk, len(logits)))
            values = best.values.log() if self.logs else best.values
            passes = (values >= values[0] - self.delta) & (best.values > 0)
            passing = best.indices[passes].tolist()
            child_of = {verified.tokens[c]: c for c in verified.shape.children[at]}
            match = [child_of[token] for token in passing if token in child_of]
            if not match:
                probs = probabilities(logits, self.strict.sampling)
                return Acceptance(tuple(path), draws.pick(probs))
            at = match[0]
            path.append(at)


class ThinkingPhase:
    """Tracks whether a text is between the tokens that begin and end a model's thinking."""

    def __init__(self, begin: int, end: int) -> None:
        self.active, self._begin, self._end = False, begin, end

    def read(self, tokens: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        for token in tokens:
            if token in (self._begin, self._end):
                self.active = token == self._begin
