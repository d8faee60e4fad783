"""A smaller model drafts a chain, the target verifies it.

The draft model keeps its own cache over the whole generation. After a step it holds the rows of the
root and of all drafts but the last; those that were accepted stay, and the next draft begins with
the tokens it has not seen: one after a rejection, two after a fully accepted draft.

    committed  … r        cache  … r a b         drafts a b c (c was never fed)
    accepted a b, then x  keep   … r a b         feed x
    accepted a b c, x     keep   … r a b         feed c x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, Start, chain, root_only
from engine.drafters.draft_by_text import TextDrafter
from engine.drafters.heads.vocabulary import DraftVocab, Vocabulary
from engine.drafters.method import DraftShape, MethodConfig, draft_len
from engine.drafters.texts import ROWS, UNRANKED, TargetTrace
from engine.metrics import common_len
from engine.model.target import Target
from engine.model.text import SharedTokens, common_vocabulary
from engine.proposal import DraftDists, Needs, Outcome, Proposal
from engine.sampling import inverse_cdf, probabilities
from engine.steps import Bypass
from engine.tree import TreeShape, upload

_NAMED = "the draft model (a target preset, a local path or a hub id)"
DraftDtype = Annotated[
    Literal["target", "float32", "bfloat16", "float16", "q8", "q4"],
    Field(
        title="Draft model's dtype",
        description="dtype of the draft model; target = the same as the target's",
    ),
]
DraftDevice = Annotated[
    str,
    Field(
        pattern=r"^(target|cpu|cuda(:\d{1,2})?)$",
        title="Draft model's device",
        description="where the draft model runs: cpu, cuda or cuda:N; target = where the target "
        "does",
    ),
]


class DraftTargetConfig(MethodConfig):
    """Settings of drafting with a smaller model.

    Of earlier texts the model keeps keys and values of 1 GiB at most (`prefixes.MAX_BYTES`).
    """

    title: ClassVar[str] = "Draft model"
    summary: ClassVar[str] = "A smaller model drafts a chain of tokens."
    paper: ClassVar[str | None] = "2211.17192"
    main_settings: ClassVar[str] = "size max_draft_len confidence_threshold"
    size_settings: ClassVar[str] = "max_draft_len"
    without_effect: ClassVar[Any] = (
        ({"vocabulary": "text"}, "use_draft_probs draft_vocab"),
        ({"vocabulary": "intersection"}, "draft_vocab"),
    )

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    speculative_model: str | None = setting(
        None, "Draft model", "draft model: a target preset's name, a local path or a hub id"
    )
    max_draft_len: int = draft_len(4)
    use_draft_probs: bool = setting(
        True,
        "Sample the drafts",
        "when sampling: sample the drafts too and verify them with their "
        "probabilities; off = likeliest tokens",
    )
    confidence_threshold: float = setting(
        0.0,
        "Confidence threshold",
        "stop drafting where the draft model's best token is less likely; 0 = never",
        ge=0.0,
        le=1.0,
    )

    draft_vocab: DraftVocab = None
    draft_dtype: DraftDtype = "target"
    draft_device: DraftDevice = "target"
    vocabulary: Literal["same", "intersection", "text"] = setting(
        "same",
        "Vocabulary of the draft model",
        "same = the target's, checked; for another one: intersection = the draft model "
        "proposes only tokens that both have (arXiv 2502.05202); text = it proposes any, and its "
        "text is tokenized again",
    )

    @property
    def offline(self) -> bool:
        """A draft model of another vocabulary reads the text in its own tokens."""
        return self.vocabulary == "same"

    def build(self, context: BuildContext) -> Drafter:
        if self.vocabulary != "text":
            return DraftTargetDrafter(self, context)
        model = load_draft_model(self, context)
        return TextDrafter(context.target, model, self.max_draft_len, self.confidence_threshold)

    def draft_shape(self) -> DraftShape:
        return DraftShape((1,) * self.max_draft_len, self.max_draft_len, self.max_draft_len)


class OwnModel(Protocol):
    """Settings of a method that drafts with a model of its own."""

    @property
    def speculative_model(self) -> str | None: ...
    @property
    def draft_dtype(self) -> str: ...
    @property
    def draft_device(self) -> str: ...


def load_draft_model(config: OwnModel, context: BuildContext) -> Target:
    """The model that these settings name, where they want it; errors as `MethodConfig.build`."""
    where = {"dtype": config.draft_dtype, "device": config.draft_device}
    apart = {name: value for name, value in where.items() if value != "target"}
    return context.load(context.resolve(context.weights(config.speculative_model, _NAMED)), **apart)


def _drafted_tokens(
    config: DraftTargetConfig, context: BuildContext, common: int, device: torch.device
) -> Vocabulary:
    """Those that a file beside the draft model lists, as far as both models have them.

    On the draft model's device, which chooses among them.
    """
    location = context.weights(config.speculative_model, _NAMED)
    listed = Vocabulary.beside(location, context.target, config.draft_vocab).ids
    if listed is not None:
        listed = listed.to(device)
        listed = listed[listed < common]
    return Vocabulary(listed, context.target.vocab_size)


class DraftTargetDrafter(Drafter):
    """Drafts with a model of its own, whose cache is never filled twice with the same tokens."""

    _drafted: Tensor | None = None
    _drafted_ids: Tensor
    _ids: list[int]
    """The text in the draft model's ids."""
    _theirs: Tensor | None
    """`(places,)` the draft model's ids of the tokens that it may draft; None = all in common."""
    _ours: Tensor
    """The target's ids of these; all on the draft model's device."""

    def __init__(self, config: DraftTargetConfig, context: BuildContext) -> None:
        self._config = config
        self._device = context.target.device
        self._vocab = context.target.vocab_size
        self._model = load_draft_model(config, context)
        self._shared: SharedTokens | None = None
        self._theirs: Tensor | None = None
        if config.vocabulary == "intersection":
            self._shared = SharedTokens(context.target, self._model)
            self._common = len(self._shared.ours)
            self._theirs, self._ours = self._shared.theirs, self._shared.ours
        else:
            self._common = common_vocabulary(context.target, self._model)
            device = self._model.device
            self._vocabulary = _drafted_tokens(config, context, self._common, device)
            if self._vocabulary.ids is not None:
                self._theirs = self._ours = self._vocabulary.ids
        self._chains = self._shared is None and (
            self._theirs is not None or self._common == self._model.vocab_size
        )
        self._cache = self._model.new_cache(0)
        self._ids, self._keeps = [], False

    def start(self, start: Start) -> None:
        super().start(start)
        self._sampling, self._draws = start.sampling, start.draws
        self._ids = self._translated(self.text)
        rows = min(len(self._ids) + 512, self._model.context_len)
        self._cache = self._model.new_cache(rows, rewinds=self._config.max_draft_len + 2)
        self._keeps = start.num_cached is not None
        if self._keeps:
            self._model.prefixes.restore(self._ids, self._cache)

    def _translated(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the target in ids that the draft model knows."""
        if self._shared is not None:
            return self._shared.translate(tokens)
        last = self._model.vocab_size - 1
        return [min(token, last) for token in tokens]

    def propose(self, max_depth: int) -> Proposal:
        """A chain, empty where the draft model's context ends before the target's."""
        room = self._model.context_len - len(self._ids) + 1
        length = min(self._config.max_draft_len, max_depth, room)
        if length < 1 or not self._ids:
            bypass: Bypass = "draft_context" if room < 1 else "no_text"
            return root_only(self.text[-1], self._device, bypass)
        tokens, probs, drawn_from = self._draft(length)
        if not tokens:
            return root_only(self.text[-1], self._device, "unsure")
        chosen = torch.stack(tokens)
        self._drafted_ids = chosen if self._theirs is None else self._theirs[chosen]
        drafted = chosen if self._theirs is None else self._ours[chosen]
        self._drafted = drafted.to(self._device)
        proposal = chain(self.text[-1], self._drafted, torch.stack(probs).to(self._device))
        if not drawn_from:
            return proposal
        rows = torch.stack(drawn_from).to(self._device)
        if self._theirs is None:
            rows = torch.nn.functional.pad(rows, (0, self._vocab - rows.shape[-1]))
        else:
            places = self._ours.to(self._device)
            rows = rows.new_zeros(len(rows), self._vocab).index_copy_(1, places, rows)
        return replace(proposal, dists=DraftDists(rows, {i: i for i in range(len(rows))}))

    def _draft(self, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Up to `length` tokens and their probabilities (scalars), and what they were drawn from.

        Where not all tokens can be drafted, these are places among those that can. The choice of
        every token stays on the draft model's device.
        """
        tokens, probs, drawn_from = list[Tensor](), list[Tensor](), list[Tensor]()
        samples = self._config.use_draft_probs and not self._sampling.greedy
        drawn = [self._draws.uniform() for _ in range(length)] if samples else []
        uniforms = upload(torch.tensor(drawn, dtype=torch.float64), self._model.device)
        # Committed tokens that the draft model has not read; one that says nothing to it is none.
        self._cache.truncate(len(self._ids) - 1)
        feed = upload(torch.tensor(self._ids[self._cache.length :]), self._model.device)
        likely = 1.0
        if not samples and not self._config.confidence_threshold and self._chains:
            ids = self._theirs
            found = self._model.draft_chain(feed, self._cache, length, self.least_prob, ids=ids)
            if found is not None:
                drafted = found[0] if ids is None else self._vocabulary.index(found[0])
                return list(drafted), list(found[1].exp()), []
        for i in range(length):
            logits = self._model.prefill(feed, self._cache, Needs()).logits[-1]
            logits = logits[: self._common] if self._theirs is None else logits[self._theirs]
            confidence = logits.float().softmax(dim=-1)
            # Decided before a token is drawn: depending on the draw would bias what is accepted.
            threshold = self._config.confidence_threshold
            if not samples and self.least_prob > 0:
                threshold = max(threshold, self.least_prob / likely)
            if threshold > 0 and float(confidence.max()) < threshold:
                break
            if samples:
                drawn_from.append(probabilities(logits, self._sampling))
                token = inverse_cdf(drawn_from[-1], uniforms[i])
            else:
                token = logits.argmax()
            tokens.append(token)
            probs.append(confidence[token])
            likely = likely * float(probs[-1]) if self.least_prob > 0 else likely
            feed = token[None] if self._theirs is None else self._theirs[token[None]]
        return tokens, probs, drawn_from

    def observe(self, outcome: Outcome) -> None:
        """Keep the rows of drafts that were committed."""
        drafted = [] if self._drafted is None else self._drafted.tolist()
        # The last committed token is the next root: fed again even where it was drafted.
        kept = common_len(drafted, outcome.committed[:-1])
        self._cache.truncate(len(self._ids) + kept)
        self._ids += self._drafted_ids[:kept].tolist() if kept else []
        for token in outcome.committed[kept:]:
            self._ids += self._translated([token])
        super().observe(outcome)
        self._drafted = None

    def ranks(self, reading: TargetTrace, depths: int) -> Tensor:
        """The model reads the text once; a token's rank is the same from whichever root.

        Where it would have stopped (`confidence_threshold`, the end of its context) nothing is
        offered. Exact for chains of every length.
        """
        last = min(len(reading.tokens) - 1, self._model.context_len)
        ranks = torch.full((len(reading.tokens),), UNRANKED)
        ranks[1 : last + 1] = self._ranks_within(reading.tokens[: last + 1])
        roots = torch.arange(reading.text.num_roots)[:, None] + reading.first
        index = roots + torch.arange(1, depths + 1)
        return ranks[index.clamp_max(len(ranks) - 1)]

    def _ranks_within(self, tokens: Tensor) -> Tensor:
        """Rank of every token but the first, given those before it."""
        model, threshold = self._model, self._config.confidence_threshold
        cache = model.new_cache(len(tokens))
        found = []
        try:
            fed = tokens[:-1].clamp_max(model.vocab_size - 1).to(model.device)
            wanted = tokens[1:].to(model.device)
            for rows, ids in zip(fed.split(ROWS), wanted.split(ROWS), strict=True):
                chain = Proposal(rows, TreeShape.chain(len(rows) - 1))
                logits = model.verify(chain, cache, Needs()).logits[:, : self._common]
                logits = logits if self._theirs is None else logits[:, self._theirs]
                cache.commit(tuple(range(len(rows))))
                rank = self._vocabulary.rank_of(logits, ids.clamp_max(self._common - 1))
                sure = logits.float().softmax(dim=-1).amax(dim=-1) >= threshold
                found.append(torch.where(sure & (ids < self._common), rank, UNRANKED).cpu())
        finally:
            cache.free()
        return torch.cat(found)

    def finish(self) -> None:
        if self._keeps:
            self._cache.truncate(len(self._ids))
            self._model.prefixes.keep(self._ids, self._cache)
        self._keeps = False
        self._cache.free()
        self._drafted = None
