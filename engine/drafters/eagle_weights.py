"""Builds EAGLE heads from their checkpoints, checked against the target that they draft for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from engine.drafters.eagle_checkpoint import EagleCheckpoint
from engine.drafters.eagle_head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec, HeadSpec
from engine.errors import DrafterError, VocabularyError
from engine.model.target import Target

_Head = TypeVar("_Head", bound=DraftHead)
_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"


def load_eagle1(found: EagleCheckpoint, target: Target) -> Eagle1Head:
    """An EAGLE-1/2 head on the target's device, in its dtype.

    Raises:
        DrafterError: another method's head, or sizes that differ from the target's.
        VocabularyError: a vocabulary of another size.
    """
    if found.has("layers.0.hidden_norm.weight"):
        raise DrafterError(f"{found.location} is an EAGLE-3 head. Choose the method Eagle3.")
    found.check_vocabulary(target)
    width, vocab = target.hidden_size, target.vocab_size
    spec = _layer_spec(found, width)
    tensors = _layer_tensors(found, spec, width)
    tensors["fc.weight"] = found.take("fc.weight", width, 2 * width)
    bias = bool(found.layer_config.get("bias", True))
    if bias:
        tensors["fc.bias"] = found.take("fc.bias", width)
    head = _filled(lambda: Eagle1Head(spec, target.output, vocab=vocab, bias=bias), tensors)
    return _placed(head, found, target, width)


def load_eagle3(
    found: EagleCheckpoint, target: Target, layers: tuple[int, ...] | None = None
) -> tuple[Eagle3Head, tuple[int, ...]]:
    """An EAGLE-3 head on the target's device, in its dtype, and the layers that it reads.

    Args:
        layers: decoder layers of the target whose inputs to show it; None = as its config says.

    Raises:
        DrafterError: another method's head, sizes that differ from the target's, another number of
            layers than it reads.
        VocabularyError: it drafts tokens that the target does not know.
    """
    if not found.has("layers.0.hidden_norm.weight"):
        raise DrafterError(
            f"{found.location} is no EAGLE-3 head: it has no hidden_norm. Choose the method Eagle "
            "for EAGLE-1/2 heads."
        )
    found.check_vocabulary(target)
    layers = found.captured_layers(target) if layers is None else layers
    width = found.size("fc.weight", 0)
    layer = _layer_spec(found, width)
    spec = _eagle3_spec(found, target, layer)
    _check_layers(layers, spec, found, target)
    tensors = _layer_tensors(found, layer, 2 * width)
    tensors["fc.weight"] = found.take("fc.weight", width, spec.num_features * spec.feature_width)
    tensors["norm.weight"] = found.take("norm.weight", width)
    for name in ("hidden_norm", "input_layernorm"):
        tensors[f"{name}.weight"] = found.take(f"layers.0.{name}.weight", width)
    if spec.norm_before_fc:
        fused = spec.num_features * spec.feature_width
        tensors["input_norm.weight"] = found.take("input_norm.weight", fused)
    for i in range(spec.num_features if spec.norm_each_feature else 0):
        name = f"fc_norm.{i}.weight"
        tensors[name] = found.take(name, spec.feature_width)
    own_output = found.has("lm_head.weight")
    if own_output:
        tensors["lm_head.weight"] = found.take("lm_head.weight", spec.draft_vocab_size, width)
    lm_head = None if own_output else target.output
    head = _filled(lambda: Eagle3Head(spec, lm_head), tensors)
    head.d2t = _offsets(found, spec.draft_vocab_size, target)
    return _placed(head, found, target, width), layers


def _layer_spec(found: EagleCheckpoint, width: int) -> HeadSpec:
    heads = found.number("num_attention_heads")
    activation = str(found.layer_config.get("hidden_act", "silu"))
    if activation not in ACT2FN:
        raise DrafterError(f"{found.location} has the unknown activation {activation!r}.")
    return HeadSpec(
        hidden=width,
        intermediate=found.size(f"{_MLP}.gate_proj.weight", 0),
        heads=heads,
        kv_heads=found.number("num_key_value_heads", heads),
        head_dim=found.number("head_dim", max(1, width // heads)),
        eps=float(found.layer_config.get("rms_norm_eps", 1e-6)),
        rope=found.rope(),
        activation=activation,
        qkv_bias=found.has(f"{_ATTENTION}.q_proj.bias"),
        o_bias=found.has(f"{_ATTENTION}.o_proj.bias"),
        qk_norm=found.has(f"{_ATTENTION}.q_norm.weight"),
    )


def _layer_tensors(found: EagleCheckpoint, spec: HeadSpec, inputs: int) -> dict[str, Tensor]:
    """Weights of `HeadLayer`: query, key, value as one matrix, and so gate and up."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {f"{_ATTENTION}.q_proj": q, f"{_ATTENTION}.k_proj": kv, f"{_ATTENTION}.v_proj": kv}
    halves = (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")
    shape = (spec.intermediate, spec.hidden)
    norm = found.take("layers.0.post_attention_layernorm.weight", spec.hidden)
    tensors = {
        "layer.qkv.weight": torch.cat(
            [found.take(f"{n}.weight", m, inputs) for n, m in rows.items()]
        ),
        "layer.o_proj.weight": found.take(f"{_ATTENTION}.o_proj.weight", spec.hidden, q),
        "layer.gate_up.weight": torch.cat([found.take(name, *shape) for name in halves]),
        "layer.down_proj.weight": found.take(f"{_MLP}.down_proj.weight", *reversed(shape)),
        "layer.post_attention_norm.weight": norm,
    }
    if spec.qkv_bias:
        tensors["layer.qkv.bias"] = torch.cat([found.take(f"{n}.bias", m) for n, m in rows.items()])
    if spec.o_bias:
        tensors["layer.o_proj.bias"] = found.take(f"{_ATTENTION}.o_proj.bias", spec.hidden)
    for name in ("q_norm", "k_norm") if spec.qk_norm else ():
        tensors[f"layer.{name}.weight"] = found.take(f"{_ATTENTION}.{name}.weight", spec.head_dim)
    return tensors


def _eagle3_spec(found: EagleCheckpoint, target: Target, layer: HeadSpec) -> Eagle3Spec:
    inputs, width = found.size("fc.weight", 1), target.hidden_size
    if inputs % width:
        raise DrafterError(
            f"{found.location}: fc reads {inputs} numbers, no multiple of the hidden size {width} "
            f"of {target.name}. This drafter was made for another model."
        )
    if found.has("lm_head.weight"):
        draft_vocab = found.size("lm_head.weight", 0)
    elif layer.hidden == width:
        draft_vocab = target.vocab_size
    else:
        raise DrafterError(
            f"{found.location} has no lm_head and hidden size {layer.hidden}, so it cannot use the "
            f"target's, which needs {width}."
        )
    before_residual = found.option("norm_before_residual")
    if before_residual is None:
        before_residual = found.is_speculators
    return Eagle3Spec(
        layer=layer,
        num_features=inputs // width,
        feature_width=width,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(before_residual),
        norm_before_fc=found.has("input_norm.weight"),
        norm_each_feature=found.has("fc_norm.0.weight"),
        norm_output=bool(found.option("norm_output")),
    )


def _check_layers(
    layers: Sequence[int], spec: Eagle3Spec, found: EagleCheckpoint, target: Target
) -> None:
    if len(layers) != spec.num_features:
        raise DrafterError(
            f"{found.location} reads {spec.num_features} layers of the target, but {len(layers)} "
            "are captured. Correct eagle3_layers_to_capture."
        )
    for layer in layers:
        if not 0 <= layer <= target.num_layers:
            raise DrafterError(
                f"{found.location} reads the output of layer {layer - 1}, but {target.name} has "
                f"layers 0 to {target.num_layers - 1}. Correct eagle3_layers_to_capture."
            )


def _offsets(found: EagleCheckpoint, draft_vocab: int, target: Target) -> Tensor | None:
    """`d2t`: target id - draft id; None where the two vocabularies are the same."""
    if draft_vocab == target.vocab_size:
        if found.has("d2t"):
            found.take("d2t")
        return None
    d2t = found.take("d2t", draft_vocab).long()
    ids = torch.arange(draft_vocab) + d2t
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise VocabularyError(
            f"{found.location}: d2t names token {low if low < 0 else high}, but {target.name} has "
            f"tokens 0 to {target.vocab_size - 1}. Choose a head of this target."
        )
    return d2t


def _filled(make: Callable[[], _Head], tensors: Mapping[str, Tensor]) -> _Head:
    """A module with these weights, which never had others."""
    with torch.device("meta"):
        head = make()
    head.load_state_dict(dict(tensors), strict=True, assign=True)
    return head.requires_grad_(False).eval()


def _placed(head: _Head, found: EagleCheckpoint, target: Target, width: int) -> _Head:
    """The head on the target's device, in its dtype, with an embedding to read."""
    head = head.to(device=target.device, dtype=target.dtype)
    theirs = target.embedding.weight
    assert isinstance(theirs, Tensor)
    head.embedding_weight = theirs.detach()
    if found.has("embed_tokens.weight"):
        own = found.take("embed_tokens.weight", None, width).to(target.device, target.dtype)
        # Most heads carry a copy of the target's embedding; there is no need to keep both.
        if own.shape != theirs.shape or not torch.equal(own, theirs):
            head.embedding_weight = own
    elif width != theirs.shape[1]:
        raise DrafterError(
            f"{found.location} has no embed_tokens and hidden size {width}, so it cannot use the "
            f"target's, which has {theirs.shape[1]}."
        )
    return head
