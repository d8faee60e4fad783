"""Loads EAGLE heads and checks that they were made for the target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.eagle.parallel_head import ParallelHead
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.layer import HeadSpec
from engine.drafters.heads.output import DraftOutput
from engine.drafters.heads.vocabulary import Vocabulary
from engine.errors import DrafterError, VocabularyError
from engine.model.target import Target

PADDING = 0.01
"""Vocabularies whose sizes differ by at most this share differ by padding at the end."""
_UNUSED = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "embed_tokens.")
_Head = TypeVar("_Head", bound=DraftHead)
_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Head)


def load_eagle1(
    found: HeadCheckpoint,
    target: Target,
    draft_vocab: int | None = None,
    token_map: str | None = None,
) -> Eagle1Head:
    """An EAGLE-1/2 head on the target's device, in its dtype.

    Args:
        draft_vocab, token_map: as `size` and `named` of `Vocabulary.beside`.
    """
    if found.has("layers.0.hidden_norm.weight"):
        raise DrafterError(f"{found.location} is an EAGLE-3 head. Choose the method Eagle3.")
    _check(found, target)
    spec, bias = found.layer_spec(target.hidden_size), found.layers.bias
    output = DraftOutput(target, Vocabulary.beside(found.location, target, draft_vocab, token_map))
    head = found.load(lambda: Eagle1Head(spec, output, vocab=target.vocab_size, bias=bias), target)
    return _with_embedding(head, found, target, spec.hidden)


def load_eagle3(
    found: HeadCheckpoint, target: Target, layers: tuple[int, ...] | None = None
) -> tuple[Eagle3Head, tuple[int, ...]]:
    """An EAGLE-3 head on the target's device, in its dtype, and the layers that it reads.

    Args:
        layers: decoder layers of the target whose inputs to show it; None = as its config says.
    """
    _check_is_eagle3(found)
    if found.has("mask_hidden"):
        raise DrafterError(f"{found.location} is a P-EAGLE head. Choose the method P_EAGLE.")
    _check(found, target)
    return _loaded(Eagle3Head, found, target, layers)


def load_parallel(
    found: HeadCheckpoint, target: Target, layers: tuple[int, ...] | None = None
) -> tuple[ParallelHead, tuple[int, ...]]:
    """As `load_eagle3`, of a head with any number of layers and a vector for masked features."""
    _check_is_eagle3(found)
    if not found.has("mask_hidden"):
        raise DrafterError(
            f"{found.location} has no mask_hidden, so it does not draft blocks. Choose the method "
            "Eagle3."
        )
    count = _check(found, target, one_layer=False)
    masked = found.take("mask_hidden").flatten()
    head, layers = _loaded(functools.partial(ParallelHead, count), found, target, layers)
    width = head.fc.weight.shape[1]
    if len(masked) != width:
        raise DrafterError(
            f"{found.location}: mask_hidden has {len(masked)} numbers, but fc reads {width}. "
            "It is damaged; copy it again."
        )
    head.mask_hidden = masked[None].to(target.device, target.dtype)
    return head, layers


def _check_is_eagle3(found: HeadCheckpoint) -> None:
    if not found.has("layers.0.hidden_norm.weight"):
        raise DrafterError(
            f"{found.location} is not an EAGLE-3 head: it has no hidden_norm. Choose the method "
            "Eagle "
            "for EAGLE-1/2 heads."
        )


def _loaded(
    make: Callable[[Eagle3Spec, DraftOutput | None], _Eagle3],
    found: HeadCheckpoint,
    target: Target,
    layers: tuple[int, ...] | None,
) -> tuple[_Eagle3, tuple[int, ...]]:
    if not found.options.use_aux_hidden_state:
        raise DrafterError(
            f"{found.location} reads one layer of the target (use_aux_hidden_state is false), "
            "which this method does not draft from. Use a head that reads several layers."
        )
    layers = layers or _captured_layers(found, target)
    spec = _eagle3_spec(found, target, found.layer_spec(found.size("fc.weight", 0)))
    _check_layers(layers, spec, found, target)
    lm_head = None if found.has("lm_head.weight") else DraftOutput(target)
    head = found.load(lambda: make(spec, lm_head), target)
    head.vocabulary = draft_vocabulary(found, spec.draft_vocab_size, target)
    return _with_embedding(head, found, target, spec.layer.hidden), layers


def remarks(found: HeadCheckpoint, target: Target) -> tuple[str, ...]:
    """What a person should know about this pairing, though it runs; ask after loading."""
    said: list[str] = []
    named = found.options.speculators_config.get("verifier")
    verifier = named.get("name_or_path") if isinstance(named, Mapping) else None
    ours = (target.name, str(getattr(target.config, "_name_or_path", None) or target.name))
    if isinstance(verifier, str) and _short_name(verifier) not in map(_short_name, ours):
        said.append(f"{found.location} was trained for {verifier}, not for {target.name}.")
    unread = [name for name in found.unread if not name.startswith(_UNUSED)]
    if unread:
        said.append(f"{found.location} has weights that are not used: {', '.join(unread[:4])}.")
    return tuple(said)


def _short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()


def _check(found: HeadCheckpoint, target: Target, *, one_layer: bool = True) -> int:
    """Number of layers; heads of several are refused, and of a vocabulary that is not padded."""
    layers = {name.split(".")[1] for name in found.unread if name.startswith("layers.")}
    if one_layer and len(layers) > 1:
        raise DrafterError(
            f"{found.location} has {len(layers)} layers, but EAGLE heads have 1 layer here."
        )
    stated = found.layers.vocab_size
    sizes = {} if stated is None else {"vocab_size in config.json": stated}
    for name in ("embed_tokens.weight", "t2d"):
        if found.has(name):
            sizes[name] = len(found.take(name))
    for name, size in sizes.items():
        too_short = name == "embed_tokens.weight" and size < target.vocab_size
        if too_short or abs(size - target.vocab_size) > PADDING * target.vocab_size:
            raise VocabularyError(
                f"{found.location} was made for {size} tokens ({name}), but {target.name} has "
                f"{target.vocab_size}. Choose a head of this target."
            )
    return len(layers)


def _captured_layers(found: HeadCheckpoint, target: Target) -> tuple[int, ...]:
    """Decoder layers of the target whose *inputs* the head reads, as its config says.

    Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
    speculators', first one 2 or later); input i is output i - 1.
    """
    named = found.options.eagle_aux_hidden_state_layer_ids
    if named:
        return tuple(i + 1 for i in named) if named[0] == 1 else named
    count = target.num_layers
    if count < 7:
        raise DrafterError(
            "EAGLE-3 reads three different layers, for which its default needs a target of at "
            f"least 7 layers, but {target.name} has {count}. Name the layers in "
            "eagle3_layers_to_capture."
        )
    return 2, count // 2, count - 3


def _eagle3_spec(found: HeadCheckpoint, target: Target, layer: HeadSpec) -> Eagle3Spec:
    inputs, width = found.size("fc.weight", 1), target.hidden_size
    if inputs % width:
        raise DrafterError(
            f"{found.location}: fc reads {inputs} numbers, no multiple of the hidden size {width} "
            f"of {target.name}. This drafter was made for another model."
        )
    own_output = found.has("lm_head.weight")
    if not own_output and layer.hidden != width:
        raise DrafterError(
            f"{found.location} has no lm_head and hidden size {layer.hidden}, so it cannot use the "
            f"target's, which needs {width}."
        )
    if not own_output and found.has("d2t") and len(found.take("d2t", None)) != target.vocab_size:
        raise DrafterError(
            f"{found.location} drafts tokens of its own (d2t), but lacks lm_head.weight. "
            "It is damaged; copy it again."
        )
    before_residual = found.options.norm_before_residual
    return Eagle3Spec(
        layer=layer,
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=found.size("lm_head.weight", 0) if own_output else target.vocab_size,
        norm_before_residual=found.is_speculators if before_residual is None else before_residual,
        norm_before_fc=found.has("input_norm.weight"),
        norm_each_feature=found.has("fc_norm.0.weight"),
        norm_output=found.options.norm_output,
    )


def _check_layers(
    layers: tuple[int, ...], spec: Eagle3Spec, found: HeadCheckpoint, target: Target
) -> None:
    count, correct = target.num_layers, "Correct eagle3_layers_to_capture."
    if len(layers) != spec.num_features:
        raise DrafterError(
            f"{found.location} reads {spec.num_features} layers of the target, but {len(layers)} "
            f"are captured. {correct}"
        )
    beyond = [layer - 1 for layer in layers if not 0 <= layer <= count]
    if beyond:
        raise DrafterError(
            f"{found.location} reads the output of layer {beyond[0]}, but {target.name} has "
            f"layers 0 to {count - 1}. {correct}"
        )


def draft_vocabulary(found: HeadCheckpoint, draft_vocab: int, target: Target) -> Vocabulary:
    """By `d2t`, which holds target id - draft id; where there are as many, they are the same."""
    if draft_vocab == target.vocab_size:
        found.unread.pop("d2t", None)
        return Vocabulary(None, target.vocab_size)
    d2t = found.take("d2t", draft_vocab).long()
    ids = torch.arange(draft_vocab) + d2t
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise VocabularyError(
            f"{found.location}: d2t names token {low if low < 0 else high}, but {target.name} has "
            f"tokens 0 to {target.vocab_size - 1}. Choose a head of this target."
        )
    return Vocabulary(ids.to(target.device), target.vocab_size)


def _with_embedding(head: _Head, found: HeadCheckpoint, target: Target, width: int) -> _Head:
    head.embedding_weight = own_embedding(found, target, width)
    return head


def own_embedding(found: HeadCheckpoint, target: Target, width: int) -> Tensor:
    """A drafter's embedding `(tokens, width)`; the target's where it has none of its own."""
    theirs = target.embedding.weight
    assert isinstance(theirs, Tensor)
    if found.has("embed_tokens.weight"):
        own = found.take("embed_tokens.weight", None, width).to(target.device, target.dtype)
        # Most carry a copy of the target's; there is no need to keep both.
        if own.shape != theirs.shape or not torch.equal(own, theirs):
            return own
    elif width != theirs.shape[1]:
        raise DrafterError(
            f"{found.location} has no embed_tokens and hidden size {width}, so it cannot use the "
            f"target's, which has {theirs.shape[1]}."
        )
    return theirs.detach()
