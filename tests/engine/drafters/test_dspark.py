"""DSpark drafts what DFlash's layers and the head's own formula say, token after token."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.drafters.blocks.dspark import DSparkConfig
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.judges import PROMPTS, write
from tests.engine.drafters.test_dflash import (
    FULL,
    SETTINGS,
    as_speculators,
    block_outputs,
    dflash_model,
    save_as_published,
)
from tests.models import build_context

RANK, KINDS = 6, ("vanilla", "gated", "rnn")
SIZE, HIDDEN = 288, int(SETTINGS["hidden_size"])


@functools.cache
def markov(kind: str, size: int = SIZE, vocab: int = SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {"markov_w1.weight": random(vocab, RANK), "markov_w2.weight": random(size, RANK)}
    rows = {"gated": ("gate_proj", RANK, HIDDEN + RANK)}
    rows["rnn"] = ("joint_proj", 3 * RANK, 2 * RANK + HIDDEN)
    if kind in rows:
        name, out, inputs = rows[kind]
        found |= {f"{name}.weight": random(out, inputs) / 4, f"{name}.bias": random(out)}
    return found


def save(
    folder: Path, kind: str = "vanilla", *, size: int = SIZE, vocab: int = SIZE, **config: Any
) -> str:
    """DeepSeek's layout: DFlash's tensors and config, and the heads beside them."""
    config |= {"markov_head_type": kind, "markov_rank": RANK, "vocab_size": vocab}
    location = save_as_published(folder, **config)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        f"markov_head.{name}": tensor
        for name, tensor in markov(kind, min(size, vocab), vocab).items()
    }
    tensors |= {"confidence_head.proj.weight": torch.ones(1, HIDDEN + RANK)}
    if size != SIZE:
        target = judges.target_of("llama")
        kept = torch.arange(size) * 3
        tensors |= {"lm_head.weight": target.lm_head.get_parameter("weight").detach()[kept].clone()}
        tensors |= {"d2t": kept - torch.arange(size), "t2d": torch.isin(torch.arange(SIZE), kept)}
    save_file(tensors, folder / "model.safetensors")
    return location


@torch.inference_mode()
def whole_text_draft(
    target: Target, text: list[int], kind: str, *, first: int = 0, ids: Tensor | None = None
) -> list[int]:
    """As the authors write it: base logits of the block, then token after token."""
    hidden = block_outputs(target, dflash_model(*FULL), text)[first:]
    weights = markov(kind, SIZE if ids is None else len(ids))
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    base = target.lm_head(hidden)
    base = base if ids is None else base[:, ids]
    token, state, drafted = text[-1], torch.zeros(RANK), []
    for h, u in zip(hidden, base, strict=True):
        e = w1[token]
        if kind == "gated":
            pair = torch.cat([h, e])
            e = e * torch.sigmoid(weights["gate_proj.weight"] @ pair + weights["gate_proj.bias"])
        if kind == "rnn":
            joint = torch.cat([state, e, h])
            joint = weights["joint_proj.weight"] @ joint + weights["joint_proj.bias"]
            gate, candidate, e = joint[:RANK].sigmoid(), joint[RANK:-RANK].tanh(), joint[-RANK:]
            state, e = gate * state + (1 - gate) * candidate, e.tanh()
        best = int((u + w2 @ e).argmax())
        token = best if ids is None else int(ids[best])
        drafted.append(token)
    return drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anchor", [True, False])
def test_every_draft_is_the_formula_s_on_the_whole_text(
    tmp_path: Path, kind: str, anchor: bool
) -> None:
    target = judges.target_of("llama")
    location = save(tmp_path / "own", kind, sample_from_anchor=anchor)
    drafter = DSparkConfig(speculative_model=location).build(build_context(target))
    reference = functools.partial(whole_text_draft, target, kind=kind, first=0 if anchor else 1)
    judges.assert_drafts_equal(reference, target, drafter, prompts=PROMPTS[:2], tokens=16)
    steps = write(target, drafter, PROMPTS[0]).steps
    assert {step.num_drafted for step in steps} == {5 if anchor else 4}


def test_a_draft_vocabulary_and_speculators_config(tmp_path: Path) -> None:
    """Nested layer config, inputs of layers instead of outputs, 96 of the target's tokens."""
    target = judges.target_of("llama")
    location = save(tmp_path / "own", size=96)
    as_speculators(
        location,
        speculators_model_type="dspark",
        layer_types=list(FULL),
        draft_vocab_size=96,
    )
    drafter = DSparkConfig(speculative_model=location).build(build_context(target))
    reference = functools.partial(
        whole_text_draft, target, kind="vanilla", ids=torch.arange(96) * 3
    )
    judges.assert_drafts_equal(reference, target, drafter, prompts=PROMPTS[:1], tokens=12)


def test_a_tree_s_chain_is_the_chain(tmp_path: Path) -> None:
    target, location = judges.target_of("llama"), save(tmp_path / "own", "gated")
    chain, tree = (
        write(target, config.build(build_context(target)), PROMPTS[0])
        for config in (
            DSparkConfig(speculative_model=location),
            DSparkConfig(speculative_model=location, use_dynamic_tree=True),
        )
    )
    first, grown = chain.steps[0], tree.steps[0]
    assert len(grown.tokens) == 33
    node, path = 0, []
    while children := [c for c, p in enumerate(grown.parents) if p == node and c]:
        node = next(c for c in children if grown.ranks[c] == 0)
        path.append(grown.tokens[node])
    assert path == list(first.tokens[1 : len(path) + 1])
