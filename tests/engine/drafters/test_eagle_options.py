"""EAGLE-3: every setting of a published config changes the drafts as its formula says."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.config import Limits
from engine.drafters.eagle.methods import Eagle3Config
from engine.drafters.texts import TargetTrace, Text
from engine.model.target import Target
from engine.proposal import Needs
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import (
    LayerFormula,
    config_of,
    save_eagle3,
    write,
)
from tests.models import build_context, plain_greedy

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 4, 3]
TREE = {"use_dynamic_tree": True, "max_draft_len": 4, "dynamic_tree_max_topK": 2}
TREE |= {"max_total_draft_tokens": 9}


@dataclass
class Formula(LayerFormula):
    """What a head computes, a row at a time."""

    window: int = 10**6
    last_state: bool = False

    def output(
        self, w: dict[str, Tensor], target: Target, rows: list[tuple[Tensor, int]]
    ) -> Tensor:
        """Of the last of rows `(hidden, token)`, which sees the last ones in its window."""
        embedding = target.embedding.get_parameter("weight")
        inputs = [
            torch.cat(
                [
                    self.norm(embedding[token], w["midlayer.input_layernorm.weight"]),
                    self.norm(hidden, w["midlayer.hidden_norm.weight"]),
                ]
            )
            for hidden, token in rows
        ]
        return self.layer(w, "midlayer", inputs, [rows[-1][0]], lambda at, j: at - j < self.window)[
            0
        ]

    def base(
        self, w: dict[str, Tensor], target: Target, text: list[int]
    ) -> list[tuple[Tensor, int]]:
        """The base entries of a text."""
        states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        if self.last_state:
            fused = states[-1][0]
        else:
            fused = torch.cat([states[i][0] for i in (1, 2)], dim=-1) @ w["fc.weight"].T
        return list(zip(fused, text[1:], strict=True))

    def probs(
        self, w: dict[str, Tensor], target: Target, rows: list[tuple[Tensor, int]]
    ) -> tuple[Tensor, Tensor]:
        """The last row's output, and probabilities of all tokens of the target after it."""
        out = self.output(w, target, rows)
        logits = w["lm_head.weight"] @ self.norm(out, w["norm.weight"])
        ids = torch.arange(len(logits)) + w["d2t"]
        return out, torch.zeros(target.vocab_size).index_copy(0, ids, logits.softmax(-1))


def save(folder: Path, target: Target, *, last_state: bool = False, **changes: Any) -> Path:
    save_eagle3(folder, target, (1, 2), draft_vocab=20)
    tensors = load_file(folder / "m.safetensors")
    if last_state:
        del tensors["fc.weight"]
    settings = config_of(target, draft_vocab_size=20, eagle_aux_hidden_state_layer_ids=[1, 2])
    settings = {k: v for k, v in settings.items() if not (last_state and "aux" in k)}
    if not last_state:  # inputs: a first layer 1 would count outputs
        changes = {"eagle_aux_hidden_state_layer_ids": [0, 1], **changes}
    return write(folder, tensors, {**settings, **changes})


@torch.inference_mode()
def drafted(folder: Path, changes: dict[str, Any], formula: Formula, **tree: Any) -> list[Any]:
    """First trees of a head with such a config, every node held against the formula."""
    target = judges.target_of("llama")
    settings = {"speculative_model": str(save(folder, target, **changes)), **tree}
    if not formula.last_state:
        settings["eagle3_layers_to_capture"] = [0, 1]
    drafter = Eagle3Config.parse(settings).build(build_context(target))
    assert drafter.needs == (Needs(hidden=True) if formula.last_state else Needs(layers=(1, 2)))
    weights = load_file(folder / "m.safetensors")
    text = judges.write(target, drafter, PROMPT, tokens=8)
    seen, found = [*PROMPT, text.output[0]], []
    for step in text.steps[:2]:
        # Rows that lead to each node, the node's own token not among them.
        rows = {0: formula.base(weights, target, seen)}
        after = {0: formula.probs(weights, target, rows[0])}
        for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
            if node:
                out, probs = after[parent]
                assert step.draft_probs[node] == pytest.approx(float(probs[token]), abs=1e-4)
                rows[node] = [*rows[parent], (out, token)]
                after[node] = formula.probs(weights, target, rows[node])
        found.append((step.tokens, [round(p or 0, 4) for p in step.draft_probs[1:]]))
        seen += step.committed
    return found


@functools.cache
def unchanged(tree: bool) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return drafted(Path(folder) / "plain", {}, Formula(), **(TREE if tree else {}))


WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention"], "sliding_window": 3}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "sliding_window": (WINDOW, Formula(window=3)),
    "a window of one row": ({**WINDOW, "sliding_window": 1}, Formula(window=1)),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, Formula(turned=4)),
    "use_aux_hidden_state": (
        {"last_state": True, "eagle_config": {"use_aux_hidden_state": False}},
        Formula(last_state=True),
    ),
}


@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_change_as_the_formula_says(tmp_path: Path, name: str, tree: dict[str, Any]) -> None:
    changes, formula = CASES[name]
    assert drafted(tmp_path, changes, formula, **tree) != unchanged(bool(tree))


def test_a_window_without_sliding_layers_changes_nothing(tmp_path: Path) -> None:
    heads: list[dict[str, Any]] = [
        {"sliding_window": 3, "use_sliding_window": False, "max_window_layers": 28},
        {"sliding_window": 3, "layer_types": ["full_attention"]},
    ]
    for i, says in enumerate(heads):
        drafted(tmp_path / str(i), says, Formula())


@torch.inference_mode()
def test_ranks_along_a_text_see_the_window_alone(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    head = str(save(tmp_path, target, **WINDOW))
    config = Eagle3Config(speculative_model=head, eagle3_layers_to_capture=(0, 1))
    drafter = config.build(build_context(target))
    output = plain_greedy(target, PROMPT, 12)
    tokens = [*PROMPT, *output]
    layers = target.prefill(tokens, target.new_cache(len(tokens)), drafter.needs).layers
    text = Text(tuple(PROMPT), tuple(output), limits=Limits())
    reading = TargetTrace(text, torch.tensor(tokens), layers=layers, context_len=target.context_len)
    ids = drafter.head.vocabulary.ids
    assert ids is not None
    found, wanted = drafter.ranks(reading, 3), reading.true_tokens(3)
    weights, formula = load_file(tmp_path / "m.safetensors"), Formula(window=3)
    for root in range(3):
        rows = formula.base(weights, target, tokens[: len(PROMPT) + root + 1])
        for depth in range(3):
            out, probs = formula.probs(weights, target, rows)
            true = int(wanted[root, depth])
            if true in ids:
                assert int(found[root, depth]) == int((probs > probs[true]).sum())
            rows = [*rows, (out, true)]
