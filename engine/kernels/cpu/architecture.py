"""Which models the fused forward knows, and how it takes their weights over."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from engine.kernels.cpu.decoder import Decoder, FusedForward, Heads, Layer
from engine.kernels.cpu.gguf_matrices import GGUFMatrices
from engine.kernels.cpu.native import EVEN, NativeForward
from engine.kernels.cpu.packing import FourBitPacker, NativePacker, Packer
from engine.kernels.cpu.rotary import RotaryTable
from engine.kernels.cpu.shares import stack
from engine.model.forward import Forward, MaskBuilder
from engine.model.gguf import GGUFFile

KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Exactly these: a subclass may differ in any line."""
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of the text."""


def why_not(model: PreTrainedModel) -> str | None:
    """What the fused forward lacks for this model, in words; None if nothing."""
    reason = unknown(model)
    if reason is not None:
        return reason
    if model.device.type != "cpu":
        return f"the model is on {model.device}, not on the processor"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"{str(model.dtype).removeprefix('torch.')} has no fast products on a processor"
    return None


def unknown(model: PreTrainedModel) -> str | None:
    """What is no `Decoder` about this model, in words, wherever it is; None if nothing."""
    config = model.config.get_text_config()
    if type(model) not in KNOWN:
        return f"{type(model).__name__} is computed by transformers' modules"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    rotary: Any = model.base_model.rotary_emb
    if rotary.rope_type not in FIXED_ROTARY:
        return f"its rotary positions ({rotary.rope_type}) depend on the length of the text"
    if 2 * len(rotary.inv_freq) != _head_dim(model):
        return "its rotary positions cover a part of each head only"
    return None


def fuse(model: PreTrainedModel, packer: Packer | None = None) -> Forward:
    """The fused forward of a model that `why_not` has nothing against.

    The weights move: the model's linear modules become shares of the packed matrices. Its output
    matrix is held both packed and plain, because embedding, drafters and trainers read its rows.
    """
    packer = packer or Packer(model.dtype)
    decoder = take_over(model, packer)
    base: Any = model.base_model
    name = packer.finish()
    if isinstance(packer, NativePacker):
        rotary = RotaryTable(base.rotary_emb, torch.float32)
        return NativeForward(packer.kernels, decoder, rotary, name=name)
    rotary = RotaryTable(base.rotary_emb, model.dtype)
    return FusedForward(decoder, rotary, MaskBuilder(model), name=name)


def why_not_native(model: PreTrainedModel) -> str | None:
    """What the compiled kernels lack for a model that can be fused, in words; None if nothing."""
    config = model.config.get_text_config()
    if model.dtype != torch.bfloat16:
        return f"they compute in bfloat16, not {str(model.dtype).removeprefix('torch.')}"
    kinds = {getattr(layer.self_attn, "layer_type", None) for layer in _layers(model)}
    if "sliding_attention" in kinds or getattr(config, "sliding_window", None) is not None:
        return "they have no sliding-window attention"
    sizes = (_head_dim(model), config.hidden_size, config.intermediate_size)
    if any(size % EVEN for size in sizes):
        return f"heads and layers must be multiples of {EVEN} wide, got {sizes}"
    return None


def take_over(model: PreTrainedModel, packer: Packer) -> Decoder:
    """A model's weights, stacked; its linear modules become shares of them."""
    config = model.config.get_text_config()
    base: Any = model.base_model
    layers = tuple(_layer(layer, i, packer) for i, layer in enumerate(base.layers))
    return Decoder(
        embedding=base.embed_tokens.weight.detach(),
        layers=layers,
        norm=base.norm.weight.detach(),
        lm_head=stack(model, ["lm_head"], packer.pack, keep=True),
        heads=Heads(
            query=config.num_attention_heads,
            key=config.num_key_value_heads,
            dim=_head_dim(model),
            scale=base.layers[0].self_attn.scaling,
        ),
        eps=base.norm.variance_epsilon,
    )


def choose_packer(
    model: PreTrainedModel, kernels: ctypes.CDLL | None, gguf: Path | None, *, keep_many: bool
) -> Packer:
    """The packer of a model that can be fused.

    Args:
        kernels: the compiled ones, if they take this model.
        gguf: the file whose 4-bit matrices are to be kept; None = floats.
        keep_many: hold those in bfloat16 too where torch's kernel needs that to be fast.
    """
    matrices = None if gguf is None else GGUFMatrices(GGUFFile(gguf), _head_dim(model))
    if kernels is not None:
        return NativePacker(kernels, matrices)
    if matrices is not None:
        return FourBitPacker(matrices, keep_many=keep_many)
    return Packer(model.dtype)


def _layer(layer: Any, index: int, packer: Packer) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    per_head = [getattr(attention, f"{part}_norm", None) for part in "qk"]
    query_norm, key_norm = (None if norm is None else norm.weight.detach() for norm in per_head)
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=packer.layer(attention, index, ["q_proj", "k_proj", "v_proj"]),
        query_norm=query_norm,
        key_norm=key_norm,
        out=packer.layer(attention, index, ["o_proj"]),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=packer.layer(mlp, index, ["gate_proj", "up_proj"]),
        down=packer.layer(mlp, index, ["down_proj"]),
        kind=getattr(attention, "layer_type", None) or "full_attention",
    )


def _layers(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    return base.layers


def _head_dim(model: PreTrainedModel) -> int:
    return int(_layers(model)[0].self_attn.head_dim)
