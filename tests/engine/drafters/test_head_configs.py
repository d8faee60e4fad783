"""A drafter's config.json is read whole: what nobody reads of it is refused by name."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.drafters.base import Drafter
from engine.drafters.blocks.dflash import DFlashConfig
from engine.drafters.blocks.dspark import DSparkConfig
from engine.drafters.blocks.p_eagle import ParallelEagleConfig
from engine.drafters.blocks.pard import PardConfig
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.heads.assistant import AssistantConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.heads.mtp import MTPConfig
from engine.drafters.heads.redrafter import ReDrafterConfig
from engine.errors import DrafterError
from engine.model.target import Target
from tests.engine.drafters import judges, test_dspark, test_p_eagle
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.drafters.test_assistant import save_assistant
from tests.engine.drafters.test_dflash import save_as_published
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.models import build_context, save_tiny, tiny_target

Made = tuple[Target, Path, Callable[[], object]]
"""A target, the folder of its drafter, and what builds the drafter."""


def golden(kind: Any, case: str, head: str = "head") -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        shutil.copytree(ROOT / case / head, folder / "head")
        target = golden_case(case).target
        config = kind(speculative_model=str(folder / "head"))
        return target, folder / "head", lambda: config.build(build_context(target))

    return make


def own(kind: Any, save: Callable[[Path, Target], object]) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        target = judges.target_of("llama")
        save(folder / "head", target)
        config = kind(speculative_model=str(folder / "head"))
        return target, folder / "head", lambda: config.build(build_context(target))

    return make


def assistant(folder: Path) -> Made:
    target = tiny_target("gemma4_text", eos_token_id=None)
    config = AssistantConfig(speculative_model=str(save_assistant(folder / "head", target)))
    return target, folder / "head", lambda: config.build(build_context(target))


def pard(folder: Path) -> Made:
    """Its model is loaded as any target is."""
    from engine.model.loading import load_target
    from engine.model.sources import TargetSpec

    target = judges.target_of("llama")
    save_tiny(folder / "head", eos_token_id=None, pard_token=270)

    def build() -> object:
        spec = TargetSpec(name="small", path=str(folder / "head"))
        small = load_target(spec, dtype="float32", device="cpu", cache_dir=folder)
        return PardConfig(speculative_model="small").build(build_context(target, small=small))

    return target, folder / "head", build


def mtp(folder: Path) -> Made:
    save_deepseek(folder / "head", num_mtp_layers=1)
    target = load_deepseek(folder / "head")
    return (
        target,
        folder / "head",
        lambda: MTPConfig().build(build_context(load_deepseek(folder / "head"))),
    )


DRAFTERS: dict[str, Callable[[Path], Made]] = {
    "EAGLE-1": golden(EagleConfig, "eagle/eagle1"),
    "EAGLE-2": golden(EagleConfig, "eagle/eagle2"),
    "EAGLE-3": golden(Eagle3Config, "eagle/eagle3"),
    "EAGLE-3, whole vocabulary": golden(Eagle3Config, "eagle/eagle3", "head_fullvocab"),
    "Medusa": golden(MedusaConfig, "medusa/case_a"),
    "Medusa, version 2": golden(MedusaConfig, "medusa/case_a", "head_v2"),
    "ReDrafter": golden(ReDrafterConfig, "redrafter/case_a_rnn"),
    "ReDrafter without recurrence": golden(ReDrafterConfig, "redrafter/case_b_norn_inputproj"),
    "DFlash": own(DFlashConfig, lambda folder, target: save_as_published(folder)),
    "DSpark": own(DSparkConfig, lambda folder, target: test_dspark.save(folder)),
    "P-EAGLE": own(ParallelEagleConfig, test_p_eagle.save_parallel),
    "PARD": pard,
    "assistant": assistant,
    "MTP": mtp,
}
HEADS = ["EAGLE-2", "EAGLE-3", "Medusa", "ReDrafter", "DFlash"]


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_key_that_nobody_reads_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    _, folder, build = DRAFTERS[name](tmp_path)
    build()
    key = "mtp_gate" if name == "MTP" else "attention_gate"
    change(folder, **{key: 0.5})
    with pytest.raises(
        DrafterError, match=rf"config.json says {key}: 0.5, which this method does not"
    ):
        build()
    change(folder, **{key: None})
    build()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_freed_with_the_last_reference(tmp_path: Path, name: str) -> None:
    """Not by a later garbage collection: the next drafter's weights need the memory."""
    target, _, build = DRAFTERS[name](tmp_path)
    drafter = build()
    assert isinstance(drafter, Drafter)
    judges.write(target, drafter, [7, 8, 9, 7, 8], tokens=4)
    own = weakref.ref(drafter)
    del drafter
    assert own() is None


@pytest.mark.parametrize("section", ["eagle_config", "dflash_config", "transformer_layer_config"])
def test_a_key_in_a_section_that_nobody_reads_is_named(tmp_path: Path, section: str) -> None:
    _, folder, build = DRAFTERS["EAGLE-3"](tmp_path)
    stated = json.loads((folder / "config.json").read_text()).get(section) or {}
    change(folder, **{section: {**stated, "block_gate": True}})
    with pytest.raises(DrafterError, match="says block_gate: True, which this method does not"):
        build()


@pytest.mark.parametrize("name", HEADS)
def test_what_transformers_and_trainers_write_is_harmless(tmp_path: Path, name: str) -> None:
    _, folder, build = DRAFTERS[name](tmp_path)
    stated = json.loads((folder / "config.json").read_text())
    usual = transformers.PreTrainedConfig().to_dict()
    usual |= {"_name_or_path": "x", "_attn_implementation": "eager", "unsloth_version": "2026.1"}
    usual |= {"torch_dtype": "bfloat16", "transformers_version": "4.28.1", "pretraining_tp": 1}
    usual |= {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    usual |= {"speculators_version": "0.5.0", "embed_requires_grad": True, "max_anchors": 3072}
    usual |= {"auto_map": {"AutoModel": "x.Y"}, "bad_words_ids": [[1]], "temperature": 1.0}
    change(folder, **{**usual, **stated})
    build()


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
    _, folder, build = DRAFTERS["DFlash"](tmp_path)
    change(folder, **{key: fine})
    build()
    change(folder, **{key: wrong})
    with pytest.raises(DrafterError, match=f"says {key}: "):
        build()


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash-2"),
        ({"speculators_model_type": "dflash2"}, "DFlash-2"),
        ({"architectures": ["Qwen3XPressModel"]}, "XPress"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["Qwen3UnoDraftModel"]}, "UNO"),
        ({"speculators_config": {"algorithm": "xpress"}}, "XPress"),
    ],
)
def test_checkpoints_of_other_methods_are_named(
    tmp_path: Path, changes: dict[str, Any], method: str
) -> None:
    _, folder, build = DRAFTERS["DFlash"](tmp_path)
    change(folder, **changes)
    with pytest.raises(DrafterError, match=f"is a {method} checkpoint"):
        build()


def test_two_values_for_one_setting_are_refused(tmp_path: Path) -> None:
    _, folder, build = DRAFTERS["DFlash"](tmp_path)
    change(folder, mask_token_id=12)
    with pytest.raises(DrafterError, match="says mask_token_id twice: 12 and 11"):
        build()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rnn", False, "rnn in config.json must be True, got False"),
        ("num_draft_layers", 3, "num_draft_layers in config.json must be 2, got 3"),
        ("exit_dim", 64, "exit_dim in config.json must be 128, got 64"),
        ("num_lookback_tokens", 4, "says num_lookback_tokens: 4"),
    ],
)
def test_a_recurrent_head_is_what_its_config_says(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    _, folder, build = DRAFTERS["ReDrafter"](tmp_path)
    change(folder, **{key: value})
    with pytest.raises(DrafterError, match=words):
        build()


@pytest.mark.parametrize("key", ["num_target_layers", "target_hidden_size", "vocab_size"])
def test_a_block_model_of_another_target_is_refused(tmp_path: Path, key: str) -> None:
    _, folder, build = DRAFTERS["DFlash"](tmp_path)
    change(folder, **{key: 7777})
    with pytest.raises(DrafterError, match=f"{key}|was made for 7777 tokens"):
        build()
