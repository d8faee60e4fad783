"""DFlash drafts the block that transformers' model fills over the whole text, at every step."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.drafters.blocks.dflash import DFlashConfig
from engine.errors import DrafterError
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import LayerFormula
from tests.models import build_context, tiny_target

SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "block_size": 5,
    "mask_token_id": 11,
    "target_layer_ids": [0, 1],
}


@functools.cache
def dflash_model(*layer_types: str) -> Any:
    config = transformers.MuseGlimmerAssistantConfig(
        **SETTINGS, layer_types=list(layer_types), sliding_window=14
    )
    torch.manual_seed(3)
    model: Any = transformers.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    model.set_attn_implementation("eager")
    return model


FULL = ("full_attention", "full_attention")
MIXED = ("sliding_attention", "full_attention")


def save_as_published(folder: Path, **changes: Any) -> str:
    """The authors' layout: a Qwen3 config with dflash_config, and their tensor names."""
    own = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    state = dflash_model(*FULL).state_dict()
    folder.mkdir()
    save_file({own.get(k, k): v for k, v in state.items()}, folder / "model.safetensors")
    names = ("mask_token_id", "target_layer_ids", "rope_parameters")
    config = {k: v for k, v in SETTINGS.items() if k not in names} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": list(FULL),
        "sliding_window": None,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "vocab_size": 288,
        "dflash_config": {k: SETTINGS[k] for k in names[:2]},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def as_speculators(location: str, **outer: Any) -> None:
    """Nest a saved config as speculators does, which names inputs of layers, not outputs."""
    file = Path(location, "config.json")
    layer = json.loads(file.read_text())
    for key in ("dflash_config", "block_size", "architectures"):
        del layer[key]
    outer |= {k: SETTINGS[k] for k in ("mask_token_id", "block_size")}
    outer["aux_hidden_state_layer_ids"] = [i + 1 for i in SETTINGS["target_layer_ids"]]
    file.write_text(json.dumps({**outer, "transformer_layer_config": layer}))


@torch.inference_mode()
def block_outputs(target: Target, model: Any, text: list[int]) -> Tensor:
    """transformers' outputs of the block after `text`, from its beginning with an empty cache."""
    from transformers.cache_utils import DFlashCache

    n, block = len(text) - 1, SETTINGS["block_size"]
    out = target.model(torch.tensor([text[:-1]]), output_hidden_states=True)
    context = torch.cat([out.hidden_states[i + 1] for i in SETTINGS["target_layer_ids"]], dim=-1)
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(n)
    ids = torch.tensor([[text[-1]] + [SETTINGS["mask_token_id"]] * (block - 1)])
    hidden: Tensor = model(
        noise_embeds=target.embedding(ids),
        context_hidden_states=context,
        position_ids=torch.arange(n + block)[None],
        cache=cache,
    ).last_hidden_state[0]
    return hidden


@torch.inference_mode()
def whole_text_draft(target: Target, model: Any, text: list[int]) -> list[int]:
    logits = target.lm_head(block_outputs(target, model, text)[1:])
    return [int(token) for token in logits.argmax(dim=-1)]


@pytest.mark.parametrize("layer_types", [FULL, MIXED])
def test_every_draft_equals_transformers_on_the_whole_text(
    tmp_path: Path, layer_types: tuple[str, ...]
):
    model = dflash_model(*layer_types)
    model.save_pretrained(tmp_path)
    target = tiny_target("llama", vocab_size=judges.SAMPLED_VOCAB, eos_token_id=None)
    drafter = DFlashConfig(speculative_model=str(tmp_path)).build(build_context(target))
    reference = functools.partial(whole_text_draft, target, model)
    prompts = ([1, 2, 3, 1, 2, 3, 4], [5])
    assert judges.assert_drafts_equal(reference, target, drafter, prompts=prompts) > 0


# ---- every setting of a published config changes the drafts as its formula says

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
    steps = judges.write(target, drafter, PROMPT, tokens=8).steps
    seen, found = [*PROMPT, judges.write(target, drafter, PROMPT, tokens=1).output[0]], []
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


def nested(**settings: Any) -> dict[str, Any]:
    return {"dflash_config": {**MASK, **settings}}


OFF = dict.fromkeys(("attention_sink_bias", "causal", "use_swa", "sample_from_anchor"), False)
SLIDING: dict[str, Any] = {"layer_types": list(MIXED), "sliding_window": 3}
ROPE = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
TWICE = {
    **dict.fromkeys(("attention_bias", "attention_sink_bias", "dflash_query_causal"), False),
    **dict.fromkeys(("train_embed_tokens", "use_cache", "sample_from_anchor"), False),
    "draft_vocab_size": None,
    "dspark_fixup_head_type": None,
    "num_aux_layers": 2,
    "has_embed_tokens": True,
    "has_lm_head": False,
    "pard_token": SETTINGS["mask_token_id"],
    "eagle_aux_hidden_state_layer_ids": [i + 1 for i in SETTINGS["target_layer_ids"]],
}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "causal": (nested(causal=True), Formula(causal=(True, True))),
    "is_causal": ({"is_causal": True}, Formula(causal=(True, True))),
    "is_causal before causal": (
        {**SLIDING, "is_causal": False, **nested(causal=True)},
        Formula(windows=(3, 10**6)),
    ),
    "sliding layers are causal": (SLIDING, Formula(windows=(3, 10**6), causal=(True, False))),
    "sliding layers that look both ways": (
        {**SLIDING, "sliding_window_non_causal": True},
        Formula(windows=(3, 10**6)),
    ),
    "use_swa": (
        {"layer_types": None, **nested(use_swa=True, swa_window_size=4)},
        Formula(windows=(4, 4)),
    ),
    "swa_window_size before sliding_window": (
        {**SLIDING, **nested(swa_window_size=2)},
        Formula(windows=(2, 10**6), causal=(True, False)),
    ),
    "sample_from_anchor": (nested(sample_from_anchor=True), Formula(first=0)),
    "final_logit_softcapping": (nested(final_logit_softcapping=3.0), Formula(softcap=3.0)),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, Formula(turned=4)),
    "partial_rotary_factor of rope_parameters": ({"rope_parameters": ROPE}, Formula(turned=4)),
    "partial_rotary_factor in both places, and old settings beside new ones": (
        {"partial_rotary_factor": 0.5, "rope_parameters": ROPE}
        | {"rope_scaling": {"rope_type": "default"}},
        Formula(turned=4),
    ),
    "everything twice, in several spellings, as NVIDIA does": (
        {**TWICE, **MASK, **nested(**OFF)},
        Formula(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_as_the_formula_says(tmp_path: Path, name: str) -> None:
    changes, formula = CASES[name]
    same = drafted(tmp_path / "changed", changes, formula) == unchanged()
    assert same == (formula == Formula())


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


# ---- what cannot be


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 16}, "hidden_size in config.json must be 16, got 32"),
        ({"num_hidden_layers": 2}, r"reads target layers \[0, 1\].*offers 0 to 0"),
        ({"vocab_size": 8}, "mask token is 11.*embeds tokens 0 to 7"),
    ],
)
def test_another_targets_model_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    dflash_model(*FULL).save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match=words):
        config = DFlashConfig(speculative_model=str(tmp_path))
        config.build(build_context(tiny_target(**settings)))


def test_what_a_checkpoint_leaves_out_may_be_set(tmp_path: Path) -> None:
    silent = save_as_published(tmp_path / "silent", dflash_config={})
    told = DFlashConfig(speculative_model=silent, mask_token_id=11, target_layer_ids=(0, 1))
    assert told.build(build_context(judges.target_of("llama"))).needs.layers == (1, 2)
