"""EAGLE heads as they are published: their layouts, their configs, and the target they name.

yuhuili (EAGLE-1/2)   layers.0.*, fc, embed_tokens
yuhuili (EAGLE-3)     midlayer.*, fc, norm, lm_head, d2t, t2d
NVIDIA (ModelOpt)     the same with layers.0.*; no t2d; lm_head only if the head has its own
speculators           as NVIDIA's, with embed_tokens; the layer's config is nested, and the
                      config names the verifier that the head was trained for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from engine.drafters.eagle.head import DraftHead, Eagle1Head, Eagle3Head, Eagle3Spec, HeadSpec
from engine.errors import DrafterError, VocabularyError
from engine.model.checkpoints import Checkpoint
from engine.model.target import Target

PADDING = 0.01
"""Vocabularies whose sizes differ by at most this share differ by padding at the end."""
_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_UNUSED = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "embed_tokens.")
_Head = TypeVar("_Head", bound=DraftHead)


class EagleCheckpoint:
    """A head's tensors under NVIDIA's names, and its config wherever each format keeps it.

    Attributes:
        layer_config: the config of the head's layer.

    Raises:
        DrafterError: the head is of a kind that is not drafted from here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.location = checkpoint.location
        nested = checkpoint.config.get("transformer_layer_config")
        self.is_speculators = isinstance(nested, Mapping)
        self.layer_config: Mapping[str, Any] = (
            nested if isinstance(nested, Mapping) else checkpoint.config
        )
        self._config = checkpoint.config
        self._checkpoint = checkpoint
        self._names = {name.replace("midlayer.", "layers.0."): name for name in checkpoint.tensors}
        self._taken: set[str] = set()
        self._refuse_unsupported()

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int | None) -> Tensor:
        """A tensor that must have this shape (`Checkpoint.tensor`)."""
        self._taken.add(name)
        return self._checkpoint.tensor(self._names.get(name, name), *shape)

    def size(self, name: str, dim: int) -> int:
        """Extent of a matrix that others are checked against."""
        return self.take(name, None, None).shape[dim]

    def option(self, key: str) -> Any:
        """A setting of the head: at the top, or in `eagle_config` as NVIDIA writes it."""
        value = self._config.get(key)
        return (self._config.get("eagle_config") or {}).get(key) if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of the layer's config.

        Raises:
            DrafterError: missing, or no positive number.
        """
        value = self.layer_config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise DrafterError(
                f"{self.location}: {key} in config.json must be a positive number, got {value}."
            )
        return value

    def rope(self) -> Mapping[str, Any]:
        """transformers' `rope_parameters` from any spelling; the head's own, not the target's.

        Raises:
            DrafterError: frequencies that change with the length of the text.
        """
        config = self.layer_config
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.pop("type", None) or "default"
        rope.setdefault("rope_type", kind)
        rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
        if rope["rope_type"] not in _ROPE_TYPES:
            raise DrafterError(
                f"{self.location} uses {rope['rope_type']} rotary positions; heads may use "
                f"{', '.join(sorted(_ROPE_TYPES))}."
            )
        return rope

    def captured_layers(self, target: Target) -> tuple[int, ...]:
        """Decoder layers of the target whose *inputs* an EAGLE-3 head reads.

        Configs count in two ways: outputs of layers (NVIDIA's, first one 1) or inputs (vLLM's and
        speculators', first one 2 or later); input i is output i - 1.

        Raises:
            DrafterError: none are named, and the target has too few layers for the default.
        """
        named = self.option("eagle_aux_hidden_state_layer_ids")
        if named:
            return tuple(i + 1 for i in named) if named[0] == 1 else tuple(named)
        count = target.num_layers
        if count < 7:
            raise DrafterError(
                "EAGLE-3 reads three different layers, for which its default needs a target of at "
                f"least 7 layers, but {target.name} has {count}. Name the layers in "
                "eagle3_layers_to_capture."
            )
        return 2, count // 2, count - 3

    def check_vocabulary(self, target: Target) -> None:
        """Refuse a head for another vocabulary; sizes may differ by padding at the end.

        Raises:
            VocabularyError: naming both sizes.
        """
        stated = self.layer_config.get("vocab_size")
        found = {"vocab_size in config.json": stated} if isinstance(stated, int) else {}
        for name in ("embed_tokens.weight", "t2d"):
            if self.has(name):
                found[name] = len(self._checkpoint.tensors[self._names[name]])
        for name, size in found.items():
            too_short = name == "embed_tokens.weight" and size < target.vocab_size
            if too_short or abs(size - target.vocab_size) > PADDING * target.vocab_size:
                raise VocabularyError(
                    f"{self.location} was made for {size} tokens ({name}), but {target.name} has "
                    f"{target.vocab_size}. Choose a head of this target."
                )

    def remarks(self, target: Target) -> tuple[str, ...]:
        """What a person should know about this pairing, though it runs; ask after all `take`s."""
        said: list[str] = []
        named = (self._config.get("speculators_config") or {}).get("verifier") or {}
        verifier = named.get("name_or_path")
        ours = (target.name, str(getattr(target.config, "_name_or_path", None) or target.name))
        if isinstance(verifier, str) and _short_name(verifier) not in map(_short_name, ours):
            said.append(f"{self.location} was trained for {verifier}, not for {target.name}.")
        unread = [n for n in self._names if n not in self._taken and not n.startswith(_UNUSED)]
        if unread:
            said.append(f"{self.location} has weights that are not used: {', '.join(unread[:4])}.")
        return tuple(said)

    def _refuse_unsupported(self) -> None:
        layers = {name.split(".")[1] for name in self._names if name.startswith("layers.")}
        if len(layers) > 1:
            raise DrafterError(
                f"{self.location} has {len(layers)} layers, but EAGLE heads have 1 layer here."
            )
        if self._config.get("quantization_config"):
            raise DrafterError(f"{self.location} is quantized. Use its bf16 or fp16 original.")
        if self.option("use_aux_hidden_state") is False:
            raise DrafterError(
                f"{self.location} reads one layer of the target (use_aux_hidden_state is false), "
                "which this method does not draft from. Use a head that reads several layers."
            )


def _short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()


def load_eagle1(found: EagleCheckpoint, target: Target) -> Eagle1Head:
    """An EAGLE-1/2 head on the target's device, in its dtype."""
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
