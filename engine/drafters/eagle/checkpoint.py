"""Loads EAGLE heads and checks that they were made for the target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec
from engine.drafters.eagle.parallel_head import ParallelHead
from engine.drafters.heads.checkpoint import UNUSED, HeadCheckpoint
from engine.drafters.heads.output import DraftOutput
from engine.drafters.heads.vocabulary import Vocabulary
from engine.errors import DrafterError, VocabularyError
from engine.model.target import Target
from engine.proposal import Needs

_UNUSED = (*UNUSED, "embed_tokens.")
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
    window = _windows(found, target)[0]
    spec = replace(found.layer_spec(target.hidden_size), window=window)
    bias = found.config.bias
    output = DraftOutput(target, Vocabulary.beside(found.location, target, draft_vocab, token_map))
    head = found.load(lambda: Eagle1Head(spec, output, vocab=target.vocab_size, bias=bias), target)
    return _finished(head, found, target, spec.hidden)


def load_eagle3(
    found: HeadCheckpoint, target: Target, layers: tuple[int, ...] | None = None
) -> tuple[Eagle3Head, Needs]:
    """An EAGLE-3 head on the target's device, in its dtype, and what of the target it reads.

    Args:
        layers: decoder layers of the target whose inputs to show it; None = as its config says.
    """
    _check_is_eagle3(found)
    if found.has("mask_hidden"):
        raise DrafterError(f"{found.location} is a P-EAGLE head. Choose the method P_EAGLE.")
    return _loaded(Eagle3Head, found, target, layers, _windows(found, target))


def load_parallel(
    found: HeadCheckpoint,
    target: Target,
    layers: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
) -> tuple[ParallelHead, Needs]:
    """As `load_eagle3`, of a head with any number of layers and a vector for masked features.

    Args:
        mask_token_id: token at masked places; None = as its config says.
    """
    _check_is_eagle3(found)
    if not found.has("mask_hidden"):
        raise DrafterError(
            f"{found.location} has no mask_hidden, so it does not draft blocks. Choose the method "
            "Eagle3."
        )
    windows = _windows(found, target, one_layer=False)
    masked = found.take("mask_hidden").flatten()
    mask = found.mask_token(mask_token_id, found.num_embeddings(target))
    make = functools.partial(ParallelHead, windows)
    head, needs = _loaded(make, found, target, layers, windows)
    width = head.spec.feature_width * max(1, head.spec.num_features)
    if len(masked) != width:
        raise DrafterError(
            f"{found.location}: mask_hidden has {len(masked)} numbers, but {width} are read of the "
            "target. It is damaged; copy it again."
        )
    head.mask_token = mask
    head.mask_hidden = masked[None].to(target.device, target.dtype)
    return head, needs


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
    windows: tuple[int | None, ...],
) -> tuple[_Eagle3, Needs]:
    vocabulary, own_output = draft_vocabulary(found, target)
    spec = _eagle3_spec(found, target, vocabulary.size, windows[0])
    if not own_output and vocabulary.ids is not None:
        raise DrafterError(
            f"{found.location} drafts tokens of its own (d2t), but lacks lm_head.weight. "
            "It is damaged; copy it again."
        )
    needs = Needs(hidden=True)
    if spec.num_features:
        needs = Needs(layers=_captured_layers(found, target, layers))
        _check_layers(needs.layers, spec, found, target)
    elif layers:
        raise DrafterError(
            f"{found.location} reads the target's last hidden state only (use_aux_hidden_state is "
            "false). Leave eagle3_layers_to_capture out."
        )
    lm_head = None if own_output else DraftOutput(target)
    head = found.load(lambda: make(spec, lm_head), target)
    head.vocabulary = vocabulary
    return _finished(head, found, target, spec.layer.hidden), needs


def remarks(found: HeadCheckpoint, target: Target) -> tuple[str, ...]:
    """What a person should know about this pairing, though it runs; ask after loading."""
    said: list[str] = []
    named = found.config.speculators_config.get("verifier")
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


def _windows(
    found: HeadCheckpoint, target: Target, *, one_layer: bool = True
) -> tuple[int | None, ...]:
    """The window of each layer; heads of several are refused, and of another vocabulary."""
    count = len({name.split(".")[1] for name in found.unread if name.startswith("layers.")})
    if one_layer and count > 1:
        raise DrafterError(
            f"{found.location} has {count} layers, but EAGLE heads have 1 layer here."
        )
    found.agree(num_hidden_layers=count)
    found.check_vocabulary(target)
    return found.windows(count)


def _captured_layers(
    found: HeadCheckpoint, target: Target, named: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Decoder layers of the target whose *inputs* the head reads: as named, or by its config.

    Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
    speculators', first one 2 or later); input i is output i - 1.
    """
    stated = found.config.eagle_aux_hidden_state_layer_ids
    if named:
        return named
    if stated:
        return tuple(i + 1 for i in stated) if stated[0] == 1 else stated
    count = target.num_layers
    if count < 7:
        raise DrafterError(
            "EAGLE-3 reads three different layers, for which its default needs a target of at "
            f"least 7 layers, but {target.name} has {count}. Name the layers in "
            "eagle3_layers_to_capture."
        )
    return 2, count // 2, count - 3


def _eagle3_spec(
    found: HeadCheckpoint, target: Target, draft_vocab_size: int, window: int | None
) -> Eagle3Spec:
    config, width = found.config, target.hidden_size
    reads_layers, has_fc = config.use_aux_hidden_state, found.has("fc.weight")
    if has_fc and not reads_layers:
        raise DrafterError(
            f"{found.location}'s config.json says that use_aux_hidden_state is false, but "
            "fc.weight fuses several layers. It is damaged; copy it again."
        )
    inputs = found.size("fc.weight", 1) if reads_layers else 0
    if inputs % width:
        raise DrafterError(
            f"{found.location}: fc reads {inputs} numbers, no multiple of the hidden size {width} "
            f"of {target.name}. This drafter was made for another model."
        )
    layer = found.layer_spec(found.size("fc.weight", 0) if reads_layers else width)
    if not found.has("lm_head.weight") and layer.hidden != width:
        raise DrafterError(
            f"{found.location} has no lm_head and hidden size {layer.hidden}, so it cannot use the "
            f"target's, which needs {width}."
        )
    before_residual = config.norm_before_residual
    return Eagle3Spec(
        layer=replace(layer, window=window),
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=found.is_speculators if before_residual is None else before_residual,
        norm_before_fc=found.option("norm_before_fc", "input_norm.weight"),
        norm_each_feature=found.option("fc_norm", "fc_norm.0.weight"),
        norm_output=config.norm_output,
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


def draft_vocabulary(found: HeadCheckpoint, target: Target) -> tuple[Vocabulary, bool]:
    """The tokens that it drafts, and whether it has an output matrix of its own for them.

    By `d2t`, which holds target id - draft id; where there are as many, they are the same.
    """
    own_output, size = found.has("lm_head.weight"), target.vocab_size
    if own_output:
        size = found.size("lm_head.weight", 0)
    elif found.has("d2t"):
        size = len(found.take("d2t", None))
    found.agree(draft_vocab_size=size)
    if size == target.vocab_size:
        found.unread.pop("d2t", None)
        return Vocabulary(None, size), own_output
    ids = torch.arange(size) + found.take("d2t", size).long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise VocabularyError(
            f"{found.location}: d2t names token {low if low < 0 else high}, but {target.name} has "
            f"tokens 0 to {target.vocab_size - 1}. Choose a head of this target."
        )
    return Vocabulary(ids.to(target.device), target.vocab_size), own_output


def _finished(head: _Head, found: HeadCheckpoint, target: Target, width: int) -> _Head:
    head.embedding_weight = own_embedding(found, target, width)
    found.check_config_read()
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
