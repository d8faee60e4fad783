"""Acceptance rules: from the target's logits over a draft tree to the accepted path.

A rule takes one verified tree and returns the accepted path and the token that the target adds
after it. The greedy and the lossless rule reproduce the target exactly; typical and relaxed
acceptance trade that for length and are lossy by design.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from engine.config import Sampling
from engine.errors import TargetError
from engine.proposal import DraftDists, Proposal, TargetOutput
from engine.readout import Readout, device_columns
from engine.sampling import NOT_FINITE, SeededDraws, probabilities, widest_float
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
        columns: of `engine.readout`, for the lossless rule; empty where it reads the logits.
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
        if self.sampling.greedy and verified.dists is None:
            return greedy(verified)
        tree = (verified.shape, verified.tokens, verified.logits, verified.dists)
        readout = Readout(*tree, self.sampling, verified.columns)
        walk = _walk_block if self._as_block(verified.shape, verified.dists) else _walk_tree
        path = tuple(walk(readout, draws))
        return Acceptance(path, readout.next_token(path[-1] if path else 0, draws))

    def columns(self, proposal: Proposal, logits: Tensor, draws: SeededDraws) -> Sequence[Tensor]:
        """On the device, what it decides by; empty where argmaxes are enough."""
        if self.sampling.greedy and proposal.dists is None:
            return ()
        as_block = self._as_block(proposal.shape, proposal.dists)
        return device_columns(proposal, logits, self.sampling, draws, as_block=as_block)

    def _as_block(self, shape: TreeShape, dists: DraftDists | None) -> bool:
        """Whether block verification applies: to a chain whose tokens were all sampled.

        Never under a grammar: which tokens it forces, and so whether all were sampled, depends on
        those drawn before, and a choice between the two by the draws themselves is not lossless.
        """
        by_token = self.sampling.verification == "token" or self.sampling.constrained
        if by_token or dists is None or not shape.is_chain:
            return False
        return all(node in dists.row_of_parent for node in range(len(shape) - 1))


def _walk_tree(readout: Readout, draws: SeededDraws) -> Iterator[int]:
    """The accepted nodes, decided child by child."""
    node: int | None = 0
    while node is not None:
        mass, accepted = 1.0, None
        for child, target_prob, draft_prob in readout.children(node):
            threshold = draws.uniform() * (mass if draft_prob is None else draft_prob)
            if threshold < target_prob and draft_prob != 0.0:
                accepted = child
                yield child
                break
            mass = max(0.0, mass - target_prob)
        node = accepted


def _walk_block(readout: Readout, draws: SeededDraws) -> Iterator[int]:
    """The nodes of the longest accepted prefix of a chain; see `engine.readout.block_probs`."""
    num_accepted = 0
    for node, (chance, accept_prob) in enumerate(zip(*readout.block(), strict=True)):
        if chance == 0.0:
            break
        if node and draws.uniform() < accept_prob:
            num_accepted = node
    return iter(range(1, num_accepted + 1))


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
