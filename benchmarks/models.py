"""Targets and drafters as the benchmarks load them, and a stand-in for a target."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

import presets
from benchmarks import TARGET
from engine.drafters.base import BuildContext, Drafter
from engine.model.loading import load_target
from engine.model.random_weights import random_model
from engine.model.sources import TargetSpec, locate
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from playground.host import paths

STAND_IN: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""As wide as the embedded model, so that the shipped heads fit, but of three layers."""


@cache
def save_stand_in() -> Path:
    """A model of random weights with the embedded model's tokenizer; gone when Python ends."""
    folder = Path(_kept().name) / "stand-in"
    model = random_model(STAND_IN, seed=0)
    model.bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(presets.FOLDER / "drafters" / "draft-smollm2-135m" / name, folder)
    return folder


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def load(
    name: str | TargetSpec, dtype: str = "auto", device: Literal["auto", "cpu"] = "auto"
) -> Target:
    """A target by preset name, folder, hub id or spec."""
    spec = presets.resolve(name) if isinstance(name, str) else name
    return load_target(spec, dtype=dtype, device=device, cache_dir=paths.cache_dir())


def build_context(target: Target) -> BuildContext:
    """Companion models are loaded beside the target, in its companion dtype."""
    device: Literal["auto", "cpu"] = "cpu" if target.device.type == "cpu" else "auto"
    return BuildContext(
        target,
        presets.resolve,
        lambda spec, **_: load(spec, target.precision.companion, device),
        locate=presets.locate,
    )


def transformers_model(target: Target) -> PreTrainedModel:
    """The same weights under transformers' own modules and attention."""
    model: PreTrainedModel = copy.deepcopy(target.model)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model


def drafter_of(target: Target, name: str) -> Drafter:
    """A preset's drafter."""
    return build_drafter(presets.methods()[name].config, build_context(target))


def encode_question(target: Target, text: str) -> list[int]:
    """A question's token ids, by the chat template if there is one."""
    if not target.has_chat_template:
        return target.encode(text)
    return target.encode_chat([{"role": "user", "content": text}])


def first_turns(target: Target, suite: presets.PromptSuite, per_category: int) -> list[list[int]]:
    """Token ids of the first `per_category` questions of each category."""
    by_category: dict[str, list[list[int]]] = {}
    for prompt in suite.prompts:
        ids = encode_question(target, prompt.turns[0])
        by_category.setdefault(prompt.category, []).append(ids)
    return [ids for category in by_category.values() for ids in category[:per_category]]


def embedded_file() -> Path:
    """The GGUF file of the embedded model, fetched where it is not here yet."""
    weights = locate(presets.resolve(TARGET), paths.cache_dir())
    return Path(weights.location) / str(weights.gguf_file)
