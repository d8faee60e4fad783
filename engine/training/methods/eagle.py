"""Trains EAGLE heads on the drafter's own forward, fed its own outputs over several depths.

Saved in the layout of yuhuili's heads, without the embedding, which is the target's.

Sources: arXiv:2401.15077, section 4 (features and tokens, noise); arXiv:2408.15766 (several depths
for EAGLE-1/2); arXiv:2503.01840, section 3.2 (training-time test).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from engine.config import PositiveUnitFloat, setting
from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig, load_eagle3
from engine.drafters.heads.checkpoint import YUHUILI, HeadCheckpoint, published_tensors
from engine.drafters.heads.layer import HeadSpec
from engine.drafters.heads.vocabulary import DraftOutput, TokenEmbedding, Vocabulary
from engine.errors import ConfigError
from engine.model.checkpoints import read_checkpoint
from engine.model.corpus import Entry
from engine.model.forward import decoder_of
from engine.model.logits import LogitTransform
from engine.model.packed import weight_rows
from engine.model.target import Target
from engine.training.losses import LMHead, Prediction, pad_rows
from engine.training.methods.eagle_unroll import unroll
from engine.training.packs import Pack, frequent_tokens
from engine.training.recipe import Student, TrainSettings

_Head = TypeVar("_Head", bound=DraftHead)
_ROPE_THETA = 10000.0
_MLP_RATIO = 4
TREE_DEPTH = 6
"""Levels of the dynamic tree with which an EAGLE-3 head is evaluated."""


class _EagleTraining(TrainSettings):
    depth_decay: PositiveUnitFloat = setting(
        0.8, "Loss decay", "weight of a depth's loss relative to the one before it"
    )
    chain_share: PositiveUnitFloat = setting(
        1.0,
        "Unrolled positions",
        "share of positions that are unrolled beyond the first depth; less is faster",
    )


class EagleTraining(_EagleTraining):
    """An EAGLE-1 head, which serves EAGLE-2 as well."""

    method: ClassVar[str] = "eagle"
    paper: ClassVar[str] = "2401.15077, 2406.16858, 2408.15766"

    depths: int = setting(
        3, "Unrolled depths", "depths unrolled in training; 1 = EAGLE-1's own recipe", ge=1, le=16
    )
    feature_weight: float = setting(
        1.0, "Feature loss", "weight of the feature loss", ge=0.0, le=100.0
    )
    token_weight: float = setting(0.1, "Token loss", "weight of the token loss", ge=0.0, le=100.0)
    noise: float = setting(
        0.1,
        "Feature noise",
        "uniform noise on the features, ± this many standard deviations",
        ge=0.0,
        le=10.0,
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        return EagleStudent(self, target, self.vocabulary(target, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> EagleConfig:
        return EagleConfig(speculative_model=str(folder), use_dynamic_tree=True)


class Eagle3Training(_EagleTraining):
    method: ClassVar[str] = "eagle3"
    paper: ClassVar[str] = "2503.01840"

    depths: int = setting(6, "Unrolled depths", "depths of the training-time test", ge=1, le=16)
    draft_vocab: int | None = setting(
        8192,
        "Draft vocabulary",
        "tokens it can draft, the corpus's most frequent; None = all, by the target's lm_head",
        ge=16,
        le=1 << 20,
    )

    def student(self, target: Target, entries: Sequence[Entry]) -> Student:
        if target.num_layers < 7:
            raise ConfigError(
                "EAGLE-3 reads three different layers, for which the target needs at least 7, but "
                f"{target.name} has {target.num_layers}. Train the method eagle for it."
            )
        if self.draft_vocab is None or self.draft_vocab >= target.vocab_size:
            return Eagle3Student(self, target, self.vocabulary(target, entries), has_lm_head=False)
        ids = self._initial_ids(target)
        if ids is None:
            ids = frequent_tokens(entries, self.draft_vocab, target.vocab_size)
            ids = ids.sort().values
        vocabulary = Vocabulary(ids.to(target.device), target.vocab_size)
        return Eagle3Student(self, target, vocabulary, has_lm_head=True)

    def _initial_ids(self, target: Target) -> Tensor | None:
        """The draft vocabulary of `begin_with`, if it has one."""
        if self.begin_with is None:
            return None
        head, _ = load_eagle3(Eagle3Head, HeadCheckpoint.read(self.begin_with, target, "Eagle3"))
        return head.vocabulary.ids

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> Eagle3Config:
        return Eagle3Config(
            speculative_model=str(folder), use_dynamic_tree=True, max_draft_len=TREE_DEPTH
        )


class _EagleStudent(Student):
    """A head of either version, unrolled over several depths."""

    settings: _EagleTraining
    head: DraftHead

    def _unrolled(
        self, fused: Tensor, pack: Pack, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Per depth: the outputs with a loss, their rows, and the number that are not padding.

        With a smaller `chain_share`, chains start at every position of some dialogues: few
        dialogues are faster than few rows of each.
        """
        starts, count = pack.rows_before(2), len(pack.tokens)
        has_loss = torch.zeros(count, dtype=torch.bool, device=starts.device)
        has_loss[starts] = True
        share = self.settings.chain_share
        if generator is not None and share < 1:
            starts = _sample_dialogues(starts, pack.segments, share, generator)
        chains = pad_rows(starts)
        for depth, (at, out) in enumerate(unroll(self.head, fused, pack, self.depths, chains)):
            mask = has_loss[at]
            if depth:
                entries = at[: len(starts)]
                mask = mask[: len(starts)] & (starts + depth < count)
                mask &= pack.segments[entries] == pack.segments[starts]
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

    settings: EagleTraining
    head: Eagle1Head

    def __init__(self, settings: EagleTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__(settings, target, vocabulary, settings.depths)
        self.head = new_eagle1_head(target)
        # It computes the layer's residual stream, which autocast would leave in bfloat16.
        self.head.fc.register_forward_hook(lambda module, args, out: out.float())
        self._lm_head = LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        settings, scale = self.settings, pack.hidden[: pack.length].std()
        fused = self.head.fuse(pack.hidden)
        if generator is not None and settings.noise:
            uniform = torch.rand(fused.shape, generator=generator).to(fused.device)
            fused = fused + (2 * uniform - 1) * settings.noise * scale
        for out, at, count in self._unrolled(fused, pack, generator):
            features, labels = out[:count] / scale, pack.hidden[at[:count] + 1] / scale
            loss = smooth_l1_loss(features, labels, reduction="sum") / max(1, features.numel())
            tokens = self.prediction(pack, at, 2, out, self._lm_head, num_rows=count)
            yield replace(
                tokens,
                weight=settings.token_weight,
                auxiliary=settings.feature_weight * loss,
            )

    def published(self) -> Mapping[str, Tensor]:
        return published_tensors(self.head)

    def config(self) -> dict[str, Any]:
        return super().config() | {"bias": True}


class Eagle3Student(_EagleStudent):
    """Learns the target's distribution over its own vocabulary, or over the target's."""

    drafts_vocabulary = False
    head: Eagle3Head

    def __init__(
        self, settings: Eagle3Training, target: Target, vocabulary: Vocabulary, *, has_lm_head: bool
    ) -> None:
        """`has_lm_head`: whether it has an output matrix of its own, over `vocabulary`."""
        super().__init__(settings, target, vocabulary, settings.depths)
        count = target.num_layers
        self.target_layers = (2, count // 2, count - 3)
        self._draft_ids = vocabulary.ids if has_lm_head else None
        self.head = new_eagle3_head(target, self._draft_ids)
        self._shared = None if has_lm_head else LMHead.of(target, vocabulary)

    def predictions(self, pack: Pack, generator: torch.Generator | None) -> Iterator[Prediction]:
        assert pack.layers is not None
        fused = self.head.fuse(pack.layers).float()
        lm_head = self._shared or LMHead(self.head.lm_head.weight)
        for out, at, count in self._unrolled(fused, pack, generator):
            tokens = self.prediction(pack, at, 2, self.head.norm(out), lm_head, num_rows=count)
            # Rows whose true token cannot be drafted would mislead.
            teacher = tokens.teacher.weighted((tokens.labels >= 0).float())
            yield replace(tokens, teacher=teacher)

    def load(self, folder: Path) -> None:
        """As `Student.load`; ConfigError if the checkpoint reads other layers of the target."""
        checkpoint = HeadCheckpoint.read(str(folder), self.target, "Eagle3")
        head, needs = load_eagle3(Eagle3Head, checkpoint)
        if needs.layers != self.target_layers:
            raise ConfigError(
                f"{folder} reads layers {needs.layers}, but this training provides "
                f"{self.target_layers}. Leave begin_with out."
            )
        self.head.load_state_dict(head.state_dict())

    def published(self) -> Mapping[str, Tensor]:
        tensors = published_tensors(self.head).items()
        return {YUHUILI.written(name): tensor for name, tensor in tensors}

    def export_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().export_weights(dtype)
        if self._draft_ids is not None:
            ids = self._draft_ids.cpu()
            drafted = torch.zeros(self.target.vocab_size, dtype=torch.bool)
            drafted[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}
        return tensors

    def config(self) -> dict[str, Any]:
        return super().config() | {"draft_vocab_size": self.head.vocabulary.size}


def _sample_dialogues(
    starts: Tensor, segments: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """The starts in randomly sampled dialogues, on average this share of all."""
    numbers, counts = segments[starts].unique(return_counts=True)
    order = torch.randperm(len(numbers), generator=generator).to(numbers.device)
    before = counts[order].cumsum(0) - counts[order]
    # The dialogue that crosses the limit is included with the probability that keeps the average.
    room = share * len(starts) - before
    uniform = torch.rand(len(numbers), generator=generator).to(room.device)
    included = numbers[order][room / counts[order] > uniform]
    return starts[torch.isin(segments[starts], included)]


def _head_spec(target: Target) -> HeadSpec:
    """A layer as wide as the target's, with its attention heads."""
    config = target.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or target.hidden_size // heads)
    intermediate = getattr(config, "intermediate_size", None) or _MLP_RATIO * target.hidden_size
    return HeadSpec(
        hidden=target.hidden_size,
        intermediate=int(intermediate),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope={"rope_type": "default", "rope_theta": _ROPE_THETA},
        rotary_dim=head_dim,
    )


def new_eagle1_head(target: Target) -> Eagle1Head:
    """An EAGLE-1 head, initialised to copy the target's feature."""
    spec = _head_spec(target)
    head = Eagle1Head(spec, DraftOutput(target), bias=True)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, spec.hidden :] += torch.eye(spec.hidden)
        head.fc.bias.zero_()
    return _init_layer(head, target)


def new_eagle3_head(target: Target, ids: Tensor | None) -> Eagle3Head:
    """An EAGLE-3 head, initialised to copy its deepest layer to the target's output matrix.

    Args:
        ids: the tokens it drafts by an output matrix of its own; None = all, by the target's.
    """
    spec = _head_spec(target)
    count = target.vocab_size if ids is None else len(ids)
    width = target.layer_width
    whole = Eagle3Spec(spec, 3, width, count)
    head = Eagle3Head(whole, DraftOutput(target) if ids is None else None)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, 2 * width :] += torch.eye(spec.hidden, width)
        if ids is not None:
            factor = LogitTransform.of(target.config).factor
            head.lm_head.weight.copy_(factor * weight_rows(target.lm_head, ids).float().cpu())
        norm = getattr(decoder_of(target.model), "norm", None)
        if isinstance(norm, nn.Module):
            head.norm.weight.copy_(_norm_weight(norm, target).float().cpu())
    return _init_layer(head, target)


def _norm_weight(norm: nn.Module, target: Target) -> Tensor:
    """What the target's final norm multiplies by; Gemma and Qwen3.5 store it with an offset."""
    # Numbers of mean 0 and mean square 1 stay as they are; a bias is the same for both signs.
    signs = torch.ones(target.hidden_size, dtype=target.dtype, device=target.device)
    signs[1::2] = -1
    weight: Tensor = (norm(signs) - norm(-signs)) / 2 * signs
    return weight


@torch.no_grad()
def _init_layer(head: _Head, target: Target) -> _Head:
    """Move a head to the target's device, share its embedding; attention and MLP start as zero."""
    head.layer.o_proj.weight.zero_()
    head.layer.down_proj.weight.zero_()
    head = head.to(target.device)
    head.embedding = TokenEmbedding.of(target.embedding)
    return head


HEAD_KEYS = ("architectures", "draft_vocab_size", "torch_dtype")
"""Settings of yuhuili's config that belong to the head, not to its layer."""


def write_speculators(folder: Path, into: Path, *, verifier: str, draft_len: int) -> None:
    """Write a head with nested config and renamed tensors, without the verifier's embedding.

    Args:
        verifier: hub id or name of the target.
        draft_len: the default number of tokens to draft.
    """
    checkpoint = read_checkpoint(str(folder))
    settings = dict(checkpoint.config)
    size = settings.get("draft_vocab_size", settings["vocab_size"])
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": size,
        "target_hidden_size": settings["hidden_size"],
        "norm_before_residual": False,
        "transformer_layer_config": {k: v for k, v in settings.items() if k not in HEAD_KEYS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "torch_dtype": settings.get("torch_dtype", "float32"),
    }
    into.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint.tensors.items()
    renamed = {YUHUILI.read(name): tensor for name, tensor in tensors}
    save_file(renamed, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
