"""Graphs show what transformers' modules show, at every size and across borders."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine.config import Limits
from engine.decode import decode
from engine.kernels.cuda import runner
from engine.kernels.cuda.graphs import CaptureError, Graph
from engine.kernels.cuda.runner import ROWS, GraphRunner, StaticInputs, row_bucket
from engine.model import loading, plan
from engine.model.audit import forward_mismatch, reference_logits
from engine.model.kv import context_bucket
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.steps import Step
from engine.tree import TreeShape
from engine.tuning.controller import ControlledDrafter
from tests.engine.cuda.tape import Tape
from tests.engine.cuda.targets import FAMILIES, captured, model_of, plain, runner_of
from tests.engine.device.conftest import device as device
from tests.engine.device.pretend import pretend_device
from tests.engine.device.runs import PROMPT
from tests.engine.drafters.judges import write
from tests.engine.methods import drafter_for
from tests.engine.scripted import ALL, assert_same_walk
from tests.models import alike, plain_greedy, save_tiny

T = TypeVar("T")

LONG = {"max_position_embeddings": 2048}


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_show_what_modules_show(name: str, device: torch.device) -> None:
    """They take nothing from the host: no sizes, numbers or memory of the recorded run."""
    model = model_of(name)
    theirs, ours = plain(model), captured(model.to(device))
    way = "CUDA graphs" if device.type == "cuda" else "a tape of operators"
    assert ours.environment()["forward"] == f"transformers' modules, {way}"
    assert_same_walk(ours, theirs, [1, 7, 1, 12, 5, 20, 1], prompts=[17])
    assert {size.rows for size in runner_of(ours).buckets} == {1, 8, 12, 6, 24}
    assert ours.environment()["cuda_graphs"] == "used"


def test_the_check_at_loading_takes_graphs_and_finds_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    expected = reference_logits(plain(model))
    ours = captured(model)
    assert forward_mismatch(ours, expected) is None
    assert len(runner_of(ours).buckets) == 2, "one row and a tree are run by graphs"
    monkeypatch.setattr(
        StaticInputs, "cache_positions", lambda self: self._length + self._order.flip(0)
    )
    assert "its logits differ" in str(forward_mismatch(captured(model), expected))


@pytest.mark.parametrize("faster", ["graphs", "operators"])
def test_loading_keeps_what_is_faster_and_says_so(
    faster: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"graphs": 0.002, "operators": 0.002, faster: 0.001}

    def step_s(target: Target) -> float:
        return seconds["graphs" if isinstance(target._forward, GraphRunner) else "operators"]

    monkeypatch.setattr(plan, "pick_device", lambda name: torch.device(name))
    monkeypatch.setattr(loading, "CudaGraphs", Tape)
    monkeypatch.setattr(loading, "plain_step_s", step_s)
    spec = TargetSpec(name="tiny", path=str(save_tiny(tmp_path / "tiny")))
    target = load_target(spec, dtype="float32", device=str(device), cache_dir=tmp_path)
    words = {
        "graphs": "used: a plain step takes 1.00 ms, 2.00 ms without",
        "operators": "not used: a plain step takes 2.00 ms, 1.00 ms without",
    }
    assert target.environment()["cuda_graphs"] == words[faster]
    assert isinstance(target._forward, GraphRunner) == (faster == "graphs")


def test_contexts_cross_the_borders_of_their_sizes() -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    assert_same_walk(ours, theirs, [30, 29, 31] * 5, prompts=[215], room=500)
    assert {size.context for size in runner_of(ours).buckets} >= {256, 384}
    sizes = runner_of(ours).buckets
    assert_same_walk(ours, theirs, [30, 28], prompts=[260], room=500)
    assert runner_of(ours).buckets == sizes, "a second text needs no graph of its own"


def test_a_replay_depends_on_nothing_that_a_text_before_it_left_behind() -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    cache = ours.new_cache(300)
    ours.prefill([1, 2, 3], cache, Needs())
    with torch.inference_mode():
        for buffer in cache.kv.tensors:
            buffer.fill_(float("nan"))
    cache.free()
    assert_same_walk(ours, theirs, [8, 1, 8], prompts=[5])


def test_results_outlast_the_next_forward() -> None:
    ours = captured(model_of("llama"))
    cache = ours.new_cache(32)
    ours.prefill([1, 2, 3], cache, Needs())
    first = ours.verify(Proposal(torch.tensor([5]), TreeShape.chain(0)), cache, ALL)
    kept = first.logits.clone()
    ours.verify(Proposal(torch.tensor([9]), TreeShape.chain(0)), cache, ALL)
    assert torch.equal(first.logits, kept)


def test_more_rows_than_any_size_and_prompts_are_run_eagerly() -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    assert_same_walk(ours, theirs, [ROWS[-1] + 1, 150], prompts=[20])
    assert not runner_of(ours).buckets
    assert [row_bucket(rows) for rows in (5, 60, 128, 129)] == [6, 64, 128, None]


def test_the_static_cache_serves_one_text_at_a_time() -> None:
    model = model_of("llama")
    theirs, ours = plain(model), captured(model)
    first = ours.new_cache(64)
    assert_same_walk(ours, theirs, [1, 7], prompts=[9])
    assert not runner_of(ours).buckets
    first.free()
    assert_same_walk(ours, theirs, [1, 7], prompts=[9])
    assert len(runner_of(ours).buckets) == 2
    dropped = ours.new_cache(64)
    del dropped
    assert ours.new_cache(64).kv is runner_of(ours)._kv


def test_a_growing_cache_keeps_its_rows_and_forgets_its_graphs() -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    first = ours.new_cache(8)
    assert first.kv.capacity == 256
    first.free()
    assert_same_walk(ours, theirs, (), prompts=(200, 1, 60, 3, 300, 8, 1))
    assert {size.context for size in runner_of(ours).buckets} == {768}


def test_a_cache_that_grows_at_its_old_address_forgets_its_graphs() -> None:
    model = model_of("llama", **LONG)
    theirs = plain(model)
    with pretend_device(reuses_block=True) as device:
        ours = captured(model.to(device))
        assert_same_walk(ours, theirs, [1, 8], prompts=[20], room=100)
        small = runner_of(ours)._kv.tensors[0]
        address, strides = small.data_ptr(), small.stride()
        assert_same_walk(ours, theirs, [1, 8], prompts=[20], room=700)
        (large,) = runner_of(ours)._kv.tensors
        assert large.data_ptr() == address and large.stride() != strides


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_GRAPHS", 3)
    model = model_of("llama")
    theirs, ours = plain(model), captured(model)
    assert_same_walk(ours, theirs, [1, 8, 12, 1, 6, 24, 1], prompts=[9])
    assert [bucket.rows for bucket in runner_of(ours).buckets] == [6, 24, 1]


class SlowTape(Tape):
    """A capture takes a thousand seconds; all other things a millisecond a look at the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s, self.num_captures = 0.0, 0
        monkeypatch.setattr(time, "perf_counter", self._look)

    def _look(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        self._now_s, self.num_captures = self._now_s + 1000.0, self.num_captures + 1
        return super().capture(run)


@pytest.mark.parametrize("drafting", ["as set", "auto"])
@pytest.mark.parametrize("name", ["ngram", "draft-model"])
def test_a_capture_takes_no_time_of_a_step(
    name: str, drafting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = SlowTape(monkeypatch)
    target, small = (
        captured(alike(eos_token_id=None, noise=noise).model, tape) for noise in (0.0, 0.02)
    )
    drafter = drafter_for(target, name, drafting, small=small)
    limits = Limits(max_new_tokens=24, ignore_eos=True)
    for _ in range(2):
        steps = [r for r in decode(target, drafter, PROMPT, limits=limits) if isinstance(r, Step)]
        assert max(step.total_s for step in steps) < 10 and steps[-1].at_s < 100
    assert tape.num_captures > 1
    if isinstance(drafter, ControlledDrafter):
        costs = drafter.experience.costs
        assert costs.plain_ms < 1000 and costs.prompt_ms("chain", 100) < 1000
        assert all(costs.draft_ms(kind, 4) < 1000 for kind in costs.draft_times)


def test_a_draft_models_first_text_is_run_by_graphs() -> None:
    target, small = plain(model_of("llama", eos_token_id=None)), captured(model_of("llama"))
    drafter = drafter_for(target, "draft-model", small=small)
    another = drafter_for(target, "draft-model", small=small)
    write(target, drafter, list(PROMPT), tokens=8)
    assert runner_of(small).buckets and another.traits.has_network


def test_a_failed_capture_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tape, run: object) -> None:
        raise CaptureError("out of memory")

    monkeypatch.setattr(Tape, "capture", fail)
    ours = captured(model_of("llama"))
    cache = ours.new_cache(64)
    ours.prefill([1, 2, 3], cache, Needs())
    buffer = weakref.ref(cache.kv.tensors[0])
    ours.verify(Proposal(torch.tensor([5]), TreeShape.chain(0)), cache, ALL)
    assert "given up" in ours.environment()["cuda_graphs"]
    assert buffer() is not None, "the text goes on with it"
    cache.free()
    assert buffer() is None


def test_contexts_take_the_smallest_size_that_holds_them() -> None:
    assert [context_bucket(n) for n in (300, 400, 769)] == [384, 512, 1024]
    for n in range(1, 20_000, 7):
        bucket = context_bucket(n)
        assert n <= bucket < max(257, 1.5 * n + 1)


def test_a_model_that_waits_for_the_device_goes_on_without_graphs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("gpt_neox", eos_token_id=None)
    ours, prompt = captured(model), [4, 5, 6, 7]
    expected = plain_greedy(plain(model), prompt, 30)
    attention = model.gpt_neox.layers[1].attention
    forward = attention.forward

    def waits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert bool(hidden_states.isfinite().all())
        return forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", waits)
    drafter = drafter_for(ours, "ngram")
    for _ in range(2):
        assert write(ours, drafter, prompt, tokens=30).output == expected
    assert not runner_of(ours).buckets
    assert "given up: aten" in ours.environment()["cuda_graphs"]
    assert ours.environment()["forward"] == "transformers' modules"
    fault = ours.environment()["cuda_graphs"].removeprefix("given up: ")
    assert [r.message for r in caplog.records if "Verifying without" in r.message] == [
        f"Verifying without a tape of operators from here on: {fault}"
    ]
