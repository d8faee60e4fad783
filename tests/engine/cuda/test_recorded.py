"""What a graph would record is the same whatever the forward is about.

CUDA replays kernels with the sizes, numbers and host memory of the recorded run. On the pretended
device every replay runs the function anew and compares what it does with the first run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.cuda import runner
from engine.kernels.cuda.runner import GraphRunner, StaticInputs
from engine.model import loading
from engine.model.cache import TreeCache
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from tests.engine.cuda.targets import FAMILIES, captured, model_of, runner_of
from tests.engine.device.conftest import device as device
from tests.engine.device.reruns import Reruns
from tests.engine.scripted import walk
from tests.models import save_tiny


def recorded(name: str, device: torch.device) -> Target:
    return captured(model_of(name, max_position_embeddings=2048).to(device), Reruns())


def run(target: Target, sizes: list[int], *, prompt: int) -> None:
    cache = target.new_cache(600)
    for _ in walk(target, cache, sizes, prompts=[prompt]):
        pass
    cache.free()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_replay_does_what_was_recorded(name: str, device: torch.device) -> None:
    target = recorded(name, device)
    for prompt in (17, 230):
        run(target, [1, 7, 30, 1, 8, 29, 5], prompt=prompt)
    assert target.environment()["cuda_graphs"] == "used"
    buckets = runner_of(target).buckets
    assert {bucket.rows for bucket in buckets} == {1, 6, 8, 32}
    assert {bucket.context for bucket in buckets} == {256, 384}


def test_a_length_that_is_a_number_in_the_graph_is_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be if the rows' places came from the cache's own count."""
    target, cache = recorded("llama", device), list[TreeCache]()
    makes = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda rows: cache.append(makes(rows)) or cache[-1])
    places = lambda self: self._order + cache[-1].length  # noqa: E731
    monkeypatch.setattr(StaticInputs, "cache_positions", places)
    with pytest.raises(AssertionError):
        run(target, [1, 1, 1], prompt=17)


@pytest.mark.parametrize("faster", ["graphs", "operators"])
def test_loading_keeps_what_is_faster_and_says_so(
    faster: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"graphs": 0.002, "operators": 0.002, faster: 0.001}

    def step_s(target: Target) -> float:
        return seconds["graphs" if isinstance(target._forward, GraphRunner) else "operators"]

    monkeypatch.setattr(loading, "pick_device", lambda name: torch.device(name))
    monkeypatch.setattr(loading, "CudaGraphs", lambda device: Reruns())
    monkeypatch.setattr(loading, "plain_step_s", step_s)
    folder = save_tiny(tmp_path / "tiny")
    spec = TargetSpec.parse({"name": "tiny", "path": str(folder)})
    target = load_target(spec, dtype="float32", device=str(device), cache_dir=tmp_path)
    words = {
        "graphs": "used: a plain step takes 1.00 ms, 2.00 ms without",
        "operators": "not used: a plain step takes 2.00 ms, 1.00 ms without",
    }
    assert target.environment()["cuda_graphs"] == words[faster]
    assert isinstance(target._forward, GraphRunner) == (faster == "graphs")
    assert runner.unsupported_reason(target.model) is None
