"""DFlash: every setting of a published config changes the drafts as its formula says."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.drafters.blocks.dflash import DFlashConfig
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import LayerFormula
from tests.engine.drafters.judges import write
from tests.engine.drafters.test_dflash import (
    FULL,
    MIXED,
    SETTINGS,
    as_speculators,
    save_as_published,
)
from tests.models import build_context

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 4, 3]
MASK = {k: SETTINGS[k] for k in ("mask_token_id", "target_layer_ids")}


@dataclass
class Formula(LayerFormula):
    """What a block model computes, a row at a time."""

    eps: float = 1e-6
    windows: tuple[int, int] = (10**6, 10**6)
    causal: tuple[bool, bool] = (False, False)
    first: int = 1
    softcap: float = 0.0

    def sees(self, i: int, at: int, j: int) -> bool:
        """Whether row `at` attends to row `j` in layer i."""
        return abs(at - j) < self.windows[i] and (j <= at or not self.causal[i])

    def logits(self, target: Target, w: dict[str, Tensor], text: list[int]) -> Tensor:
        """Of every place of the block after `text`."""
        states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in SETTINGS["target_layer_ids"]], dim=-1)
        context = [self.norm(w["fc.weight"] @ row, w["hidden_norm.weight"]) for row in features]
        ids = [text[-1]] + [SETTINGS["mask_token_id"]] * (SETTINGS["block_size"] - 1)
        embedded = w.get("embed_tokens.weight", target.embedding.get_parameter("weight"))
        block = [embedded[token] for token in ids]
        for i in range(2):
            normed = [self.norm(row, w[f"layers.{i}.input_layernorm.weight"]) for row in block]
            sees = functools.partial(self.sees, i)
            block = self.layer(w, f"layers.{i}", [*context, *normed], block, sees)
        rows = torch.stack([self.norm(row, w["norm.weight"]) for row in block[self.first :]])
        logits = rows @ w.get("lm_head.weight", target.lm_head.get_parameter("weight")).T
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


@torch.inference_mode()
def drafted(folder: Path, changes: dict[str, Any], formula: Formula) -> list[Any]:
    """Drafts of a checkpoint with such a config, which are held against the formula."""
    target = judges.target_of("llama")
    location = save_as_published(folder, **changes)
    weights = load_file(folder / "model.safetensors")
    drafter = DFlashConfig(speculative_model=location).build(build_context(target))
    steps = write(target, drafter, PROMPT, tokens=8).steps
    seen, found = [*PROMPT, write(target, drafter, PROMPT, tokens=1).output[0]], []
    for step in steps[:3]:
        probs = formula.logits(target, weights, seen).softmax(-1)[: step.num_drafted]
        best = probs.max(-1)
        assert list(step.tokens[1:]) == best.indices.tolist()
        assert step.num_drafted == SETTINGS["block_size"] - formula.first
        torch.testing.assert_close(
            torch.tensor(step.draft_probs[1:]), best.values, atol=1e-4, rtol=1e-3
        )
        found.append((step.tokens, [round(p or 0, 4) for p in step.draft_probs[1:]]))
        seen += step.committed
    return found


@functools.cache
def unchanged() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return drafted(Path(folder) / "plain", {}, Formula())


SLIDING: dict[str, Any] = {"layer_types": list(MIXED), "sliding_window": 3}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "causal": (
        {"dflash_config": {**MASK, "causal": True}},
        Formula(causal=(True, True)),
    ),
    "is_causal": ({"is_causal": True}, Formula(causal=(True, True))),
    "is_causal before causal": (
        {**SLIDING, "is_causal": False, "dflash_config": {**MASK, "causal": True}},
        Formula(windows=(3, 10**6)),
    ),
    "sliding layers are causal": (
        SLIDING,
        Formula(windows=(3, 10**6), causal=(True, False)),
    ),
    "sliding layers that look both ways": (
        {**SLIDING, "sliding_window_non_causal": True},
        Formula(windows=(3, 10**6)),
    ),
    "use_swa": (
        {"layer_types": None, "dflash_config": {**MASK, "use_swa": True, "swa_window_size": 4}},
        Formula(windows=(4, 4)),
    ),
    "swa_window_size before sliding_window": (
        {**SLIDING, "dflash_config": {**MASK, "swa_window_size": 2}},
        Formula(windows=(2, 10**6), causal=(True, False)),
    ),
    "sample_from_anchor": (
        {"dflash_config": {**MASK, "sample_from_anchor": True}},
        Formula(first=0),
    ),
    "final_logit_softcapping": (
        {"dflash_config": {**MASK, "final_logit_softcapping": 3.0}},
        Formula(softcap=3.0),
    ),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, Formula(turned=4)),
    "partial_rotary_factor of rope_parameters": (
        {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        Formula(turned=4),
    ),
    "partial_rotary_factor in both places, and old settings beside new ones": (
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "rope_scaling": {"rope_type": "default"},
        },
        Formula(turned=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_as_the_formula_says(tmp_path: Path, name: str) -> None:
    changes, formula = CASES[name]
    assert drafted(tmp_path / "changed", changes, formula) != unchanged()


@torch.inference_mode()
@pytest.mark.parametrize("own_output", [True, False])
def test_a_reduced_vocabulary_of_speculators_loads(tmp_path: Path, own_output: bool) -> None:
    """Nested layer config, inputs of layers, d2t and t2d, own embeddings, and own lm_head or
    those rows of the target's."""
    target, size = judges.target_of("llama"), 96
    location = Path(save_as_published(tmp_path / "own"))
    as_speculators(
        str(location),
        architectures=["DFlashDraftModel"],
        speculators_model_type="dflash",
        speculators_version="0.5.0",
        speculators_config={"algorithm": "dflash", "verifier": {"name_or_path": "x"}},
        draft_vocab_size=size,
        target_hidden_size=None,
        max_anchors=3072,
    )
    weights = load_file(location / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    kept = torch.arange(size) * 3
    weights["embed_tokens.weight"] = torch.randn(
        target.embedding.get_parameter("weight").shape, generator=generator
    )
    weights["d2t"] = kept - torch.arange(size)
    weights["t2d"] = torch.isin(torch.arange(target.vocab_size), kept)
    if own_output:
        weights["lm_head.weight"] = torch.randn(size, 32, generator=generator)
    save_file(weights, location / "model.safetensors")
    drafter = DFlashConfig(speculative_model=str(location)).build(build_context(target))
    if not own_output:
        weights["lm_head.weight"] = target.lm_head.get_parameter("weight")[kept]
    judges.assert_drafts_equal(
        lambda text: kept[Formula().logits(target, weights, text).argmax(-1)].tolist(),
        target,
        drafter,
        prompts=[PROMPT],
        tokens=8,
    )


def test_a_published_config_with_everything_twice_loads(tmp_path: Path) -> None:
    """NVIDIA's config says most of it at its top and in dflash_config, and in several spellings."""
    said = {
        "attention_bias": False,
        "attention_sink_bias": False,
        "dflash_query_causal": False,
        "draft_vocab_size": None,
        "dspark_fixup_head_type": None,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in SETTINGS["target_layer_ids"]],
        "has_embed_tokens": True,
        "has_lm_head": False,
        "layer_types": list(FULL),
        "mask_token_id": SETTINGS["mask_token_id"],
        "num_aux_layers": 2,
        "pard_token": SETTINGS["mask_token_id"],
        "target_layer_ids": SETTINGS["target_layer_ids"],
        "train_embed_tokens": False,
        "use_cache": False,
        "sample_from_anchor": False,
        "dflash_config": {**MASK, "attention_sink_bias": False, "causal": False, "use_swa": False}
        | {"sample_from_anchor": False},
    }
    assert drafted(tmp_path / "nvidia", said, Formula()) == unchanged()
