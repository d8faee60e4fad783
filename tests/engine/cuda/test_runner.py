"""Graphs show what transformers' modules show, at every size and across borders."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cuda.runner import ROWS, StaticInputs, row_bucket
from engine.kernels.cuda.static_cache import context_bucket
from engine.model.audit import forward_mismatch, reference_logits
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from tests.engine.cuda.targets import FAMILIES, captured, model_of, plain, runner_of
from tests.engine.scripted import ALL, assert_same_walk

LONG = {"max_position_embeddings": 2048}


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_show_what_modules_show(name: str) -> None:
    model = model_of(name)
    theirs, ours = plain(model), captured(model)
    assert ours.environment()["forward"] == "transformers' modules, a tape of operators"
    assert_same_walk(ours, theirs, [1, 7, 1, 12, 5, 20, 1], prompts=[17])
    assert {size.rows for size in runner_of(ours).buckets} == {1, 8, 12, 6, 24}


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
        for buffer in cache.buffers:
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


def test_a_second_cache_at_the_same_time_is_an_ordinary_one() -> None:
    model = model_of("llama")
    theirs, ours = plain(model), captured(model)
    first = ours.new_cache(64)
    assert_same_walk(ours, theirs, [1, 7], prompts=[9])
    assert not runner_of(ours).buckets
    first.free()
    assert_same_walk(ours, theirs, [1, 7], prompts=[9])
    assert len(runner_of(ours).buckets) == 2


def test_a_cache_that_is_dropped_without_a_word_is_lent_again() -> None:
    ours = captured(model_of("llama"))
    first = ours.new_cache(64)
    del first
    assert type(ours.new_cache(64)).__name__ == "StaticCache"


def test_a_growing_cache_keeps_its_rows_and_forgets_its_graphs() -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    first = ours.new_cache(8)
    assert first.capacity == 256
    first.free()
    assert_same_walk(ours, theirs, (), prompts=(200, 1, 60, 3, 300, 8, 1))
    assert {size.context for size in runner_of(ours).buckets} == {768}


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 1), (5, 6), (60, 64), (65, 96), (128, 128), (129, None)]
)
def test_rows_take_the_smallest_size_that_holds_them(rows: int, bucket: int | None) -> None:
    assert row_bucket(rows) == bucket


def test_contexts_take_the_smallest_size_that_holds_them() -> None:
    assert [context_bucket(n) for n in (1, 256, 257, 385, 512, 513, 769, 3000)] == [
        256, 256, 384, 512, 512, 768, 1024, 3072,
    ]  # fmt: skip
    for n in range(1, 20_000, 7):
        bucket = context_bucket(n)
        assert n <= bucket < max(257, 1.5 * n + 1)
