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

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo

from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.lookup.paths import likeliest_paths
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.proposal import Outcome, Proposal

UNSAID = 0.5
"""Probability of a token after its parent, by a draft that does not say."""
MEMORY = 0.97
"""Weight of the past in the running sums, per token."""
PRIOR = 1.0
"""Of either sum, before anything was seen."""

_Children = dict[int, tuple[float, int]]
"""Per token: its probability after its parent, and its node."""
_Draft = dict[int, _Children]
"""The children of every node that has any."""
_Place = tuple[int, int]
"""The node of each draft that stands for the same path."""
_NOTHING = (0.0, -1)
"""Of a token that a draft does not have."""


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
        self.config, self.retrieval, self.model = config, retrieval, model
        # What the model drafts costs the same whichever of the merged nodes are verified.
        self.flat_cost = config.merge
        # Retrieval reads tokens only, so the union of what both need is what the model needs.
        self.needs = model.needs

    def start(self, start: Start) -> None:
        self.retrieval.start(start)
        self.model.start(start)
        self._repeats = Repeats(self.config.min_match_len)
        self._repeats.extend([*start.prompt_ids, start.root])
        self._merger = Merger()

    def propose(self, max_depth: int) -> Proposal:
        found = self.retrieval.propose(max_depth)
        # Where retrieval does not tell how long its match is, the text's own repeats do.
        length = self.retrieval.match_len
        matches = self._repeats.now if length is None else length >= self.config.min_match_len
        trusted = len(found.shape) > 1 and matches
        if trusted and not self.config.merge:
            return found
        drafted = self.model.propose(max_depth)
        if self.config.merge and drafted.dists is None and drafted.extra is None:
            return self._merger.merge(found, drafted, self.config.max_total_draft_tokens)
        return found if trusted else drafted

    def observe(self, outcome: Outcome) -> None:
        self.retrieval.observe(outcome)
        self.model.observe(outcome)
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
    """Whether a growing text's last `length` tokens occurred in it before: `now`."""

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


class Merger:
    """Merges a step's two drafts, each token as likely as both together make it.

    A token that both have after the same path is one node. Where both say how the text goes on,
    its probability is their weighted mean, where only one does, that one's:

        P(token) = w · P_second(token) + (1 - w) · P_first(token)

    The weight follows who was right of late: of each draft, the probability that it gave to the
    tokens that came true where both had spoken, in a running sum (as in mixtures of experts with
    forgetting, fixed-share forecasters).
    """

    def __init__(self) -> None:
        self._drafts: tuple[_Draft, _Draft] = ({}, {})
        self._credit = [PRIOR, PRIOR]

    @property
    def weight(self) -> float:
        """Of the second draft."""
        return self._credit[1] / sum(self._credit)

    def merge(self, first: Proposal, second: Proposal, room: int) -> Proposal:
        """One tree of the likeliest paths of both, at most `room` nodes below the root.

        Both must follow from the context alone (`dists` None) and have no extra rows.
        """
        self._drafts = _draft(first), _draft(second)
        found = likeliest_paths((0, 0), self._onward, room=room)
        return found.proposal(int(first.tokens[0]), first.tokens.device)

    def _after(self, place: _Place) -> list[_Children]:
        return [draft.get(node, {}) for draft, node in zip(self._drafts, place, strict=True)]

    def _onward(self, place: _Place) -> Iterator[tuple[int, float, _Place]]:
        one, two = self._after(place)
        weight = self.weight if one and two else 1.0 if two else 0.0
        for token in {**one, **two}:
            (a, node), (b, other) = one.get(token, _NOTHING), two.get(token, _NOTHING)
            yield token, (1 - weight) * a + weight * b, (node, other)

    def learn(self, committed: Sequence[int]) -> None:
        """What came after the root of the drafts merged in this step; nothing if none were."""
        place: _Place = (0, 0)
        for token in committed:
            after = self._after(place)
            said = [children.get(token, _NOTHING) for children in after]
            if all(after):
                for i, (prob, _) in enumerate(said):
                    self._credit[i] = MEMORY * self._credit[i] + (1 - MEMORY) * prob
            place = (said[0][1], said[1][1])
        self._drafts = ({}, {})


def _draft(proposal: Proposal) -> _Draft:
    tokens, said = proposal.tokens.tolist(), proposal.token_probs()
    draft: _Draft = {}
    for node, parent in enumerate(proposal.shape.parents[1:], start=1):
        prob = said[node]
        draft.setdefault(parent, {})[tokens[node]] = (UNSAID if prob is None else prob, node)
    return draft
