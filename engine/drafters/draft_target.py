"""A smaller model drafts a chain, the target verifies it.

The draft model keeps its own cache over the whole generation. After a step it holds the rows of the
root and of all drafts but the last; accepted ones stay, and the next draft first reads the tokens
that are new: one after a rejection, two after a fully accepted draft.

    committed  … r        cache  … r a b         drafts a b c (c was never fed)
    accepted a b, then x  keep   … r a b         feed x
    accepted a b c, x     keep   … r a b         feed c x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, Start, chain, root_only
from engine.drafters.draft_by_text import TextDrafter
from engine.drafters.draft_model import (
    MODEL,
    DraftDevice,
    DraftDtype,
    ModelDrafter,
    load_draft_model,
)
from engine.drafters.heads.vocabulary import DraftVocab, Vocabulary
from engine.drafters.method import DraftShape, MethodConfig, draft_len
from engine.drafters.texts import ROWS, UNRANKED, TargetTrace
from engine.metrics import common_len
from engine.model.text import SharedTokens, common_vocabulary
from engine.proposal import Budget, DraftDists, Needs, Outcome, Proposal
from engine.sampling import inverse_cdf, probabilities
from engine.steps import Bypass
from engine.tree import TreeShape, upload


class DraftTargetConfig(MethodConfig):
    """Settings of drafting with a smaller model.

    Of earlier texts the model keeps keys and values of 1 GiB at most (`prefixes.MAX_BYTES`).
    """

    title: ClassVar[str] = "Draft model"
    summary: ClassVar[str] = "A smaller model drafts a chain of tokens."
    paper: ClassVar[str | None] = "2211.17192"
    main_settings: ClassVar[str] = "drafting max_draft_len confidence_threshold"
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
        return DraftShape(self.max_draft_len, self.max_draft_len)


class DraftTargetDrafter(ModelDrafter):
    """Drafts with a model of its own, which reads every committed token once."""

    _has_drafted = False
    """Whether the tree of this step is its own."""
    _model_ids: Tensor | None
    """`(tokens,)` the tokens that it may draft, in its ids; None = all that both models have."""
    _target_ids: Tensor
    """The same tokens in the target's ids; both on the draft model's device."""

    def __init__(self, config: DraftTargetConfig, context: BuildContext) -> None:
        target, model = context.target, load_draft_model(config, context)
        super().__init__(target, model, rewinds=config.max_draft_len + 2)
        self._config, self._vocab = config, target.vocab_size
        self._shared: SharedTokens | None = None
        self._model_ids = None
        if config.vocabulary == "intersection":
            self._shared = SharedTokens(target, model)
            self._common = len(self._shared.ours)
            self._model_ids, self._target_ids = self._shared.theirs, self._shared.ours
        else:
            self._common = common_vocabulary(target, model)
            self._vocabulary = self._draft_vocabulary(config, context)
            if self._vocabulary.ids is not None:
                self._model_ids = self._target_ids = self._vocabulary.ids
        self._chains = self._shared is None and (
            self._model_ids is not None or self._common == model.vocab_size
        )

    def _draft_vocabulary(self, config: DraftTargetConfig, context: BuildContext) -> Vocabulary:
        """The tokens listed beside the draft model that both models have, on its device."""
        location = context.weights(config.speculative_model, MODEL)
        ids = Vocabulary.beside(location, context.target, config.draft_vocab).ids
        if ids is not None:
            ids = ids.to(self.model.device)
            ids = ids[ids < self._common]
        return Vocabulary(ids, context.target.vocab_size)

    def start(self, start: Start) -> None:
        super().start(start)
        self._sampling, self._draws = start.sampling, start.draws

    def _encode(self, tokens: Sequence[int]) -> list[int]:
        if self._shared is not None:
            return self._shared.translate(tokens)
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]

    def propose(self, budget: Budget) -> Proposal:
        """A chain, empty where the draft model's context ends before the target's."""
        room = self.model.context_len - len(self._ids) + 1
        length = min(self._config.max_draft_len, budget.depth, budget.nodes, room)
        if length < 1 or not self._ids:
            bypass: Bypass = "draft_context" if room < 1 else "no_text"
            return root_only(self.text[-1], self._device, bypass)
        tokens, probs, distributions = self._draft(length, budget.min_prob)
        if not tokens:
            return root_only(self.text[-1], self._device, "unsure")
        indices = torch.stack(tokens)
        drafts = indices if self._model_ids is None else self._target_ids[indices]
        proposal = chain(
            self.text[-1], drafts.to(self._device), torch.stack(probs).to(self._device)
        )
        self._has_drafted = True
        if not distributions:
            return proposal
        rows = torch.stack(distributions).to(self._device)
        if self._model_ids is None:
            rows = torch.nn.functional.pad(rows, (0, self._vocab - rows.shape[-1]))
        else:
            columns = self._target_ids.to(self._device)
            rows = rows.new_zeros(len(rows), self._vocab).index_copy_(1, columns, rows)
        return replace(proposal, dists=DraftDists(rows, {i: i for i in range(len(rows))}))

    def _draft(
        self, length: int, min_prob: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Up to `length` tokens and their probabilities (scalars), and their distributions.

        Tokens are indices of `_model_ids` if these are set. Every choice stays on the draft model's
        device.
        """
        tokens, probs, distributions = list[Tensor](), list[Tensor](), list[Tensor]()
        samples = self._config.use_draft_probs and not self._sampling.greedy
        numbers = [self._draws.uniform() for _ in range(length)] if samples else []
        uniforms = upload(torch.tensor(numbers, dtype=torch.float64), self.model.device)
        # The root is read again, so that there is a row to draft from.
        self._cache.truncate(len(self._ids) - 1)
        inputs = upload(torch.tensor(self._ids[self._cache.length :]), self.model.device)
        path_prob, ids = 1.0, self._model_ids
        if not samples and not self._config.confidence_threshold and self._chains:
            drafts = self.model.draft_chain(inputs, self._cache, length, min_prob, ids=ids)
            if drafts is not None:
                indices = drafts[0] if ids is None else self._vocabulary.index(drafts[0])
                return list(indices), list(drafts[1].exp()), []
        for i in range(length):
            logits = self.model.prefill(inputs, self._cache, Needs()).logits[-1]
            logits = logits[: self._common] if ids is None else logits[ids]
            confidence = logits.float().softmax(dim=-1)
            # Decided before a token is drawn: depending on the draw would bias what is accepted.
            threshold = self._config.confidence_threshold
            if not samples and min_prob > 0:
                threshold = max(threshold, min_prob / path_prob)
            if threshold > 0 and float(confidence.max()) < threshold:
                break
            if samples:
                distributions.append(probabilities(logits, self._sampling))
                token = inverse_cdf(distributions[-1], uniforms[i])
            else:
                token = logits.argmax()
            tokens.append(token)
            probs.append(confidence.gather(0, token[None])[0])  # `[token]` reads it on the host
            path_prob = path_prob * float(probs[-1]) if min_prob > 0 else path_prob
            inputs = token[None] if ids is None else ids[token[None]]
        return tokens, probs, distributions

    def observe(self, outcome: Outcome) -> None:
        """Keep the rows of drafts that were committed."""
        drafts: Sequence[int] = ()
        if self._has_drafted:  # what a grammar added behind them, the model has not read
            drafts = outcome.tokens()[1 : len(outcome.proposal.shape) - outcome.proposal.num_forced]
        # The last committed token is the next root: fed again even where it was drafted.
        num_accepted = common_len(drafts, outcome.committed[:-1])
        self._cache.truncate(len(self._ids) + num_accepted)
        for token in outcome.committed:
            self._ids += self._encode([token])
        super().observe(outcome)
        self._has_drafted = False

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """The model reads the text once; a token's rank is the same from every root.

        Tokens after its stop (`confidence_threshold`, the end of its context) are unranked. Exact
        for chains of every length.
        """
        last = min(len(trace.tokens) - 1, self.model.context_len)
        ranks = torch.full((len(trace.tokens),), UNRANKED)
        ranks[1 : last + 1] = self._ranks_within(trace.tokens[: last + 1])
        roots = torch.arange(trace.text.num_roots)[:, None] + trace.first
        index = roots + torch.arange(1, depths + 1)
        return ranks[index.clamp_max(len(ranks) - 1)]

    def _ranks_within(self, tokens: Tensor) -> Tensor:
        """Rank of every token but the first, given those before it."""
        model, threshold = self.model, self._config.confidence_threshold
        cache = model.new_cache(len(tokens))
        ranks = []
        try:
            inputs = tokens[:-1].clamp_max(model.vocab_size - 1).to(model.device)
            labels = tokens[1:].to(model.device)
            for rows, ids in zip(inputs.split(ROWS), labels.split(ROWS), strict=True):
                proposal = Proposal(rows, TreeShape.chain(len(rows) - 1))
                logits = model.verify(proposal, cache, Needs()).logits[:, : self._common]
                logits = logits if self._model_ids is None else logits[:, self._model_ids]
                cache.commit(tuple(range(len(rows))))
                rank = self._vocabulary.rank_of(logits, ids.clamp_max(self._common - 1))
                confident = logits.float().softmax(dim=-1).amax(dim=-1) >= threshold
                ranks.append(torch.where(confident & (ids < self._common), rank, UNRANKED).cpu())
        finally:
            cache.free()
        return torch.cat(ranks)

    def finish(self) -> None:
        if self._keeps:
            self._cache.truncate(len(self._ids))
        super().finish()
        self._has_drafted = False
