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

from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.proposal import Needs
from engine.steps import End, Step
from tests.models import plain_greedy

PROMPTS = ([5, 9, 200, 31], [77], list(range(40, 60)))


def greedy_texts(target: Target, num_tokens: int = 40) -> Iterator[tuple[Tensor, Tensor]]:
    """Per prompt: the prompt with its greedy continuation, and the last hidden states of all."""
    for prompt in PROMPTS:
        ids = prompt + plain_greedy(target, prompt, num_tokens)
        output = target.prefill(ids, target.new_cache(len(ids)), Needs(hidden=True))
        assert output.hidden is not None
        yield torch.tensor(ids), output.hidden


def fit(inputs: list[Tensor], token_ids: list[Tensor], vocab_size: int) -> Tensor:
    """`(vocab, width)` that maps inputs `(n, width)` to their next tokens, by least squares."""
    wanted = one_hot(torch.cat(token_ids), vocab_size).float()
    solved: Tensor = torch.linalg.lstsq(torch.cat(inputs), wanted, driver="gelsd").solution
    return 8.0 * solved.T.contiguous()


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


def decoded(
    target: Target, drafter: Drafter, prompt: list[int], num_tokens: int = 32
) -> tuple[tuple[int, ...], int]:
    """Output ids of a greedy run (it may end at EOS), and how many draft tokens were accepted."""
    *records, end = decode(target, drafter, prompt, limits=Limits(max_new_tokens=num_tokens))
    assert isinstance(end, End)
    return end.output_ids, sum(r.num_accepted for r in records if isinstance(r, Step))


def accepted_in_greedy_texts(target: Target, drafter: Drafter) -> int:
    """Every prompt is continued as by transformers alone; the number of accepted draft tokens."""
    total = 0
    for prompt in PROMPTS:
        output, num_accepted = decoded(target, drafter, prompt)
        assert list(output) == plain_greedy(target, prompt, 32)
        total += num_accepted
    return total


class Malicious:
    """Makes a folder when it is unpickled without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)
