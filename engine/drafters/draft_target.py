"""A smaller model drafts a chain, the target verifies it.

The draft model keeps its own cache over the whole generation. After a step it holds the rows of the
root and of all draft tokens but the last. Accepted ones stay, and the next draft first reads the
new tokens: one after a rejection, two after a fully accepted draft.

    committed  … r        cache  … r a b         drafts a b c (c was never fed)
    accepted a b, then x  keep   … r a b         feed x
    accepted a b c, x     keep   … r a b         feed c x

A model with another vocabulary can draft too: `DraftTargetDrafter` only the tokens that both have,
`TextDrafter` any, because it continues the text, and its output is tokenized again:

    target's tokens    … "fast" "er" | root " than"
    the model's        … "faster" " than"            the same text in its own tokens
    its output         " the" " speed" " of"
    drafts             " thes" …                     that text in the target's tokens

Lossless: drafts that are not sampled follow from the committed text alone, and the target verifies
its own tokens. Sources: arXiv:2211.17192; transformers' universal assisted generation
(`assistant_tokenizer`); arXiv:2502.05202, Alg. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.config import UnitFloat, setting
from engine.drafters.base import (
    BuildContext,
    Drafter,
    DraftSession,
    Start,
    Traits,
    chain,
    root_only,
)
from engine.drafters.heads.vocabulary import DraftVocab, Vocabulary
from engine.drafters.method import DraftShape, MethodConfig, draft_len
from engine.drafters.texts import MAX_LOGIT_ROWS, UNRANKED, TargetTrace
from engine.metrics import common_len
from engine.model.cache import TreeCache
from engine.model.target import Target
from engine.model.text import REPLACEMENT, Retokenizer, SharedTokens, common_vocabulary
from engine.proposal import Budget, DraftDists, Needs, Outcome, Proposal
from engine.sampling import inverse_cdf, probabilities, upload_numbers
from engine.steps import Bypass
from engine.tree import TreeShape, upload

MODEL = "the draft model (a target preset, a local path or a hub id)"
HEADROOM = 512
"""Initial rows of the cache beyond the prompt."""
WINDOW = 64
"""The last tokens, at least this many, are tokenized again at every step."""
CONTEXT = 10
"""Tokens of context with which the draft's text is tokenized again."""


class DraftModelMethod(MethodConfig):
    """The settings of methods that draft with a whole model."""

    speculative_model: str | None = setting(
        None, "Draft model", "draft model: a target preset's name, a local path or a hub id"
    )
    draft_dtype: Literal["target", "float32", "bfloat16", "float16", "q8", "q4"] = setting(
        "target",
        "Draft model's dtype",
        "dtype of the draft model; target = the same as the target's",
    )
    draft_device: str = setting(
        "target",
        "Draft model's device",
        "where the draft model runs: cpu, cuda or cuda:N; target = where the target does",
        pattern=r"^(target|cpu|cuda(:\d{1,2})?)$",
    )

    def load(self, context: BuildContext) -> Target:
        """The model with these settings; raises as `build`."""
        settings = {"dtype": self.draft_dtype, "device": self.draft_device}
        changes = {key: value for key, value in settings.items() if value != "target"}
        return context.load(
            context.resolve(context.weights(self.speculative_model, MODEL)), **changes
        )


class DraftTargetConfig(DraftModelMethod):
    """Settings of drafting with a smaller model.

    The model caches keys and values of earlier texts, at most 1 GiB (`prefixes.MAX_BYTES`).
    """

    title = "Draft model"
    summary = "A smaller model drafts a chain of tokens."
    paper = "2211.17192"
    main_settings = "drafting max_draft_len confidence_threshold"
    without_effect = (
        ({"vocabulary": "text"}, "use_draft_probs draft_vocab"),
        ({"vocabulary": "intersection"}, "draft_vocab"),
    )

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    max_draft_len: int = draft_len(4)
    use_draft_probs: bool = setting(
        True,
        "Sample the drafts",
        "when sampling: sample the drafts too and verify them with their "
        "probabilities; off = likeliest tokens",
    )
    confidence_threshold: UnitFloat = setting(
        0.0,
        "Confidence threshold",
        "stop drafting where the draft model's best token is less likely; 0 = never",
    )

    draft_vocab: DraftVocab = None
    vocabulary: Literal["same", "intersection", "text"] = setting(
        "same",
        "Vocabulary of the draft model",
        "same = the target's, checked; for another one: intersection = the draft model "
        "proposes only tokens that both have (arXiv 2502.05202); text = it proposes any, and its "
        "text is tokenized again",
    )

    @property
    def offline(self) -> bool:
        """A draft model with another vocabulary reads the text in its own tokens."""
        return self.vocabulary == "same"

    def build(self, context: BuildContext) -> Drafter:
        model = self.load(context)
        if self.vocabulary != "text":
            return DraftTargetDrafter(self, context, model)
        return TextDrafter(self, context.target, model)

    def draft_shape(self) -> DraftShape:
        return DraftShape(self.max_draft_len, self.max_draft_len)


class ModelDrafter(Drafter):
    """Drafts with a whole model, whose vocabulary may be another."""

    traits = Traits(has_network=True)

    def __init__(self, target: Target, model: Target, *, rewinds: int = 0) -> None:
        """`rewinds`: as `Target.new_cache`."""
        self.model, self.device, self.rewinds = model, target.device, rewinds

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens in the model's ids; by default the same."""
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]


M = TypeVar("M", bound=ModelDrafter)


class ModelSession(DraftSession[M]):
    """Keeps a model's cache in step with the text, and between texts under prefix caching."""

    _cache: TreeCache | None = None
    _ids: list[int]
    """The text in the model's ids, as far as it may be in the cache."""
    _num_read: int
    """Tokens of the text that are among them."""

    def read(self) -> None:
        encode = self.drafter.encode
        if self._cache is None:
            self._num_read = self.log.num_prompt + 1
            self._ids = encode(self.text[: self._num_read])
        for token in self.text[self._num_read :]:  # one by one: shared tokens stay themselves
            self._ids += encode([token])
        self._num_read = len(self.text)
        if self._cache is None:
            self._cache = self._open_cache()

    def _open_cache(self) -> TreeCache:
        model, log = self.drafter.model, self.log
        rows = min(max(len(self._ids), len(self.text)) + HEADROOM, model.context_len)
        text_len = log.num_prompt + self.start.limits.max_new_tokens
        cache = model.new_cache(rows, rewinds=self.drafter.rewinds, text_len=text_len)
        if log.num_cached is not None and self._ids:
            model.prefixes.restore(self._ids, cache)
        return cache

    @property
    def cache(self) -> TreeCache:
        assert self._cache is not None, "the text was not read"
        return self._cache

    def close(self) -> None:
        if self._cache is None:
            return
        if self.log.num_cached is not None:
            self.drafter.model.prefixes.keep(self._ids, self._cache)
        self._cache.free()


class ChainDrafter(ModelDrafter):
    """Attributes:
    model_ids: `(tokens,)` that it may draft, in its own ids; None = the first `common`.
    vocabulary: the same tokens in the target's ids; both on the draft model's device.
    chains: whether the forward may draft a whole chain in one call.
    samples: whether it may sample its drafts.
    """

    model_ids: Tensor | None = None
    vocabulary: Vocabulary
    chains = True
    samples = True

    def __init__(self, config: DraftTargetConfig, target: Target, model: Target) -> None:
        super().__init__(target, model, rewinds=config.max_draft_len + 2)
        self.config, self.common = config, model.vocab_size


C = TypeVar("C", bound=ChainDrafter)


class ChainSession(ModelSession[C]):
    """Continues the text in the model's ids, token by token."""

    def _draft(
        self, length: int, min_prob: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Up to `length` tokens, their probabilities and their distributions, one tensor each.

        Tokens are indices into `_model_ids` if that is set. All stay on the draft model's device.
        """
        tokens, probs, distributions = list[Tensor](), list[Tensor](), list[Tensor]()
        drafter, start, cache = self.drafter, self.start, self.cache
        model, config, ids = drafter.model, drafter.config, drafter.model_ids
        samples = drafter.samples and config.use_draft_probs and not start.sampling.greedy
        numbers = [start.draws.uniform() for _ in range(length)] if samples else []
        uniforms = upload_numbers(numbers, model.device)
        # The root is fed again, so that there is a row to draft from.
        cache.truncate(len(self._ids) - 1)
        inputs, path_prob = upload(torch.tensor(self._ids[cache.length :]), model.device), 1.0
        if not samples and not config.confidence_threshold and drafter.chains:
            drafts = model.draft_chain(inputs, cache, length, min_prob, ids=ids)
            if drafts is not None:
                indices = drafts[0] if ids is None else drafter.vocabulary.index(drafts[0])
                return list(indices), list(drafts[1].exp()), []
        for i in range(length):
            logits = model.prefill(inputs, cache, Needs()).logits[-1]
            logits = logits[: drafter.common] if ids is None else logits[ids]
            confidence = logits.float().softmax(dim=-1)
            # Decided before a token is drawn: a dependence on the draw would bias the output.
            threshold = config.confidence_threshold
            if not samples and min_prob > 0:
                threshold = max(threshold, min_prob / path_prob)
            if threshold > 0 and float(confidence.max()) < threshold:
                break
            if samples:
                distributions.append(probabilities(logits, start.sampling))
                token = inverse_cdf(distributions[-1], uniforms[i])
            else:
                token = logits.argmax()
            tokens.append(token)
            probs.append(confidence.gather(0, token[None])[0])  # `[token]` reads it on the host
            path_prob = path_prob * float(probs[-1]) if min_prob > 0 else path_prob
            inputs = token[None] if ids is None else ids[token[None]]
        return tokens, probs, distributions


class DraftTargetSession(ChainSession["DraftTargetDrafter"]):
    """Every committed token is read once."""

    _has_drafted = False
    """Whether it drafted at this step."""

    def propose(self, budget: Budget) -> Proposal:
        """A chain; empty beyond the draft model's context."""
        self.read()
        drafter, device = self.drafter, self.drafter.device
        room = drafter.model.context_len - len(self._ids) + 1
        length = min(drafter.config.max_draft_len, budget.depth, room)
        if length < 1 or not self._ids:
            bypass: Bypass = "draft_context" if room < 1 else "no_text"
            return root_only(self.root, device, bypass)
        tokens, probs, distributions = self._draft(length, budget.min_prob)
        if not tokens:
            return root_only(self.root, device, "unsure")
        drafts = drafter.vocabulary.target_ids(torch.stack(tokens)).to(device)
        proposal = chain(self.root, drafts, torch.stack(probs).to(device))
        self._has_drafted = True
        if not distributions:
            return proposal
        rows = drafter.vocabulary.spread(torch.stack(distributions)).to(device)
        rows = pad(rows, (0, drafter.target_vocab - rows.shape[-1]))
        return replace(proposal, dists=DraftDists(rows, {i: i for i in range(len(rows))}))

    def observe(self, outcome: Outcome) -> None:
        """Keep the rows of draft tokens that were committed."""
        if not self._has_drafted:
            return
        self._has_drafted, proposal = False, outcome.proposal
        # The model has not read what a grammar added after its drafts.
        drafts = outcome.tokens()[1 : len(proposal.shape) - proposal.num_forced]
        # The last committed token is the next root, which is fed again even if it was drafted.
        num_accepted = common_len(drafts, outcome.committed[:-1])
        self.cache.truncate(len(self._ids) + num_accepted)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.truncate(len(self._ids))
        super().close()


class DraftTargetDrafter(ChainDrafter):
    """Drafts with a second model of the target's vocabulary, or of what both have in common."""

    session = DraftTargetSession
    _shared: SharedTokens | None = None

    def __init__(self, config: DraftTargetConfig, context: BuildContext, model: Target) -> None:
        target = context.target
        super().__init__(config, target, model)
        self.target_vocab = target.vocab_size
        ids: Tensor | None
        if config.vocabulary == "intersection":
            self._shared = shared = SharedTokens(target, model)
            self.model_ids, ids, self.chains = shared.theirs, shared.ours, False
        else:
            self.common = common = common_vocabulary(target, model)
            location = context.weights(config.speculative_model, MODEL)
            listed = Vocabulary.beside(location, target, config.draft_vocab).ids
            ids = None if listed is None else listed[listed < common].to(model.device)
            self.model_ids = ids
            self.chains = ids is not None or common == model.vocab_size
        self.vocabulary = Vocabulary(ids, target.vocab_size)

    def encode(self, tokens: Sequence[int]) -> list[int]:
        return super().encode(tokens) if self._shared is None else self._shared.translate(tokens)

    def ranks(self, trace: TargetTrace, depths: int) -> Tensor:
        """Ranks from one reading of the text: a token's rank is the same from every root.

        Tokens where drafting stops (`confidence_threshold`, the end of the model's context) are
        unranked. Exact for chains of every length.
        """
        last = min(len(trace.tokens) - 1, self.model.context_len)
        ranks = torch.full((len(trace.tokens),), UNRANKED)
        text_len = trace.first + trace.text.limits.max_new_tokens
        with self.model.new_cache(last + 1, text_len=text_len) as cache:
            ranks[1 : last + 1] = self._token_ranks(trace.tokens[: last + 1], cache)
        roots = torch.arange(trace.text.num_roots)[:, None] + trace.first
        index = roots + torch.arange(1, depths + 1)
        return ranks[index.clamp_max(len(ranks) - 1)]

    def _token_ranks(self, tokens: Tensor, cache: TreeCache) -> Tensor:
        """Rank of every token but the first, given the tokens before it."""
        model, threshold = self.model, self.config.confidence_threshold
        inputs, labels = tokens[:-1].clamp_max(model.vocab_size - 1), tokens[1:]
        chunks = (part.to(model.device).split(MAX_LOGIT_ROWS) for part in (inputs, labels))
        ranks = []
        for rows, ids in zip(*chunks, strict=True):
            proposal = Proposal(rows, TreeShape.chain(len(rows) - 1))
            logits = model.verify(proposal, cache, Needs()).logits[:, : self.common]
            logits = logits if self.model_ids is None else logits[:, self.model_ids]
            cache.commit(tuple(range(len(rows))))
            rank = self.vocabulary.rank_of(logits, ids.clamp_max(self.common - 1))
            confident = logits.float().softmax(dim=-1).amax(dim=-1) >= threshold
            ranks.append(torch.where(confident & (ids < self.common), rank, UNRANKED).cpu())
        return torch.cat(ranks)


class TextSession(ChainSession["TextDrafter"]):
    """The cache keeps the prefix that the model's tokens have in common from step to step."""

    def __init__(self, drafter: TextDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self._settled: list[int] = []
        self._num_settled = 0

    def _open_cache(self) -> TreeCache:
        cache = super()._open_cache()
        self._ids = self._ids[: cache.length]
        return cache

    def propose(self, budget: Budget) -> Proposal:
        """Empty within a character of several tokens, and at the end of the model's context."""
        drafter = self.drafter
        ids = self._encode_text()
        if self._cache is None:
            self._ids = ids
            self._cache = self._open_cache()
        room = drafter.model.context_len - len(ids) + 1
        length = min(drafter.config.max_draft_len, room, budget.depth)
        drafts: list[int] = []
        if ids and length > 0:
            continuation = self._continuation(ids, length)
            context = ids[-CONTEXT:]
            drafts = drafter.to_target.continued(context, continuation, self.text[-CONTEXT:])
        if not drafts:
            bypass: Bypass = "no_text" if room > 0 else "draft_context"
            return root_only(self.root, drafter.device, bypass)
        tokens = torch.tensor([self.root, *drafts[: budget.depth]])
        return Proposal(upload(tokens, drafter.device), TreeShape.chain(len(tokens) - 1))

    def _encode_text(self) -> list[int]:
        """The text in the model's tokens; empty where it ends within a character."""
        tokens, to_model = self.text, self.drafter.to_model
        end = len(tokens) - WINDOW
        if end - self._num_settled >= WINDOW:
            while to_model.text(tokens[self._num_settled : end])[-1:] == REPLACEMENT:
                end -= 1
            self._settled += to_model(tokens[self._num_settled : end])
            self._num_settled = end
        tail = tokens[self._num_settled :]
        if to_model.text(tail)[-1:] == REPLACEMENT:
            return []
        return [*self._settled, *to_model(tail)]

    def _continuation(self, ids: list[int], length: int) -> list[int]:
        """Up to `length` tokens that the model generates after these, without special ones."""
        self.cache.truncate(common_len(self._ids, ids[:-1]))
        self._ids = ids
        drafts, _, _ = self._draft(length, min_prob=0.0)
        tokens: list[int] = torch.stack(drafts).tolist() if drafts else []
        self._ids = [*ids, *tokens][: self.cache.length]
        return list(takewhile(lambda token: token not in self.drafter.ends, tokens))


class TextDrafter(ChainDrafter):
    """Drafts a chain with a model that shares only the text with the target."""

    session = TextSession
    samples = False

    def __init__(self, config: DraftTargetConfig, target: Target, model: Target) -> None:
        """Raises VocabularyError: a model has no tokenizer."""
        super().__init__(config, target, model)
        self.to_model, self.to_target = Retokenizer(target, model), Retokenizer(model, target)
        self.ends = self.to_target.special | model.eos_ids
