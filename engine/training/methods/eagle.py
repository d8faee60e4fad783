"""Trains EAGLE heads by the drafter's own forward, fed its own outputs over several depths.

Saved in the layout of yuhuili's heads, without an embedding, which is the target's.

Sources: arXiv:2401.15077, section 4 (features and tokens, noise); arXiv:2408.15766 (several depths
for EAGLE-1/2); arXiv:2503.01840, section 3.2 (training-time test).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from engine.drafters.eagle.checkpoint import load_eagle3
from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.heads.checkpoint import HeadCheckpoint, published_tensors
from engine.drafters.heads.layer import HeadSpec
from engine.drafters.heads.vocabulary import TokenEmbedding, Vocabulary
from engine.errors import ConfigError
from engine.model.corpus import Entry
from engine.model.packed import rows_of
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.methods.eagle_unroll import unroll
from engine.training.packs import Pack, frequent_tokens
from engine.training.recipe import Student, TrainSettings

_Head = TypeVar("_Head", bound=DraftHead)
_ROPE_THETA = 10000.0
_MLP_RATIO = 4


class _EagleTraining(TrainSettings):
    depth_decay: float = Field(
        0.8, gt=0.0, le=1.0, description="weight of a depth's loss relative to the one before it"
    )
    chain_share: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="share of positions that are unrolled beyond the first depth; less is faster",
    )
    intermediate_size: int | None = Field(
        None, ge=1, le=1 << 17, description="width of the head's MLP; None = as the target's"
    )
    levels: int = Field(6, ge=1, le=32, description="drafted levels when evaluating")
    total_tokens: int = Field(59, ge=1, le=1024, description="drafted nodes when evaluating")
    top_k: int = Field(10, ge=1, le=64, description="children per node when evaluating")

    def _tree(self, folder: Path) -> dict[str, Any]:
        """Settings of a drafter that decodes with a dynamic tree."""
        return {
            "speculative_model": str(folder),
            "use_dynamic_tree": True,
            "max_draft_len": self.levels,
            "max_total_draft_tokens": self.total_tokens,
            "dynamic_tree_max_topK": self.top_k,
        }


class EagleTraining(_EagleTraining):
    """An EAGLE-1 head, which serves EAGLE-2 as well."""

    method: ClassVar[str] = "eagle"
    paper: ClassVar[str] = "2401.15077, 2406.16858, 2408.15766"

    depths: int = Field(
        3, ge=1, le=16, description="depths unrolled in training; 1 = EAGLE-1's own recipe"
    )
    feature_weight: float = Field(1.0, ge=0.0, le=100.0, description="weight of the feature loss")
    token_weight: float = Field(0.1, ge=0.0, le=100.0, description="weight of the token loss")
    noise: float = Field(
        0.1, ge=0.0, le=10.0, description="noise on features, ± so many standard deviations"
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return EagleStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> EagleConfig:
        return EagleConfig(**self._tree(folder))


class Eagle3Training(_EagleTraining):
    method: ClassVar[str] = "eagle3"
    paper: ClassVar[str] = "2503.01840"

    depths: int = Field(6, ge=1, le=16, description="depths of the training-time test")
    draft_vocab: int | None = Field(
        8192,
        ge=16,
        le=1 << 20,
        description="tokens it can draft, the corpus's most frequent; None = all, by the target's "
        "lm_head",
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        if target.num_layers < 7:
            raise ConfigError(
                "EAGLE-3 reads three different layers, for which the target needs at least 7, but "
                f"{target.name} has {target.num_layers}. Train the method eagle for it."
            )
        if self.draft_vocab is None or self.draft_vocab >= target.vocab_size:
            return Eagle3Student(self, target, self.vocabulary(target, entries), own=False)
        ids = self._initial_ids(target)
        if ids is None:
            ids = frequent_tokens(entries, self.draft_vocab, target.vocab_size)
            ids = ids.sort().values
        own = Vocabulary(ids.to(target.device), target.vocab_size)
        return Eagle3Student(self, target, own, own=True)

    def _initial_ids(self, target: Target) -> Tensor | None:
        """The draft vocabulary of `begin_with`, if it has its own."""
        if self.begin_with is None:
            return None
        head, _ = load_eagle3(HeadCheckpoint.read(self.begin_with, target))
        return head.vocabulary.ids

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> Eagle3Config:
        return Eagle3Config(**self._tree(folder))


class _EagleStudent(Student):
    """A head of either version, unrolled over several depths."""

    head: DraftHead

    def __init__(
        self, settings: EagleTraining | Eagle3Training, target: Target, vocabulary: Vocabulary
    ) -> None:
        super().__init__(settings, target, vocabulary, settings.depths)
        self.chain_share = settings.chain_share

    def _unrolled(
        self, fused: Tensor, pack: Pack, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Depth by depth: outputs with a loss, their rows, and how many count.

        With a smaller `chain_share`, chains start in some dialogues, everywhere in these: few
        dialogues are faster than few rows of each.
        """
        starts, count = pack.rows_before(2), len(pack.tokens)
        has_loss = torch.zeros(count, dtype=torch.bool, device=starts.device)
        has_loss[starts] = True
        if generator is not None and self.chain_share < 1:
            starts = _of_some_dialogues(starts, pack.segments, self.chain_share, generator)
        chains = pad_rows(starts)
        for depth, (at, out) in enumerate(unroll(self.head, fused, pack, self.depths, chains)):
            mask = has_loss[at]
            if depth:
                here = at[: len(starts)]
                mask = mask[: len(starts)] & (starts + depth < count)
                mask &= pack.segments[here] == pack.segments[starts]
            rows = mask.nonzero()[:, 0]
            padded = pad_rows(rows)
            yield out[padded].float(), at[padded], len(rows)

    def config(self) -> dict[str, Any]:
        spec, target = self.head.layer.spec, self.target
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": spec.activation,
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": spec.eps,
            "rope_theta": _ROPE_THETA,
            "max_position_embeddings": target.context_len,
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": False,
        }


class EagleStudent(_EagleStudent):
    """Learns the target's next feature, and through it the next token."""

    needs = Needs(hidden=True)
    drafts_vocabulary = True
    settings: EagleTraining
    head: Eagle1Head

    def __init__(self, settings: EagleTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__(settings, target, vocabulary)
        self.head = fresh_eagle1(target, settings.intermediate_size)
        # Its output is the layer's residual, which autocast would leave in bfloat16.
        self.head.fc.register_forward_hook(lambda module, args, out: out.float())
        self._lm_head = LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        settings, scale = self.settings, pack.hidden[: pack.length].std()
        fused = self.head.fuse(pack.hidden)
        if generator is not None and settings.noise:
            draws = torch.rand(fused.shape, generator=generator).to(fused.device)
            fused = fused + (2 * draws - 1) * settings.noise * scale
        for out, at, count in self._unrolled(fused, pack, generator):
            near, far = out[:count] / scale, pack.hidden[at[:count] + 1] / scale
            feature_loss = smooth_l1_loss(near, far, reduction="sum") / max(1, near.numel())
            tokens = self.predicted(pack, at, 2, out, self._lm_head, num_rows=count)
            yield replace(
                tokens,
                weight=settings.token_weight,
                auxiliary=settings.feature_weight * feature_loss,
            )

    def published(self) -> Mapping[str, Tensor]:
        return published_tensors(self.head)

    def config(self) -> dict[str, Any]:
        return super().config() | {"bias": True}

    def describe(self) -> Mapping[str, Any]:
        return {"layers": 1, "embedding": "the target's", "depths": self.depths}


class Eagle3Student(_EagleStudent):
    """Learns the target's distribution over its own vocabulary, or over the target's."""

    head: Eagle3Head

    def __init__(
        self, settings: Eagle3Training, target: Target, vocabulary: Vocabulary, *, own: bool
    ) -> None:
        """Args: own: whether `vocabulary` is the drafter's, with an output matrix of its own."""
        super().__init__(settings, target, vocabulary)
        count = target.num_layers
        self.needs = Needs(hidden=True, layers=(2, count // 2, count - 3))
        self._draft_ids = vocabulary.ids if own else None
        self.head = fresh_eagle3(target, self._draft_ids, settings.intermediate_size)
        self._shared = None if own else LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        assert pack.layers is not None
        fused = self.head.fuse(pack.layers).float()
        lm_head = self._shared or LMHead(self.head.lm_head.weight)
        for out, at, count in self._unrolled(fused, pack, generator):
            tokens = self.predicted(pack, at, 2, self.head.norm(out), lm_head, num_rows=count)
            # Where the true token cannot be drafted, the rest of the distribution misleads.
            teacher = tokens.teacher.weighted((tokens.labels >= 0).float())
            yield replace(tokens, teacher=teacher)

    def load(self, folder: Path) -> None:
        """Raises ConfigError besides: it reads other layers of the target."""
        head, needs = load_eagle3(HeadCheckpoint.read(str(folder), self.target))
        if needs.layers != self.needs.layers:
            raise ConfigError(
                f"{folder} reads layers {needs.layers}, but this training shows "
                f"{self.needs.layers}. Leave begin_with out."
            )
        self.head.load_state_dict(head.state_dict())

    def published(self) -> Mapping[str, Tensor]:
        tensors = published_tensors(self.head).items()
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors}

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().stored(dtype)
        if self._draft_ids is not None:
            ids = self._draft_ids.cpu()
            drafted = torch.zeros(self.target.vocab_size, dtype=torch.bool)
            drafted[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}
        return tensors

    def config(self) -> dict[str, Any]:
        return super().config() | {"draft_vocab_size": self.head.vocabulary.size}

    def describe(self) -> Mapping[str, Any]:
        own = self._draft_ids is not None
        return {
            "layers": 1,
            "draft vocabulary": self.head.vocabulary.size,
            "output": "its own" if own else "shares the target's lm_head",
            "layers read (inputs of)": list(self.needs.layers),
            "depths": self.depths,
        }


def _of_some_dialogues(
    starts: Tensor, segments: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """The starts in randomly drawn dialogues, about that share of all."""
    numbers, counts = segments[starts].unique(return_counts=True)
    order = torch.randperm(len(numbers), generator=generator).to(numbers.device)
    before = counts[order].cumsum(0) - counts[order]
    # The dialogue that crosses the mark is included as often as keeps the share right on average.
    left = share * len(starts) - before
    uniform = torch.rand(len(numbers), generator=generator).to(left.device)
    included = numbers[order][left / counts[order] > uniform]
    return starts[torch.isin(segments[starts], included)]


def _head_spec(target: Target, intermediate: int | None) -> HeadSpec:
    """A layer as wide as the target's, with its attention heads."""
    config = target.config
    heads = int(config.num_attention_heads)
    own = getattr(config, "intermediate_size", None) or _MLP_RATIO * target.hidden_size
    return HeadSpec(
        hidden=target.hidden_size,
        intermediate=int(intermediate or own),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope={"rope_type": "default", "rope_theta": _ROPE_THETA},
    )


def fresh_eagle1(target: Target, intermediate: int | None) -> Eagle1Head:
    """An EAGLE-1 head, initialised to pass the target's feature on."""
    spec = _head_spec(target, intermediate)
    head = Eagle1Head(spec, target.lm_head, vocab=target.vocab_size, bias=True)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, spec.hidden :] += torch.eye(spec.hidden)
        head.fc.bias.zero_()
    return _placed(head, target)


def fresh_eagle3(target: Target, ids: Tensor | None, intermediate: int | None) -> Eagle3Head:
    """An EAGLE-3 head, initialised to read its deepest layer with the target's output matrix.

    Args:
        ids: the tokens it drafts, with an output matrix of its own; None = all, by the target's.
    """
    spec = _head_spec(target, intermediate)
    count = target.vocab_size if ids is None else len(ids)
    whole = Eagle3Spec(spec, 3, target.hidden_size, count)
    head = Eagle3Head(whole, target.lm_head if ids is None else None)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, 2 * spec.hidden :] += torch.eye(spec.hidden)
        if ids is not None:
            head.lm_head.weight.copy_(rows_of(target.lm_head, ids).float().cpu())
        norm = getattr(target.model.get_decoder(), "norm", None)
        weight = getattr(norm, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(weight.detach().float().cpu())
    return _placed(head, target)


@torch.no_grad()
def _placed(head: _Head, target: Target) -> _Head:
    """On the target's device with its embedding; attention and MLP add nothing at first."""
    head.layer.o_proj.weight.zero_()
    head.layer.down_proj.weight.zero_()
    head = head.to(target.device)
    head.embedding = TokenEmbedding.of(target.embedding)
    return head
