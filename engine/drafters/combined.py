"""Retrieval and a model together: two drafters take turns, or draft one tree.

Where the text's last tokens occurred before, copying what followed costs nothing and is often right
for many tokens; elsewhere a model or heads draft. Both see every outcome, so either can take over
at any step. The leaders of Spec-Bench work this way.

With `merge` both draft at every step, and the likeliest paths of both are verified in one tree.
Drafts that were sampled cannot be merged without their distributions: there the two take turns all
the same.

Lossless: whose turn it is, and what is merged, follows from the committed text alone, and each
proposal carries the distributions it was drawn from, or none.
Source: arXiv:2411.10666 (suffix automaton and model drafter by match length); arXiv:2503.03434
(retrieved and drafted trees merged).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo

from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.proposal import Outcome, Proposal
from engine.tree import TreeShape

UNSAID = 0.5
"""Probability of a token after its parent, by a draft that does not say."""
MEMORY = 0.97
"""Weight of the past in the running sums, per token."""
PRIOR = 1.0
"""Of either sum, before anything was seen."""

Children = dict[int, tuple[float, int]]
"""Per token: its probability after its parent, and its node."""
Place = tuple[int | None, int | None]
"""The node of each draft that stands for the same words."""


def _nested(value: object, info: ValidationInfo) -> object:
    """A mapping with `decoding_type` as that method's config, or such a config."""
    from engine.drafters import methods

    values = value.model_dump() if isinstance(value, MethodConfig) else value
    setting = info.field_name
    if not isinstance(values, Mapping):
        raise ValueError(f"{setting} must be a mapping with decoding_type, got {value!r:.80}")
    known = {name: cls for name, cls in methods().items() if name != "Combined"}
    allowed = [name for name, cls in known.items() if cls.looks_up or setting != "retrieval"]
    kind = values.get("decoding_type")
    if kind not in allowed:
        raise ValueError(
            f"{setting}.decoding_type must be one of {', '.join(allowed)}, got {kind!r:.80}"
        )
    if values.get("adaptive"):
        raise ValueError(f"{setting}.adaptive must be off; set adaptive for both methods at once")
    try:
        return known[kind].parse(values)
    except ConfigError as error:
        raise ValueError(f"{setting}: {str(error).removesuffix('.')}") from error


Nested = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_nested)]
"""A method's config within another; read from a mapping by its `decoding_type`."""


class CombinedConfig(MethodConfig):
    """Two methods, each with its own settings."""

    title: ClassVar[str] = "Combined"
    summary: ClassVar[str] = (
        "Copies what followed the same words before; where they are new, another method drafts."
    )
    paper: ClassVar[str | None] = "2411.10666"

    without_effect: ClassVar[Any] = (({"merge": False}, "max_total_draft_tokens"),)

    decoding_type: Literal["Combined"] = "Combined"
    retrieval: Nested = Field(
        SuffixConfig(), description="the retrieval method: NGram or Suffix with its settings"
    )
    model: Nested = Field(
        TokenRecyclingConfig(), description="the method that drafts elsewhere, with its settings"
    )
    min_match_len: int = Field(
        2, ge=1, le=64, description="retrieval drafts only where this many last tokens match"
    )
    merge: bool = Field(
        False,
        description="both draft at every step, and the likeliest paths of both are verified "
        "together (min_match_len decides only where drafts are sampled)",
    )
    max_total_draft_tokens: int = Field(
        24, ge=1, le=256, description="with merge: nodes of the merged tree at most"
    )

    @property
    def lossless(self) -> bool:
        return self.model.lossless

    def build(self, context: BuildContext) -> CombinedDrafter:
        return CombinedDrafter(self, self.retrieval.build(context), self.model.build(context))


class CombinedDrafter(Drafter):
    """Proposes what retrieval found where the match is long enough, else what the model drafts.

    Or, with `merge`, the likeliest paths of both.
    """

    def __init__(self, config: CombinedConfig, retrieval: Drafter, model: Drafter) -> None:
        self.config = config
        # What the model drafts costs the same whichever of the merged nodes are verified.
        self.flat_cost = config.merge
        self._merger = Merger() if config.merge else None
        self.retrieval = retrieval
        self.model = model
        # Retrieval reads tokens only, so the union of what both need is what the model needs.
        self.needs = model.needs
        self._repeats = Repeats(config.min_match_len)

    def start(self, start: Start) -> None:
        self.retrieval.start(start)
        self.model.start(start)
        self._repeats = Repeats(self.config.min_match_len)
        self._repeats.extend(start.prompt_ids)
        self._repeats.extend([start.root])
        if self._merger is not None:
            self._merger = Merger()

    def propose(self, max_depth: int) -> Proposal:
        found = self.retrieval.propose(max_depth)
        trusted = len(found.shape) > 1 and self._matches()
        if trusted and self._merger is None:
            return found
        drafted = self.model.propose(max_depth)
        if self._merger is not None and drafted.dists is None and drafted.extra is None:
            return self._merger.merge(found, drafted, self.config.max_total_draft_tokens)
        return found if trusted else drafted

    def _matches(self) -> bool:
        """Whether the match is long enough; where retrieval does not tell, that of the text."""
        length = self.retrieval.match_len
        return self._repeats.now if length is None else length >= self.config.min_match_len

    def observe(self, outcome: Outcome) -> None:
        self.retrieval.observe(outcome)
        self.model.observe(outcome)
        if self._merger is not None:
            self._merger.learn(outcome.committed)
        self._repeats.extend(outcome.committed)

    def rule(self, sampling: Sampling) -> Rule:
        return self.model.rule(sampling)

    def finish(self) -> None:
        self.retrieval.finish()
        self.model.finish()

    def close(self) -> None:
        self.retrieval.close()
        self.model.close()


class Repeats:
    """Whether a growing text's last `length` tokens occurred in it before.

    Attributes:
        now: the answer for the text so far.
    """

    def __init__(self, length: int) -> None:
        self.now = False
        self._length = length
        self._last: tuple[int, ...] = ()
        self._seen: set[tuple[int, ...]] = set()

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        for token in tokens:
            self._last = (*self._last, token)[-self._length :]
            self.now = self._last in self._seen
            if len(self._last) == self._length:
                self._seen.add(self._last)


@dataclass(slots=True)
class _Draft:
    """A proposal as a trie: per node that has any, its children."""

    children: dict[int, Children] = field(default_factory=dict)

    @classmethod
    def of(cls, proposal: Proposal) -> _Draft:
        tokens = proposal.tokens.tolist()
        said = proposal.draft_probs
        probs = [UNSAID] * len(tokens) if said is None else said.tolist()
        draft = cls()
        for node, parent in enumerate(proposal.shape.parents[1:], start=1):
            draft.children.setdefault(parent, {})[tokens[node]] = (probs[node], node)
        return draft

    def after(self, node: int | None) -> Children:
        return {} if node is None else self.children.get(node, {})


class Merger:
    """Merges a step's two drafts, each token as likely as both together make it.

    A token that both have after the same words is one node. Where both say how the text goes on,
    its probability is their weighted mean, where only one does, that one's:

        P(token) = w · P_second(token) + (1 - w) · P_first(token)

    The weight follows who was right of late: of each draft, the probability that it gave to the
    tokens that came true where both had spoken, in a running sum (as in mixtures of experts with
    forgetting, fixed-share forecasters).
    """

    def __init__(self) -> None:
        self._drafts = (_Draft(), _Draft())
        self._credit = [PRIOR, PRIOR]

    @property
    def weight(self) -> float:
        """Of the second draft."""
        return self._credit[1] / sum(self._credit)

    def merge(self, first: Proposal, second: Proposal, room: int) -> Proposal:
        """One tree of the likeliest paths of both, at most `room` nodes below the root.

        Both must follow from the context alone (`dists` None) and have no extra rows.
        """
        self._drafts = drafts = _Draft.of(first), _Draft.of(second)
        tokens, parents, probs = [int(first.tokens[0])], [-1], [1.0]
        # (-probability of the path, order, probability, token, parent, place)
        heap: list[tuple[float, int, float, int, int, Place]] = []
        place: Place = (0, 0)
        path_prob, parent, order = 1.0, 0, 0
        while len(tokens) <= room:
            one, two = (draft.after(node) for draft, node in zip(drafts, place, strict=True))
            for token, prob in self._mixed(one, two).items():
                order += 1
                onward = (_node(one, token), _node(two, token))
                heapq.heappush(heap, (-path_prob * prob, order, prob, token, parent, onward))
            if not heap:
                break
            negated, _, prob, token, parent, place = heapq.heappop(heap)
            path_prob = -negated
            tokens.append(token)
            parents.append(parent)
            probs.append(prob)
            parent = len(tokens) - 1
        return Proposal(
            torch.tensor(tokens, device=first.tokens.device),
            TreeShape(parents),
            draft_probs=torch.tensor(probs, device=first.tokens.device),
        )

    def _mixed(self, one: Children, two: Children) -> dict[int, float]:
        if not one or not two:
            return {token: prob for token, (prob, _) in (one or two).items()}
        weight = self.weight
        probs = {token: (1 - weight) * prob for token, (prob, _) in one.items()}
        for token, (prob, _) in two.items():
            probs[token] = probs.get(token, 0.0) + weight * prob
        return probs

    def learn(self, committed: Sequence[int]) -> None:
        """What came after the root of the drafts merged in this step; nothing if none were."""
        drafts = self._drafts
        place: Place = (0, 0)
        self._drafts = (_Draft(), _Draft())
        for token in committed:
            said = [draft.after(node) for draft, node in zip(drafts, place, strict=True)]
            if not any(said):
                return
            if all(said):
                for i, children in enumerate(said):
                    prob = children[token][0] if token in children else 0.0
                    self._credit[i] = MEMORY * self._credit[i] + (1 - MEMORY) * prob
            place = (_node(said[0], token), _node(said[1], token))


def _node(children: Children, token: int) -> int | None:
    return children[token][1] if token in children else None
