"""Token recycling drafts from what the target ranked after each token the last time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from engine.drafters.lookup.paths import most_probable_tree
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.errors import ConfigError
from engine.proposal import Budget, Outcome, Proposal, TargetOutput
from engine.tree import TreeShape
from tests.engine.drafters.judges import observe, started, target_of, write
from tests.models import build_context

VOCAB = 288


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def logits_that_rank(rows: list[list[int]]) -> torch.Tensor:
    """Logits whose best tokens per row are these, in this order."""
    logits = torch.zeros(len(rows), VOCAB)
    for row, best in zip(logits, rows, strict=True):
        row[best] = torch.arange(len(best), 0, -1).float()
    return logits


def show(session: Any, tokens: list[int], best: list[list[int]], *path: int) -> None:
    """The session is shown what the target ranks best after each token of a chain."""
    proposal = Proposal(torch.tensor(tokens), TreeShape.chain(len(tokens) - 1))
    committed = (*(tokens[node] for node in path[1:]), tokens[path[-1]])
    observe(session, Outcome(proposal, TargetOutput(logits_that_rank(best)), path, committed))


def test_tree_is_filled_breadth_first_as_in_the_docstring():
    config = TokenRecyclingConfig(matrix_top_k=2, recycling_choices=((0,), (1,), (0, 1)))
    drafter = started(config, [1, 2, 5])
    show(drafter, [5], [[7, 8]], 0)
    assert drafter.propose(Budget(99)).tokens.tolist() == [5, 7, 8]
    show(drafter, [5, 7], [[7, 8], [9, 5]], 0)
    proposal = drafter.propose(Budget(99))
    assert proposal.tokens.tolist() == [5, 7, 8, 5]
    assert proposal.shape.parents == (-1, 0, 0, 1)
    assert proposal.ranks is not None and list(proposal.ranks) == [0, 0, 1, 1]


def test_accepted_rows_win_over_others_of_the_same_token_then_later_ones():
    config = TokenRecyclingConfig(matrix_top_k=2, recycling_choices=((0,), (1,), (0, 0)))
    drafter = started(config, [1, 2, 5])
    tokens, best = [4, 6, 7, 6], [[6, 1], [10, 11], [12, 13], [14, 15]]
    show(drafter, tokens, best, 0, 1)
    assert drafter.propose(Budget(99)).tokens.tolist()[1:3] == [10, 11]
    drafter.text.append(6)
    show(drafter, tokens, best, 0)
    drafter.text.append(6)
    assert drafter.propose(Budget(99)).tokens.tolist()[1:3] == [14, 15]


def test_what_followed_in_the_prompt_comes_first_the_latest_foremost():
    config = TokenRecyclingConfig(matrix_top_k=3, recycling_choices=((0,), (1,), (2,)))
    drafter = started(config, [5, 7, 5, 8, 5, 8, 3, 5])
    assert drafter.propose(Budget(99)).tokens.tolist() == [5, 8, 7]


def test_after_the_prompts_last_token_the_target_has_spoken():
    prompt = [3, 200, 17, 200, 4, 17]
    target = target_of("llama")
    drafter = started(TokenRecyclingConfig(), [*prompt, 17])
    shown = target.model(torch.tensor([prompt])).logits[0]
    assert drafter.propose(Budget(99)).tokens[1:9].tolist() == shown[-1].topk(8).indices.tolist()


def test_the_most_probable_tree_is_the_best_of_its_size():
    rates = [[0.5, 0.3, 0.1], [0.7, 0.2], [0.4, 0.1]]
    paths = [p for d in (1, 2, 3) for p in itertools.product(*map(range, (3, 2, 2)[:d]))]
    value = {p: math.prod(rates[d][rank] for d, rank in enumerate(p)) for p in paths}
    for size in (1, 4, 9, 99):
        tree = most_probable_tree(size, rates)
        best = sorted(value.values(), reverse=True)[:size]
        assert sum(value[p] for p in tree.paths) == pytest.approx(sum(best))


def test_its_tree_bounds_a_draft():
    tree = ((0,), (0, 0), (1,))
    assert TokenRecyclingConfig(recycling_choices=tree).largest_draft == (2, 3)


def test_rank_beyond_the_matrix_is_refused():
    with pytest.raises(ConfigError, match="rank 4.*matrix_top_k = 4.*ranks 0 to 3"):
        TokenRecyclingConfig.parse({"matrix_top_k": 4, "recycling_choices": [[4]]})


def test_the_matrix_outlives_a_run():
    target = target_of("llama")
    drafter = TokenRecyclingConfig().build(build_context(target))
    first, again = (write(target, drafter, [3, 200, 17, 99], tokens=40) for _ in range(2))
    assert first.output == again.output
    assert first.steps[0].tokens != again.steps[0].tokens
