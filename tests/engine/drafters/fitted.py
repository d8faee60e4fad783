"""Drafting heads fitted in closed form to a tiny target: they guess right some of the time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import one_hot

from engine.feature_log import features_of
from engine.model.target import Target
from engine.proposal import Needs
from tests.engine.drafters.judges import PROMPTS
from tests.models import plain_greedy


def greedy_texts(target: Target, layers: tuple[int, ...] = ()) -> Iterator[tuple[Tensor, Tensor]]:
    """Per prompt: its greedy continuation included, and the target's features of all tokens.

    Features are the inputs of `layers`; without any, the last hidden states.
    """
    needs = Needs(layers=layers) if layers else Needs(hidden=True)
    for prompt in PROMPTS:
        ids = [i % target.vocab_size for i in prompt]
        ids += plain_greedy(target, ids, 40)
        output = target.prefill(ids, target.new_cache(len(ids)), needs)
        yield torch.tensor(ids), features_of(output)


def fit(inputs: list[Tensor], token_ids: list[Tensor], vocab_size: int) -> Tensor:
    """`(vocab, width)` that maps inputs `(n, width)` to their next tokens, by least squares."""
    wanted = one_hot(torch.cat(token_ids), vocab_size).float()
    solved: Tensor = torch.linalg.lstsq(torch.cat(inputs), wanted, driver="gelsd").solution
    return 8.0 * solved.T.contiguous()


@torch.inference_mode()
def save_medusa(folder: Path, target: Target, num_heads: int) -> Path:
    """Layout 1 with one residual layer of small random weights per head."""
    size, vocab_size = target.hidden_size, target.vocab_size
    texts = list(greedy_texts(target))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(num_heads):
        weight = 0.1 * torch.randn(size, size, generator=generator)
        bias = 0.1 * torch.randn(size, generator=generator)
        rows = [hidden[: -2 - head] for _, hidden in texts]
        inputs = [x + torch.nn.functional.silu(x @ weight.T + bias) for x in rows]
        tensors[f"{head}.0.linear.weight"] = weight
        tensors[f"{head}.0.linear.bias"] = bias
        tensors[f"{head}.1.weight"] = fit(inputs, [ids[2 + head :] for ids, _ in texts], vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    return folder


@torch.inference_mode()
def save_redrafter(folder: Path, target: Target, *, drafted: int = 4) -> Path:
    """Apple's layout without recurrence, input projection and residual layers."""
    inputs, wanted = [], []
    for ids, hidden in greedy_texts(target):
        embedded = target.embedding(ids).detach()
        for step in range(1, drafted + 1):
            state = embedded.unfold(0, step, 1).sum(dim=-1)[1:-1]
            inputs.append(torch.cat([hidden[: len(state)], state], dim=-1))
            wanted.append(ids[step + 1 :])
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"lm_head.0.weight": fit(inputs, wanted, target.vocab_size)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rnn": False}))
    return folder


class Malicious:
    """Makes a folder when it is unpickled without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)
