"""What the tape does on a processor, with real graphs on a device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.kernels.cuda.graphs import CudaGraphs
from engine.model.target import Target
from tests.engine.cuda.targets import captured, model_of, plain, runner_of
from tests.engine.drafters.judges import write
from tests.engine.methods import drafter_for, moved, target_of
from tests.engine.scripted import assert_same_walk
from tests.models import load_tiny, plain_greedy, save_tiny

pytestmark = pytest.mark.gpu
BIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
METHODS = ("plain", "eagle", "eagle-dynamic", "eagle3", "medusa", "draft-model")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_graphs_show_what_modules_show(family: str) -> None:
    model = model_of(family, **BIG).to("cuda")
    theirs, ours = plain(model), captured(model, CudaGraphs(torch.device("cuda")))
    near = {"rtol": 2e-3, "atol": 2e-3}
    sizes = (1, 7, 30, 64, 1, 60, 12) * 3
    assert_same_walk(ours, theirs, sizes, prompts=[200], room=900, **near)
    assert len(runner_of(ours).buckets) >= 5 and ours.environment()["cuda_graphs"] == "used"


def by_graphs(name: str) -> Target:
    """A method's target."""
    device = torch.device("cuda")
    return captured(moved(target_of(name), device).model, CudaGraphs(device))


@pytest.mark.parametrize("name", METHODS)
def test_texts_are_those_of_the_plain_engine(name: str) -> None:
    ours, prompt = by_graphs(name), list(range(40))
    text = write(ours, drafter_for(ours, name), prompt, tokens=64)
    assert text.output == plain_greedy(target_of(name), prompt, 64)
    assert ours.environment()["cuda_graphs"] == "used"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["plain", "eagle"])
def test_a_step_waits_for_the_device_once(name: str, temperature: float) -> None:
    ours = by_graphs(name)
    drafter = drafter_for(ours, name)
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
    folder = save_tiny(tmp_path / "tiny")
    target = load_tiny(folder, "bfloat16", device="cuda", cuda_graphs=switch)
    expected = {"auto": "used", "off": "not used: switched off"}
    assert target.environment()["cuda_graphs"] == expected[switch]
