"""Tiny random models of several families, and a tiny tokenizer, made in memory for tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.drafters.base import BuildContext
from engine.model.forward import prepare_attention
from engine.model.target import Target

VOCAB = 288
"""256 bytes, then special tokens and a few merges, padded."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "mistral": {"sliding_window": 12},
    "gemma2": {"head_dim": 8, "sliding_window": 12},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
}


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random fp32 model of a family, sharp enough that greedy decoding has no near-ties."""
    settings = {**_SMALL, **FAMILIES.get(family, {}), **overrides}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every byte is a token, so multi-byte characters span tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(
        {
            "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
            "eos_token": "<|end|>",
        }
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_target(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Target:
    """A tiny random target with its tokenizer."""
    model = tiny_model(family, seed=seed, **overrides)
    prepare_attention(model)
    return Target(model, tiny_tokenizer(), name=f"tiny-{family}")


def build_context(target: Target, **named: Target) -> BuildContext:
    """A build_context that resolves the given names to the given (already loaded) models."""
    from engine.model.sources import TargetSpec

    def resolve(name: str) -> TargetSpec:
        if name in named:
            return TargetSpec(name=name, hub="test/" + name)
        return TargetSpec.of_path_or_hub(name)

    return BuildContext(target, resolve, lambda spec, **where: named[spec.name])


def save_tiny(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """A tiny model with its tokenizer in a local folder."""
    tiny_model(family, seed=seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def plain_greedy(target: Target, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The reference: `transformers.generate(do_sample=False)` with transformers' own attention."""
    model = target.model
    ours = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(ours)
    return [int(i) for i in out[0, len(prompt_ids) :]]
