"""What a graph would record is the same whatever the forward is about.

CUDA replays kernels with the sizes, numbers and host memory of the recorded run. On the pretended
device every replay runs the function anew and compares what it does with the first run.
"""

from __future__ import annotations

import random
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
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from tests.engine.cuda.targets import FAMILIES, model_of
from tests.engine.device.conftest import device as device
from tests.engine.device.reruns import Reruns
from tests.engine.scripted import random_parents
from tests.models import save_tiny, tiny_tokenizer

ALL = Needs(hidden=True, layers=(0, 2, 3))


def recorded(name: str, device: torch.device) -> Target:
    model = model_of(name, max_position_embeddings=2048).to(device)
    forward = GraphRunner(model, Reruns())
    return Target(model, tiny_tokenizer(), name="recorded", forward=forward)


def walk(target: Target, sizes: list[int], *, prompt: int) -> None:
    """Random trees and paths behind a prompt."""
    rng, cache = random.Random(4), target.new_cache(600)
    target.prefill([rng.randrange(256) for _ in range(prompt)], cache, ALL)
    for size in sizes:
        shape = TreeShape(random_parents(rng, size))
        tokens = torch.tensor([rng.randrange(256) for _ in range(size)], device=target.device)
        target.verify(Proposal(tokens, shape), cache, ALL)
        cache.commit((0, *shape.path_to(rng.randrange(size))))
    cache.free()


def sizes_of(target: Target) -> list[tuple[int, int]]:
    assert isinstance(target._forward, GraphRunner)
    return [(size.rows, size.context) for size in target._forward.buckets]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_replay_does_what_was_recorded(name: str, device: torch.device) -> None:
    target = recorded(name, device)
    for prompt in (17, 230):
        walk(target, [1, 7, 30, 1, 8, 29, 5], prompt=prompt)
    assert target.environment()["cuda_graphs"] == "used"
    assert {rows for rows, _ in sizes_of(target)} == {1, 6, 8, 32}
    assert {context for _, context in sizes_of(target)} == {256, 384}


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
        walk(target, [1, 1, 1], prompt=17)


@pytest.mark.parametrize("faster", ["graphs", "operators"])
def test_loading_keeps_what_is_faster_and_says_so(
    faster: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"graphs": 0.001, "operators": 0.002}
    if faster == "operators":
        seconds = {"graphs": 0.002, "operators": 0.001}

    def step_s(target: Target) -> float:
        return seconds["graphs" if isinstance(target._forward, GraphRunner) else "operators"]

    monkeypatch.setattr(loading, "pick_device", lambda name: torch.device(name))
    monkeypatch.setattr(loading, "CudaGraphs", lambda device: Reruns())
    monkeypatch.setattr(loading, "plain_step_s", step_s)
    folder = save_tiny(tmp_path / "tiny")
    spec = TargetSpec.parse({"name": "tiny", "path": str(folder)})
    target = load_target(spec, dtype="float32", device=str(device), cache_dir=tmp_path)
    said = target.environment()
    words = {
        "graphs": "used: a plain step takes 1.00 ms, 2.00 ms without",
        "operators": "not used: a plain step takes 2.00 ms, 1.00 ms without",
    }
    assert said["cuda_graphs"] == words[faster]
    assert isinstance(target._forward, GraphRunner) == (faster == "graphs")
    assert runner.unsupported_reason(target.model) is None
