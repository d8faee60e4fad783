"""Lookahead equals the authors' code step by step, and plain decoding in its text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.drafters.lookup import lookahead
from engine.drafters.lookup.lookahead import (
    JacobiWindow,
    LookaheadConfig,
    LookaheadDrafter,
    NGramPool,
)
from engine.model.forward import prepare_attention
from engine.model.target import Target
from engine.proposal import Budget, Needs, Proposal
from engine.tree import merge_prefixes
from tests.engine.drafters.judges import started, write
from tests.models import build_context

GOLDEN = Path(__file__).parents[2] / "golden" / "lookahead"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
RUNS: list[dict[str, Any]] = EXPECTED["runs"]


@functools.cache
def golden_target() -> Target:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
    prepare_attention(model)
    return Target(model, None, name="golden")


def golden_config(run: dict[str, Any]) -> LookaheadConfig:
    return LookaheadConfig(
        max_window_size=run["WINDOW_SIZE"],
        max_ngram_size=run["LEVEL"],
        max_verification_set_size=max(1, run["GUESS_SET_SIZE"]),
        pool_from_text=bool(run["POOL_FROM_PROMPT"]),
    )


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_text_and_tokens_per_step_equal_or_beat_the_reference(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    run = RUNS[number]
    prompt = EXPECTED["prompts"][run["prompt"]]["ids"]
    monkeypatch.setattr(lookahead, "draw_from_prompt", lambda *_: run["initial_window"])
    drafter = LookaheadDrafter(build_context(golden_target()), golden_config(run))
    text = write(golden_target(), drafter, prompt, tokens=48)
    assert text.output == run["final_tokens"]
    # The reference counts its prompt pass as a step; ours is the prefill.
    assert len(text.steps) + 1 <= run["n_steps"]


@pytest.mark.parametrize("number", [i for i, run in enumerate(RUNS) if "steps" in run])
@torch.inference_mode()
def test_every_forward_and_window_move_equals_the_reference(number: int):
    run, target = RUNS[number], golden_target()
    text = EXPECTED["prompts"][run["prompt"]]["ids"] + run["final_tokens"]
    window = JacobiWindow(run["initial_window"], ngram_size=run["LEVEL"])
    for step in run["steps"]:
        assert window.levels == step["window_before"]
        length = step["committed_len"]
        root = text[length - 1]
        tokens, shape, nodes = merge_prefixes(step["guesses"])
        rows = torch.tensor([root, *tokens, *window.tokens])
        n = len(shape)
        cache = target.new_cache(length)
        target.prefill(text[: length - 1], cache, Needs())
        shown = target.verify(
            Proposal(rows[:n], shape, extra=window.rows(rows[n:], n)), cache, Needs()
        )
        best = shown.logits.argmax(dim=-1).tolist()
        assert best[0] == step["next_token"]
        assert [[best[i] for i in guess] for guess in nodes] == step.get("guess_results", [])
        results = window.results(shown.argmax(), n)
        # The reference leaves the root's own column out while there is one level only.
        shown_results = results[1:] if len(window.levels) == 1 else results
        assert shown_results == step["lookahead_results"]
        added = window.advance(root, results)
        if step["phase"] == "full":
            assert [[key, gram] for key, *gram in added] == step["pool_additions"]


@pytest.mark.parametrize(
    ("size", "ngrams", "kept"),
    [
        # The newest, and repeats move to the front.
        (2, [(9, 1, 2), (9, 3, 4), (9, 1, 2), (9, 5, 6)], [(5, 6), (1, 2)]),
        # Short continuations fill the room that n-grams leave.
        (3, [(9, 7), (9, 8), (9, 1), (9, 1, 2)], [(1, 2), (8,), (7,)]),
        (3, [(9, 7), (9, 8), (9, 1), (9, 1, 2), (9, 3, 4)], [(3, 4), (1, 2), (8,)]),
    ],
)
def test_what_a_pool_keeps(size: int, ngrams: list[tuple[int, ...]], kept: list[Any]):
    pool = NGramPool(size, ngram_size=3)
    for ngram in ngrams:
        pool.add(ngram)
    assert pool.get(9) == kept and pool.get(8) == []


def test_window_of_the_docstring_moves_as_drawn():
    window = JacobiWindow([], ngram_size=4)
    window.levels = [[10, 11], [20, 21, 22], [30, 31, 32]]
    extra = window.rows(torch.tensor(window.tokens), num_nodes=1)
    assert extra.depths.tolist() == [1, 2, 1, 2, 3, 2, 3, 4]
    sees = [set(torch.tensor([0, *window.tokens])[row].tolist()) for row in extra.visible]
    assert sees[-1] == {0, 10, 11, 22, 32}
    assert sees[1] == {0, 10, 11}
    assert window.advance(5, [40, 41, 42]) == [(5, 20, 30, 40), (10, 21, 31, 41), (11, 22, 32, 42)]
    assert window.levels == [[21, 22], [30, 31, 32], [40, 41, 42]]


def test_window_is_dropped_when_it_reaches_past_the_context():
    drafter = started(LookaheadConfig(), [1, 2, 3, 4, 5])
    assert drafter.propose(Budget(0)).extra is None
    proposal = drafter.propose(Budget(1))
    depth = int(proposal.extra.depths.max())
    assert proposal.cut(depth).extra is not None
    assert proposal.cut(depth - 1).extra is None


@pytest.mark.parametrize(("from_text", "drafted"), [(True, [2, 3]), (False, [])])
def test_prompt_fills_the_pool_only_if_wanted(from_text: bool, drafted: list[int]):
    drafter = started(LookaheadConfig(pool_from_text=from_text), [1, 2, 3, 1])
    assert drafter.propose(Budget(99)).tokens.tolist() == [1, *drafted]
