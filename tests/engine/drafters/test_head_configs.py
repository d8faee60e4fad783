"""A drafter's config.json is read whole: what nobody reads of it is refused by name."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.drafters import methods, parse_method
from engine.drafters.base import Drafter
from engine.errors import ConfigError, DrafterError, VocabularyError
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.engine.methods import save_head
from tests.models import build_context, save_tiny, tiny_target

DRAFTERS: dict[str, tuple[str, str]] = {
    "EAGLE-1": ("Eagle", "eagle/eagle1/head"),
    "EAGLE-2": ("Eagle", "eagle/eagle2/head"),
    "EAGLE-3": ("Eagle3", "eagle/eagle3/head"),
    "EAGLE-3, whole vocabulary": ("Eagle3", "eagle/eagle3/head_fullvocab"),
    "EAGLE-3, tiny": ("Eagle3", ""),
    "Medusa": ("Medusa", "medusa/case_a/head"),
    "Medusa, version 2": ("Medusa", "medusa/case_a/head_v2"),
    "ReDrafter": ("ReDrafter", "redrafter/case_a_rnn/head"),
    "ReDrafter without recurrence": ("ReDrafter", "redrafter/case_b_norn_inputproj/head"),
    **{
        name: (name, "") for name in ("DFlash", "DSpark", "P_EAGLE", "PARD", "MTP_Assistant", "MTP")
    },
}
"""Name → method and its golden checkpoint; made here where there is none."""
HEADS = ["EAGLE-2", "EAGLE-3", "Medusa", "ReDrafter", "DFlash"]


class Checkpoint:
    """A target, and the folder of a drafter made for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.method, golden = DRAFTERS[name]
        self.folder = folder / "head"
        self.settings: dict[str, Any] = {"speculative_model": str(self.folder)}
        if golden:
            shutil.copytree(ROOT / golden, self.folder)
            self.target = golden_case(golden.rpartition("/")[0]).target
        elif self.method == "MTP":
            save_deepseek(self.folder, num_mtp_layers=1)
            self.settings = {}
        else:
            family = "gemma4_text" if self.method == "MTP_Assistant" else "llama"
            self.target = tiny_target(family, eos_token_id=None)
        if self.method == "PARD":
            save_tiny(self.folder, eos_token_id=None, pard_token=270)
        elif self.settings and not golden:
            save_head(self.method, self.folder, self.target)
        if name == "EAGLE-3, tiny":
            self.settings["eagle3_layers_to_capture"] = [0, 1, 2]

    def config(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return settings

    def change(self, **changes: Any) -> None:
        (self.folder / "config.json").write_text(json.dumps({**self.config(), **changes}))

    def build(self) -> Drafter:
        named: dict[str, Target] = {}
        if self.method == "PARD":  # its model is loaded as any target is
            spec = TargetSpec(name="small", path=str(self.folder))
            small = load_target(spec, dtype="float32", device="cpu", cache_dir=self.folder)
            named = {str(self.folder): small}
        if self.method == "MTP":
            self.target = load_deepseek(self.folder)
        method = parse_method({"decoding_type": self.method, **self.settings})
        return method.build(build_context(self.target, **named))


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_unknown_key_is_refused_by_name(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    checkpoint.build()
    key = "mtp_gate" if name == "MTP" else "attention_gate"
    checkpoint.change(**{key: 0.5})
    with pytest.raises(
        DrafterError, match=rf"config.json says {key}: 0.5, which this method does not"
    ):
        checkpoint.build()
    checkpoint.change(**{key: None})
    checkpoint.build()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_freed_with_the_last_reference(tmp_path: Path, name: str) -> None:
    """Not by a later garbage collection: the next drafter's weights need the memory."""
    checkpoint = Checkpoint(name, tmp_path)
    drafter = checkpoint.build()
    judges.write(checkpoint.target, drafter, [7, 8, 9, 7, 8], tokens=4)
    own = weakref.ref(drafter)
    del drafter
    assert own() is None


@pytest.mark.parametrize("name", HEADS)
def test_what_transformers_and_trainers_write_is_harmless(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    usual = transformers.PreTrainedConfig().to_dict()
    usual |= {"_name_or_path": "x", "_attn_implementation": "eager", "unsloth_version": "2026.1"}
    usual |= {"torch_dtype": "bfloat16", "transformers_version": "4.28.1", "pretraining_tp": 1}
    usual |= {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    usual |= {"speculators_version": "0.5.0", "embed_requires_grad": True, "max_anchors": 3072}
    usual |= {"auto_map": {"AutoModel": "x.Y"}, "bad_words_ids": [[1]], "temperature": 1.0}
    checkpoint.change(**{**usual, **checkpoint.config()})
    checkpoint.build()


@pytest.mark.parametrize(
    ("key", "fine", "wrong"),
    [
        ("attention_sink_bias", False, True),
        ("add_swa_attention_sink_bias", False, True),
        ("input_embedding_scale", 1.0, 8.0),
        ("use_aux_hidden_state", True, False),
        ("norm_output", False, True),
        ("attention_mode", "gqa", "mla"),
        ("mlp_bias", False, True),
    ],
)
def test_a_switch_that_is_off_is_harmless_and_one_that_is_on_is_named(
    tmp_path: Path, key: str, fine: Any, wrong: Any
) -> None:
    checkpoint = Checkpoint("DFlash", tmp_path)
    checkpoint.change(**{key: fine})
    checkpoint.build()
    checkpoint.change(**{key: wrong})
    with pytest.raises(DrafterError, match=f"says {key}: "):
        checkpoint.build()


SLIDING = ["sliding_attention"]
MISSING = "but there is no tensor"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("EAGLE-2", {"bias": None}, r"has no tensor fc\.bias"),  # silence means that there is one
    # a key in a section
    ("EAGLE-3", {"eagle_config": {"block_gate": True}}, "says block_gate: True"),
    ("EAGLE-3", {"dflash_config": {"block_gate": True}}, "says block_gate: True"),
    ("EAGLE-3", {"transformer_layer_config": {"block_gate": True}}, "says block_gate: True"),
    # what no layer can compute
    ("EAGLE-3", {"num_attention_heads": None}, "num_attention_heads"),
    ("EAGLE-3", {"num_attention_heads": "four"}, "num_attention_heads"),
    ("EAGLE-3", {"hidden_act": "wiggle"}, "wiggle"),
    ("EAGLE-3", {"quantization_config": {"bits": 4}}, "quantized"),
    ("EAGLE-3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    # what the tensors contradict
    ("EAGLE-3, tiny", {"norm_before_fc": True}, f"norm_before_fc, {MISSING} input_norm.weight"),
    ("EAGLE-3, tiny", {"fc_norm": True}, f"sets fc_norm, {MISSING} fc_norm.0.weight"),
    ("EAGLE-3, tiny", {"attention_bias": True}, f"attention_bias, {MISSING} .*q_proj.bias"),
    ("EAGLE-3, tiny", {"use_qk_norm": True}, f"use_qk_norm, {MISSING} .*q_norm.weight"),
    ("EAGLE-3, tiny", {"use_aux_hidden_state": False}, "hidden_state is false, but fc.weight"),
    ("EAGLE-3, tiny", {"eagle_config": {"use_aux_hidden_state": False}}, "is false, but fc.weight"),
    ("EAGLE-3, tiny", {"layer_types": SLIDING}, "no sliding_window. Add it"),
    ("EAGLE-3, tiny", {"layer_types": 2 * SLIDING}, "layer_types .* must name 1 layers"),
    ("EAGLE-3, tiny", {"partial_rotary_factor": 0.1}, "must rotate an even number"),
    ("EAGLE-3, tiny", {"hidden_size": 48}, "hidden_size in config.json must be 32, got 48"),
    ("EAGLE-3, tiny", {"draft_vocab_size": 21}, "draft_vocab_size .* must be 64, got 21"),
    ("EAGLE-3, tiny", {"target_hidden_size": 64}, "target_hidden_size .* must be 32, got 64"),
    ("ReDrafter", {"rnn": False}, "rnn in config.json must be True, got False"),
    ("ReDrafter", {"num_draft_layers": 3}, "num_draft_layers .* must be 2, got 3"),
    ("ReDrafter", {"exit_dim": 64}, "exit_dim in config.json must be 128, got 64"),
    ("ReDrafter", {"num_lookback_tokens": 4}, "says num_lookback_tokens: 4"),
    ("DFlash", {"num_target_layers": 7}, "num_target_layers .* must be 3, got 7"),
    ("DFlash", {"target_hidden_size": 7}, "target_hidden_size .* must be 32, got 7"),
    ("DFlash", {"vocab_size": 7777}, "was made for 7777 tokens"),
    ("DFlash", {"intermediate_size": 40}, r"layers.0.mlp.gate_proj.weight is 48×32, .* 40×32"),
    ("DFlash", {"num_hidden_layers": 1, "layer_types": None}, "num_hidden_layers .* be 2, got 1"),
    ("DFlash", {"mask_token_id": 12}, "says mask_token_id twice: 12 and 11"),
    *(
        ("DFlash", {"layer_types": 2 * SLIDING, "sliding_window": size}, "no sliding_window. Add")
        for size in (None, 0, -1)
    ),
    ("DSpark", {"markov_head_type": "cubic"}, "'vanilla', 'gated' or 'rnn', got 'cubic'"),
    # what says too little
    ("DFlash", {"dflash_config": {}}, "has no mask token.*or set mask_token_id"),
    ("DFlash", {"block_size": None}, "has no block_size.*not a DFlash checkpoint.$"),
    ("P_EAGLE", {"ptd_token_id": None}, "has no mask token"),
    ("P_EAGLE", {"ptd_token_id": 999}, "mask token is 999, but .* embeds tokens 0 to 287"),
    ("PARD", {"pard_token": None}, "has no mask token.*Choose another method"),
    ("PARD", {"pard_token": 288}, "mask token is 288, but small embeds tokens 0 to 287"),
    # other methods
    ("DFlash", {"architectures": ["LiLiCorrDraftModel"]}, "is a LiLiCorr checkpoint"),
    ("DFlash", {"architectures": ["DFlash2DraftModel"]}, "is a DFlash-2 checkpoint"),
    ("DFlash", {"speculators_model_type": "dflash2"}, "is a DFlash-2 checkpoint"),
    ("DFlash", {"architectures": ["Qwen3XPressModel"]}, "is a XPress checkpoint"),
    ("DFlash", {"architectures": ["DominoDraftModel"]}, "is a Domino checkpoint"),
    ("DFlash", {"dflash_config": {"projector_type": "domino"}}, "is a Domino checkpoint"),
    ("DFlash", {"architectures": ["Qwen3UnoDraftModel"]}, "is a UNO checkpoint"),
    ("DFlash", {"speculators_config": {"algorithm": "xpress"}}, "is a XPress checkpoint"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_an_unsupported_value_of_a_config_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    checkpoint.change(**changes)
    with pytest.raises((DrafterError, VocabularyError), match=words):
        checkpoint.build()


def test_an_eagle_head_with_the_config_of_its_target_has_the_layers_of_its_tensors(
    tmp_path: Path,
) -> None:
    """Some publishers copy it; the papers' own code never reads how many layers it has."""
    checkpoint = Checkpoint("EAGLE-3, tiny", tmp_path)
    checkpoint.change(num_hidden_layers=9, layer_types=["full_attention"] * 9)
    drafter = checkpoint.build()
    judges.write(checkpoint.target, drafter, [7, 8, 9, 7, 8], tokens=4)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("P_EAGLE", "Eagle3"),
        ("EAGLE-3, tiny", "P_EAGLE"),
        ("EAGLE-3", "Eagle"),
        ("EAGLE-2", "Eagle3"),
        ("DFlash", "DSpark"),
    ],
)
def test_a_checkpoint_of_one_method_is_refused_by_another(
    tmp_path: Path, name: str, method: str
) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    own, checkpoint.method = checkpoint.method, method
    words = f"not a checkpoint for {method}. Choose the method {own}"
    with pytest.raises(DrafterError, match=words):
        checkpoint.build()


@pytest.mark.parametrize(
    "method", [n for n, kind in methods().items() if "speculative_model" in kind.model_fields]
)
def test_a_method_without_its_weights_names_the_setting(method: str) -> None:
    context = build_context(judges.target_of("llama"))
    with pytest.raises(ConfigError, match="speculative_model must name .*, got none. Set it"):
        parse_method({"decoding_type": method}).build(context)
