"""Writes tiny random Llamas as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.kernels.cpu.weights import QuantizedWeights, rotary_order
from tests.models import tiny_model, tiny_tokenizer


def write_gguf(path: Path, kind: str = "Q4_1", **overrides: Any) -> Path:
    """A Llama with all matrices of its layers of one type, its embedding in Q8_0."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    model = tiny_model("llama", **{**sizes, **overrides})
    writer = gguf.GGUFWriter(path, "llama")
    _write_fields(writer, model.config)
    _add(writer, "token_embd.weight", model.model.embed_tokens.weight, "Q8_0")
    _add(writer, "output_norm.weight", model.model.norm.weight, "F32")
    for i, layer in enumerate(model.model.layers):
        for name, theirs in QuantizedWeights.NAMES.items():
            module = getattr(layer.self_attn, name, None) or getattr(layer.mlp, name)
            weight = module.weight.detach()
            if name in ("q_proj", "k_proj"):
                turned = torch.empty_like(weight)
                turned[rotary_order(len(weight), model.config.head_dim)] = weight
                weight = turned
            _add(writer, f"blk.{i}.{theirs}.weight", weight, kind)
        _add(writer, f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight, "F32")
        _add(writer, f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    plain = tensor.detach().numpy().astype(np.float32)
    raw_dtype = getattr(gguf.GGMLQuantizationType, kind)
    data = plain if kind == "F32" else gguf.quants.quantize(plain, raw_dtype)
    writer.add_tensor(name, data, raw_dtype=raw_dtype)


def _write_fields(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = [f"<pad{i}>" for i in range(config.vocab_size)]
    for token, index in tiny_tokenizer().get_vocab().items():
        tokens[index] = token
    tokens[-1] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
