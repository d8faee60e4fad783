"""Retrieval combined with a model: two drafters take turns.

Where the text's last tokens occurred before, copying what followed is free and often right for many
tokens; elsewhere a model or heads draft. Both read the same log, so either can draft at any step.
The leading methods of Spec-Bench work this way.

Lossless: the choice between them follows from the committed text alone, and each proposal carries
the distributions it was drawn from, or none.
Source: arXiv:2411.10666 (suffix automaton and model drafter by match length).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo

from engine.accept import Rule
from engine.config import setting
from engine.drafters import methods, parse_method
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start
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
        model = self.model.build(context)
        return CombinedDrafter(self.retrieval.build(context), model, self.min_match_len)


class CombinedSession(DraftSession["CombinedDrafter"]):
    """A list of sessions: the first one that finds a draft drafts, the last one rules."""

    def __init__(self, drafter: CombinedDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        retrieval = replace(start, min_match_len=drafter.min_match_len)
        self._sessions = (drafter.retrieval.open(retrieval), drafter.model.open(start))

    @property
    def parts(self) -> tuple[DraftSession[Any], ...]:
        return self._sessions

    def propose(self, budget: Budget) -> Proposal:
        retrieval, model = self.parts
        proposal = retrieval.propose(budget)
        return proposal if len(proposal.shape) > 1 else model.propose(budget)

    def observe(self, outcome: Outcome) -> None:
        for session in self.parts:
            session.observe(outcome)

    def rule(self) -> Rule:
        return self.parts[-1].rule()

    def close(self) -> None:
        for session in self.parts:
            session.close()


class CombinedDrafter(Drafter):
    """Proposes retrieval's draft where there is one, else the model's."""

    session = CombinedSession

    def __init__(self, retrieval: Drafter, model: Drafter, min_match_len: int) -> None:
        self.retrieval, self.model, self.min_match_len = retrieval, model, min_match_len
        # Retrieval reads tokens only.
        self.needs, self.notes = model.needs, (*retrieval.notes, *model.notes)
        remembers = retrieval.traits.remembers or model.traits.remembers
        self.traits = replace(model.traits, remembers=remembers)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.retrieval, self.model)
