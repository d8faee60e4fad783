"""What the tape does on a processor, with real graphs on a device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import random_heads
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters import parse_method
from engine.kernels.cuda.graphs import CudaGraphs
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from tests.engine.cuda.targets import captured, model_of, plain, runner_of
from tests.engine.drafters.judges import write
from tests.engine.scripted import assert_same_walk
from tests.models import build_context, save_tiny

pytestmark = pytest.mark.gpu
BIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"decoding_type": "Autoregressive"},
    "eagle-tree": {"decoding_type": "Eagle"},
    "eagle-dynamic": {"decoding_type": "Eagle", "use_dynamic_tree": True},
    "eagle3": {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1, 2]},
    "medusa": {"decoding_type": "Medusa"},
    "draft-model": {"decoding_type": "Draft_Target", "speculative_model": "itself"},
}


def pair(family: str = "llama") -> tuple[Target, Target]:
    """The same weights on the device: one operator at a time, and by graphs."""
    model = model_of(family, **BIG).to("cuda")
    theirs = plain(model)
    return theirs, captured(model, CudaGraphs(torch.device("cuda")))


def drafter_for(target: Target, name: str, folder: Path) -> Any:
    values = dict(METHODS[name])
    makers = {"Eagle": random_heads.eagle, "Medusa": random_heads.medusa}
    kind = values["decoding_type"]
    if kind in makers:
        values["speculative_model"] = str(makers[kind](target, folder / name))
    if kind == "Eagle3":
        values["speculative_model"] = str(random_heads.eagle3(target, folder / name, 64))
    return build_drafter(
        parse_method({"drafting": "as set", **values}), build_context(target, itself=target)
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_graphs_show_what_modules_show(family: str) -> None:
    theirs, ours = pair(family)
    near = {"rtol": 2e-3, "atol": 2e-3}
    sizes = (1, 7, 30, 64, 1, 60, 12) * 3
    assert_same_walk(ours, theirs, sizes, prompts=[200], room=900, **near)
    assert len(runner_of(ours).buckets) >= 5 and ours.environment()["cuda_graphs"] == "used"


@pytest.mark.parametrize("name", METHODS)
def test_texts_are_those_of_the_plain_engine(name: str, tmp_path: Path) -> None:
    theirs, ours = pair()
    texts = []
    for target in (theirs, ours):
        drafter = drafter_for(target, name, tmp_path / target.name)
        texts.append(write(target, drafter, list(range(40)), tokens=64).output)
    assert texts[0] == texts[1]
    assert ours.environment()["cuda_graphs"] == "used"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["plain", "eagle-tree"])
def test_a_step_waits_for_the_device_once(name: str, temperature: float, tmp_path: Path) -> None:
    _, ours = pair()
    drafter = drafter_for(ours, name, tmp_path)
    limits, sampling = Limits(max_new_tokens=24, ignore_eos=True), Sampling(temperature=temperature)
    for _ in range(2):  # the first text makes the graphs
        text = decode(ours, drafter, list(range(40)), limits=limits, sampling=sampling)
        next(text)
        next(text)  # the first step reads the prompt's features
        waits = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(8):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    next(text)
                waits.append(sum("synchronizing" in str(w.message) for w in caught))
        finally:
            torch.cuda.set_sync_debug_mode("default")
            text.close()
    assert waits == [1] * 8


@pytest.mark.parametrize("switch", ["auto", "off"])
def test_a_loaded_target_says_whether_graphs_run_it(switch: str, tmp_path: Path) -> None:
    spec = TargetSpec.parse(
        {"name": "tiny", "path": str(save_tiny(tmp_path / "tiny")), "cuda_graphs": switch}
    )
    target = load_target(spec, dtype="bfloat16", device="cuda", cache_dir=tmp_path)
    expected = {"auto": "used", "off": "not used: switched off"}
    assert target.environment()["cuda_graphs"] == expected[switch]
