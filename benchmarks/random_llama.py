"""Randomly initialised Llama shapes, made on the device: they cost what trained ones cost."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.model.forward import prepare_attention
from engine.tree import ChoiceTree

Sizes = dict[str, Any]
SHAPES: dict[str, Sizes] = {
    "1B": {  # Llama 3.2 1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {  # Llama 3.1 8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "32B": {  # as Qwen2.5 32B
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}


def make(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this shape with random weights, ready for tree verification."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, eos_token_id=None, bos_token_id=None
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    prepare_attention(model)
    model.eval().requires_grad_(False)
    return model


def read_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes that a plain step reads: every matrix once (of the embedding one row), keys, values."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        embedding: Any = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return int(weights + row * context * model.dtype.itemsize)


def likely_tree(nodes: int, depth: int = 5) -> ChoiceTree:
    """The likeliest `nodes` paths where rank r is right with probability 0.6 · 0.5^r per depth.

    What a tree search finds for an EAGLE head: bushy at the top, a few long paths.
    """
    paths: list[tuple[int, ...]] = []
    best: list[tuple[float, tuple[int, ...]]] = [(-0.6, (0,))]
    while len(paths) < nodes:
        chance, path = heapq.heappop(best)
        paths.append(path)
        heapq.heappush(best, (chance * 0.5, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(best, (chance * 0.6, (*path, 0)))
    return ChoiceTree(tuple(sorted(paths, key=lambda path: (len(path), path))))
