"""Retrieval and a model together: two drafters take turns, or draft one tree.

Where the text's last tokens occurred before, copying what followed costs nothing and is often right
for many tokens; elsewhere a model or heads draft. Both see every outcome, so either can take over
at any step. The leaders of Spec-Bench work this way.

With `merge` both draft at every step, and the likeliest paths of both are verified in one tree
(`engine.drafters.merging`). Drafts that were sampled cannot be merged without their distributions:
there the two take turns all the same.

Lossless: whose turn it is, and what is merged, follows from the committed text alone, and each
proposal carries the distributions it was drawn from, or none.
Source: arXiv:2411.10666 (suffix automaton and model drafter by match length); arXiv:2503.03434
(retrieved and drafted trees merged).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo

from engine.accept import Rule
from engine.config import Sampling
from engine.drafters.base import Drafter, Start, Workbench
from engine.drafters.merging import Merger
from engine.drafters.method import MethodConfig
from engine.drafters.suffix import SuffixConfig, SuffixDrafter
from engine.drafters.token_recycling import TokenRecyclingConfig
from engine.errors import ConfigError
from engine.proposal import Outcome, Proposal

RETRIEVAL = ("NGram", "Suffix")
"""Methods that read tokens only and draft nothing where nothing matches."""


def _nested(value: object, info: ValidationInfo) -> object:
    """A mapping with `decoding_type` as that method's config, or such a config."""
    from engine.drafters import methods

    values = value.model_dump() if isinstance(value, MethodConfig) else value
    field = info.field_name
    if not isinstance(values, Mapping):
        raise ValueError(f"{field} must be a mapping with decoding_type, got {value!r:.80}")
    known = {name: cls for name, cls in methods().items() if name != "Combined"}
    allowed = RETRIEVAL if field == "retrieval" else tuple(known)
    kind = values.get("decoding_type")
    if kind not in allowed:
        raise ValueError(
            f"{field}.decoding_type must be one of {', '.join(allowed)}, got {kind!r:.80}"
        )
    if values.get("adaptive"):
        raise ValueError(f"{field}.adaptive must be off; set adaptive for both methods at once")
    try:
        return known[kind].parse(values)
    except ConfigError as error:
        raise ValueError(f"{field}: {str(error).removesuffix('.')}") from error


Nested = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_nested)]
"""A method's config within another; read from a mapping by its `decoding_type`."""


class CombinedConfig(MethodConfig):
    """Two methods, each with its own settings."""

    title: ClassVar[str] = "Combined"
    summary: ClassVar[str] = (
        "Copies what followed the same words before; where they are new, another method drafts."
    )
    paper: ClassVar[str | None] = "2411.10666"

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

    def build(self, bench: Workbench) -> CombinedDrafter:
        """Build both drafters.

        Raises:
            ConfigError, DrafterError, SourceError: as the two methods do.
        """
        return CombinedDrafter(self, self.retrieval.build(bench), self.model.build(bench))


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
        """Whether the match is long enough; only Suffix looks beyond the text and tells."""
        if isinstance(self.retrieval, SuffixDrafter):
            return self.retrieval.match_len >= self.config.min_match_len
        return self._repeats.now

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
