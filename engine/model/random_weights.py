"""Tiny checkpoints with random weights in public layouts, for demonstrations and tests.

Models are transformers' own. What transformers does not create (draft heads, multi-token prediction
layers) is a list of tensors. Rows of output matrices shrink with the token's id, as words'
frequencies do: a few tokens are probable, letters among them, and some drafts are right by chance.
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

if TYPE_CHECKING:  # presets describe checkpoints without importing torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

NOTE = "Tiny model with random weights: it shows how the method works, not how fast it is."
LETTERS = " etaoinshrdlucmfwypvbgkqjxz.,"
"""Tokens 0 … 28, the most probable first; the other bytes follow, then `ROLES`."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPREAD, DECLINE = 0.3, 0.8
"""Standard deviation of weights; row i of an output matrix is divided by (1 + i) ** DECLINE."""
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
    """A model given by its config, additional tensors in its file, and drafters."""

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
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(drafter.config), encoding="utf-8")
        add_tensors(folder / name, drafter.tensors, seed=source.seed)


def add_tensors(folder: Path, shapes: Mapping[str, Shape], *, seed: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    if not shapes:
        return
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    tensors = load_file(file, backend="pread") if file.exists() else {}
    for pattern, shape in shapes.items():
        for name in expand_names(pattern):
            tensors[name] = torch.ones(shape)
            if len(shape) > 1:  # vectors are norms' weights
                _fill(name, tensors[name], generator, DECLINE)
    save_file(tensors, file, metadata={"format": "pt"})


def expand_names(pattern: str) -> Iterator[str]:
    """The names that a pattern with {a,b} stands for.

    Example: `layers.{0,1}.{q,k}_proj` → layers.0.q_proj, layers.0.k_proj, layers.1.q_proj, …
    """
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return map("".join, itertools.product(*parts))


def random_model(config: Mapping[str, Any], *, seed: int, decline: float = 0.0) -> Any:
    """A causal language model of transformers in float32, with no near-ties in greedy decoding."""
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
    """A tokenizer of 260 tokens, a token per byte: multi-byte characters span tokens."""
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
