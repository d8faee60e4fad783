"""Tiny checkpoints with random weights, in public layouts, made where nothing trained is at hand.

A model is transformers' own. What transformers does not make (draft heads, next-token layers) is a
list of tensors. Rows of output matrices shrink with the token's id, as words' frequencies do: a few
tokens are likely, letters among them, and some drafts are right by chance.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from engine.config import Settings

if TYPE_CHECKING:  # presets say what is to be made, without torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

NOTE = "Tiny model with random weights: it shows how the method works, not how fast it is."
LETTERS = " etaoinshrdlucmfwypvbgkqjxz.,"
"""Tokens 0 … 28, the likeliest first; the other bytes follow, then `ROLES`."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPREAD, DECLINE = 0.3, 0.8
"""Standard deviation of weights; row i of an output matrix is divided by (1 + i) to the power."""
Shape = Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(strict=False)]


def notes_of(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Remarks on the figures of a run with this environment."""
    random = NOTE if environment.get("random_weights") else ""
    return tuple(filter(None, (random, environment.get("remark"))))


class RandomCheckpoint(Settings):
    """A checkpoint by its config.json and its tensors."""

    config: dict[str, Any] = Field({}, description="config.json")
    tensors: dict[str, Shape] = Field(
        {}, description="shapes by name; {a,b} in a name stands for several names"
    )


class RandomSource(RandomCheckpoint):
    """A model of the family that its config names, further tensors in its file, and drafters."""

    seed: int = Field(0, ge=0, le=2**31)
    drafters: dict[str, RandomCheckpoint] = Field(
        {}, description="checkpoints in folders within the model's own"
    )


def save_source(source: RandomSource, folder: Path) -> None:
    model = random_model(source.config, seed=source.seed, decline=DECLINE)
    model.save_pretrained(folder)
    add_tensors(folder, source.tensors, seed=source.seed)
    byte_tokenizer().save_pretrained(folder)
    for name, drafter in source.drafters.items():
        save_checkpoint(drafter, folder / name, seed=source.seed)


def save_checkpoint(checkpoint: RandomCheckpoint, folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    add_tensors(folder, checkpoint.tensors, seed=seed)


def add_tensors(folder: Path, shapes: Mapping[str, Shape], *, seed: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    if not shapes:
        return
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    tensors = load_file(file) if file.exists() else {}
    for pattern, shape in shapes.items():
        for name in expanded(pattern):
            tensors[name] = torch.ones(shape)
            if len(shape) > 1:  # vectors are norms' weights
                _fill(name, tensors[name], generator, DECLINE)
    save_file(tensors, file, metadata={"format": "pt"})


def expanded(pattern: str) -> Iterator[str]:
    """All names that a pattern stands for.

    Example: `layers.{0,1}.{q,k}_proj` → layers.0.q_proj, layers.0.k_proj, layers.1.q_proj, …
    """
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return map("".join, itertools.product(*parts))


def random_model(config: Mapping[str, Any], *, seed: int, decline: float = 0.0) -> Any:
    """transformers' causal language model in float32, with no near-ties in greedy decoding."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    _fill(name, parameter, None, decline)
    return model


def _fill(name: str, tensor: Tensor, generator: Any, decline: float) -> None:
    tensor.normal_(0.0, SPREAD, generator=generator)
    if name.endswith("lm_head.weight"):
        tensor.div_((1.0 + tensor.new_ones(len(tensor), 1).cumsum(0)) ** decline)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so characters of several bytes span tokens; 260 tokens in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    first = LETTERS.replace(" ", "Ġ")
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first))
    vocab = {letter: i for i, letter in enumerate([*first, *others])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": list(ROLES), "eos_token": "<|end|>"})
    fast.chat_template = CHAT_TEMPLATE
    return fast
