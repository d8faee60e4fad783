"""Retrieval combined with a model: two drafters take turns.

Where the text's last tokens occurred before, copying what followed is free and often right for many
tokens; elsewhere a model or heads draft. Both observe every outcome, so either can draft at any
step. The leading methods of Spec-Bench work this way.

Lossless: the choice between them follows from the committed text alone, and each proposal carries
the distributions it was drawn from, or none.
Source: arXiv:2411.10666 (suffix automaton and model drafter by match length).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo

from engine.accept import Rule
from engine.config import Sampling, setting
from engine.drafters import methods, parse_method
from engine.drafters.base import BuildContext, Drafter, Start
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.proposal import Budget, Outcome, Proposal
from engine.safe_text import short


def _parse_nested(value: object, info: ValidationInfo) -> object:
    """The method's config of a mapping with `decoding_type`, or of a config."""
    setting = str(info.field_name)
    try:
        config = value if isinstance(value, MethodConfig) else parse_method(value)
    except ConfigError as error:
        raise ValueError(f"{setting}: {str(error).removesuffix('.')}") from error
    kind, classes = config.decoding_type, CombinedConfig.nested_choices(setting)
    if kind not in classes:
        raise ValueError(f"{setting}.decoding_type must be one of {', '.join(classes)}, got {kind}")
    drafting = value.get("drafting", "auto") if isinstance(value, Mapping) else config.drafting
    if drafting != "auto":
        rule = f"{setting}.drafting must be left out, got {short(drafting)}"
        raise ValueError(f"{rule}. Set the combination's own, which decides for both")
    return config.replace(drafting="auto")  # earlier versions stored one without effect


Nested = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_parse_nested)]
"""A method's config as a setting, parsed from a mapping by its `decoding_type`."""


class CombinedConfig(MethodConfig):
    """Two methods, each with its own settings."""

    title = "Combined"
    summary = (
        "Copies what followed the same words before; where they are new, another method drafts."
    )
    paper = "2411.10666"
    main_settings = "drafting retrieval model min_match_len"

    decoding_type: Literal["Combined"] = "Combined"
    retrieval: Nested = setting(
        SuffixConfig(), "Retrieval", "the retrieval method: NGram or Suffix with its settings"
    )
    model: Nested = setting(
        TokenRecyclingConfig(),
        "Where retrieval finds nothing",
        "the method that drafts elsewhere, with its settings",
    )
    min_match_len: int = setting(
        2, "Shortest match", "retrieval drafts only where this many last tokens match", ge=1, le=64
    )

    @property
    def lossless(self) -> bool:
        return self.model.lossless

    @classmethod
    def nested_choices(cls, setting: str) -> Mapping[str, type[MethodConfig]]:
        if setting not in ("retrieval", "model"):
            return {}
        fits = {name: kind for name, kind in methods().items() if name != "Combined"}
        return {n: kind for n, kind in fits.items() if kind.looks_up or setting == "model"}

    def build(self, context: BuildContext) -> CombinedDrafter:
        longest = getattr(self.retrieval, "max_matching_ngram_size", self.min_match_len)
        if self.min_match_len > longest:
            raise ConfigError(
                f"min_match_len must be at most {longest}, the retrieval's longest n-gram, got "
                f"{self.min_match_len}. Lower it or raise retrieval.max_matching_ngram_size."
            )
        return CombinedDrafter(self, self.retrieval.build(context), self.model.build(context))


class CombinedDrafter(Drafter):
    """Proposes retrieval's draft where there is one, else the model's."""

    def __init__(self, config: CombinedConfig, retrieval: Drafter, model: Drafter) -> None:
        self.retrieval, self.model = retrieval, model
        retrieval.min_match_len = config.min_match_len
        # Retrieval reads tokens only.
        self.needs, self.has_network = model.needs, model.has_network
        self.branches, self.reads_logits = model.branches, model.reads_logits
        self.remembers = retrieval.remembers or model.remembers
        self.notes = (*retrieval.notes, *model.notes)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.retrieval, self.model)

    def start(self, start: Start) -> None:
        for part in self.parts:
            part.start(start)

    def propose(self, budget: Budget) -> Proposal:
        proposal = self.retrieval.propose(budget)
        return proposal if len(proposal.shape) > 1 else self.model.propose(budget)

    def observe(self, outcome: Outcome) -> None:
        for part in self.parts:
            part.observe(outcome)

    def rule(self, sampling: Sampling) -> Rule:
        return self.model.rule(sampling)

    def finish(self) -> None:
        for part in self.parts:
            part.finish()
