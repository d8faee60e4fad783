"""Writes tiny random models as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from tests.models import tiny_model, tiny_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "qwen3_moe": "qwen3moe"}
"""Where transformers names a family otherwise."""


def write_gguf(
    path: Path,
    kind: str = "Q4_1",
    family: str = "llama",
    *,
    scale: float = 1.0,
    about: Mapping[str, str | int] | None = None,
    control: str | None = None,
    rope_factors: Sequence[float] = (),
    **overrides: Any,
) -> Path:
    """A model with all matrices of its layers of one type, its embedding in Q8_0.

    Types that the format's own package cannot write get random blocks.

    Args:
        scale: of its matrices.
        about: further fields, such as `general.name`.
        control: text of the last token but one, a control token; None = a plain token.
        rope_factors: divisors of the rotary frequencies.
    """
    model = tiny_model(family, **{**SIZES, **overrides})
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    for field, content in (about or {}).items():
        if isinstance(content, str):
            writer.add_string(field, content)
        else:
            writer.add_uint32(field, content)
    _write_fields(writer, architecture, model.config, control)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    (arch,) = (one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in name:
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            stacks = (scale * tensor.detach().float()).chunk(len(parts), dim=1)
            for part, values in zip(parts, stacks, strict=True):
                _add(writer, f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", values, kind)
            continue
        value = _as_kept(architecture, stem, tensor.detach().float(), model.config)
        is_matrix = value.ndim > 1
        value = value * scale if is_matrix else value
        own = "Q8_0" if "embed" in name or "lm_head" in name else kind
        _add(writer, f"{names.get_name(stem)}.{suffix}", value, own if is_matrix else "F32")
    finish(writer)
    return path


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bytes are valid blocks; only their floats are made small numbers."""
    generator = np.random.default_rng(seed)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    if kind == "MXFP4":  # the scale's exponent
        blocks[..., 0] = 110 + blocks[..., 0] % 8
        return blocks.reshape(rows, -1)
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0,))
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        at = (0, 2)
    for place in at:
        small = (0.0002 * generator.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[..., place : place + 2] = small[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _as_kept(architecture: str, stem: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Llama's queries and keys are turned by neighbours, and Gemma's norms are not less 1."""
    interleaved = architecture in ("llama", "smollm3", "granite")
    if interleaved and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
        return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if architecture.startswith("gemma") and "norm" in stem:
        return value + 1
    return value


def _add(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    plain = tensor.numpy().astype(np.float32)
    raw_dtype = gguf.GGMLQuantizationType[kind]
    try:
        data = plain if kind == "F32" else gguf.quants.quantize(plain, raw_dtype)
    except NotImplementedError:
        *stack, columns = plain.shape
        data = random_blocks(kind, math.prod(stack), columns, seed=len(name))
        data = data.reshape(*stack, -1)
    writer.add_tensor(name, data, raw_dtype=raw_dtype)


def _write_fields(writer: Any, architecture: str, config: Any, control: str | None) -> None:
    values = {**config.to_dict(), **(config.rope_parameters or {})}
    values |= values.pop("full_attention", {})  # Gemma 3's rotary positions, by kind of layer
    known = "llama" if architecture in ("smollm3", "olmo2", "granite") else architecture
    known = "qwen3_moe" if architecture == "qwen3moe" else known
    fields: dict[str, str | None] = GGUF_CONFIG_MAPPING[known]  # type: ignore[assignment]
    for field, name in fields.items():
        value = values.get(name, getattr(config, name, None)) if name else None
        if isinstance(value, bool) or value is None:
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{field}", value)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    tokens = [f"<pad{i}>" for i in range(config.vocab_size)]
    for token, index in tiny_tokenizer().get_vocab().items():
        tokens[index] = token
    tokens[-2:] = [control or tokens[-2], "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3 if control else 1, 1])
    writer.add_token_merges(["a b"])
    for add in (writer.add_eos_token_id, writer.add_bos_token_id, writer.add_pad_token_id):
        add(256)
    writer.add_unk_token_id(256)
