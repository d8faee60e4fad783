"""EAGLE on tiny models: growing, cutting and drawing trees; heads, their cache and settings."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from engine.drafters.eagle.head import HeadEntries
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.eagle.trees import (
    Candidates,
    DynamicTree,
    draw_without_replacement,
    expand_candidates,
    rerank,
)
from engine.drafters.heads.layer import HeadCache
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from engine.proposal import Budget
from engine.sampling import SeededDraws
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import save_eagle
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.methods import drafter_for, target_of
from tests.models import build_context, plain_greedy

VOCAB = 7


class TableNet:
    """A draft network whose distribution is a fixed function of the tokens on the path.

    Its hidden vector is the path's number, so a child must be fed its own parent's output; every
    call is checked against the ancestors it claims.
    """

    def __init__(self) -> None:
        self.paths: list[tuple[int, ...]] = [()]
        self.vocabulary = Vocabulary(None, VOCAB)
        self.output, self.logits = torch.zeros(1, 1), self.log_probs(())[None]

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(path) % (1 << 32))
        return torch.randn(VOCAB, generator=generator).log_softmax(-1)

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        paths = [(*self.paths[int(h)], int(t)) for h, t in zip(hidden, tokens, strict=True)]
        assert all(len(path) == depth for path in paths)
        numbers = torch.arange(len(paths)) + len(self.paths)
        self.paths += paths
        if ancestors is not None:
            for path, row in zip(paths, ancestors, strict=True):
                seen = {self.paths[1 + i] for i in row.nonzero().flatten().tolist()}
                assert seen == {path[:d] for d in range(1, depth + 1)}
        return numbers[:, None].float(), torch.stack([self.log_probs(path) for path in paths])


def by_hand(net: TableNet, size: DynamicTree) -> list[tuple[tuple[int, ...], float]]:
    """EAGLE-2's procedure, a node at a time: kept paths with their scores, in node order."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(size.levels):
        level = []
        for path, score in frontier:
            values, ids = net.log_probs(path).topk(size.top_k)
            level += [
                ((*path, t), score + v) for t, v in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[: size.expanded]
    best = sorted(range(len(candidates)), key=lambda i: -candidates[i][1])[: size.keep]
    return [candidates[i] for i in sorted(best)]


@pytest.mark.parametrize(
    "size",
    [
        DynamicTree(3, 4, 12, 3),
        DynamicTree(3, 1, 2, 3),
        DynamicTree(2, 5, 9, 4),
        DynamicTree(4, 3, 24, 2),
        DynamicTree(1, 4, 4, 1),
        DynamicTree(5, 3, 55, 5),
    ],
)
def test_a_grown_tree_equals_the_procedure_done_by_hand(size: DynamicTree) -> None:
    net = TableNet()
    candidates = expand_candidates(net, size)
    assert len(candidates.tokens) == size.num_candidates  # as the reference counts them
    kept, parents = rerank(candidates, size.keep)
    paths: list[tuple[int, ...]] = [()]
    for number, parent in zip(kept.tolist(), parents.tolist(), strict=True):
        paths.append((*paths[parent], int(candidates.tokens[number])))
    wanted = by_hand(TableNet(), size)
    assert paths[1:] == [path for path, _ in wanted]
    assert candidates.scores[kept].tolist() == pytest.approx([s for _, s in wanted], abs=1e-5)


@pytest.mark.parametrize("least", [0.02, 0.2, 0.5])
def test_nodes_that_are_less_likely_are_not_expanded(least: float) -> None:
    size = DynamicTree(3, 5, 12, 3)
    whole, grown = expand_candidates(TableNet(), size), expand_candidates(TableNet(), size, least)
    parents = grown.parents[grown.parents >= 0].unique()
    assert (grown.scores[parents].exp() >= least).all()
    assert len(grown.tokens) < len(whole.tokens)
    expandable = (grown.scores.exp() >= least) & (torch.arange(len(grown.scores)) < 3)
    assert set(expandable.nonzero().flatten().tolist()) <= set(parents.tolist())


def test_the_worked_example_of_the_rerank() -> None:
    candidates = Candidates(
        tokens=torch.arange(6),
        log_probs=torch.zeros(6),
        scores=torch.tensor([-0.1, -2.4, -0.4, -1.3, -3.0, -3.1]),
        parents=torch.tensor([-1, -1, 0, 0, 1, 1]),
    )
    kept, parents = rerank(candidates, 3)
    assert kept.tolist() == [0, 2, 3]
    assert [-1, *parents.tolist()] == [-1, 0, 1, 1]


@settings(deadline=None)
@given(data=st.data(), size=st.integers(2, 40))
def test_every_kept_node_s_parent_is_kept_even_when_scores_tie(
    data: st.DataObject, size: int
) -> None:
    """Probability exactly 1 makes a child score the same as its parent."""
    parents = [-1] + [data.draw(st.integers(-1, i - 1)) for i in range(1, size)]
    steps = data.draw(st.lists(st.sampled_from([0.0, -0.5, -1.0]), min_size=size, max_size=size))
    scores: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        scores.append(step + (scores[parent] if parent >= 0 else 0.0))
    keep = data.draw(st.integers(1, size))
    of = torch.tensor(parents)
    candidates = Candidates(torch.arange(size), torch.tensor(steps), torch.tensor(scores), of)
    kept, nodes = rerank(candidates, keep)
    for number, node in zip(kept.tolist(), nodes.tolist(), strict=True):
        parent = parents[number]
        assert (node == 0) if parent < 0 else kept[node - 1] == parent


def test_a_depth_limit_shortens_the_tree() -> None:
    size = DynamicTree(3, 6, 10, 3).within(Budget(2))
    candidates = expand_candidates(TableNet(), size)
    assert size.levels == 2 and len(candidates.tokens) == 3 + 9
    assert DynamicTree(3, 6, 2, 3).within(Budget(9)).levels == 2, (
        "two nodes reach no deeper than two"
    )


def test_draws_without_replacement_follow_the_ordered_law() -> None:
    probs, runs = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05], dtype=torch.float64), 6000
    picked = draw_without_replacement(probs.expand(runs, -1), 3, SeededDraws(5))
    seen = Counter(map(tuple, picked.tolist()))
    law = {}
    for order in itertools.permutations((0, 1, 3, 4), 3):
        first, second, third = probs[[*order]].tolist()
        law[order] = first * second / (1 - first) * third / (1 - first - second)
    assert set(seen) <= set(law)
    expected = [runs * mass for mass in law.values()]
    assert chisquare([seen[order] for order in law], expected).pvalue > 1e-3


def test_draws_stay_distinct_where_too_few_tokens_have_mass() -> None:
    probs = torch.zeros(50, 9)
    probs[:, 4] = 1.0
    picked = draw_without_replacement(probs, 4, SeededDraws(1))
    assert (picked[:, 0] == 4).all()
    assert all(len(set(row)) == 4 for row in picked.tolist())


# ---- heads on tiny models: broken ones, their cache, settings, token maps


@pytest.mark.parametrize("name", ["eagle", "eagle3-dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_computes_nan_costs_speed_and_nothing_else(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = target_of(name), judges.PROMPTS[0]
    drafter: Any = drafter_for(target, name)
    healthy = drafter.head.logits

    def broken(outputs: Tensor) -> Tensor:
        logits = healthy(outputs).clone()
        logits[1:] = torch.nan
        return logits

    monkeypatch.setattr(drafter.head, "logits", broken)
    text = judges.write(target, drafter, prompt, temperature=temperature)
    assert len(text.output) == 24
    if temperature == 0:
        assert text.output == plain_greedy(target, prompt, 24)


@torch.inference_mode()
def test_base_entries_fed_in_pieces_between_trees_equal_one_pass() -> None:
    """300 entries cross the cache's first capacity; trees in between leave no trace."""
    target = golden_case("eagle/eagle3").target
    head = str(ROOT / "eagle" / "eagle3" / "head")
    drafter = Eagle3Config(speculative_model=head).build(build_context(target))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 144, generator=generator)
    tokens = torch.randint(0, 240, (300,), generator=generator)
    whole = HeadEntries(drafter.head, HeadCache(1))
    whole.feed_base(features, tokens)
    pieces = HeadEntries(drafter.head, HeadCache(1))
    for start, end in ((0, 250), (250, 253), (253, 254), (254, 300)):
        pieces.feed_base(features[start:end], tokens[start:end])
        for depth in (1, 2):
            mask = torch.eye(4, dtype=torch.bool).repeat(1, depth)
            pieces.expand(pieces.output.expand(4, -1), tokens[:4], depth, mask)
    torch.testing.assert_close(pieces.output, whole.output, atol=2e-5, rtol=0)
    fused = drafter.head.fuse(features)
    every = drafter.head(fused, tokens, torch.arange(300), HeadCache(1))
    torch.testing.assert_close(every[-1:], whole.output, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", [EagleConfig, Eagle3Config])
def test_keeping_more_nodes_than_are_drafted_names_both_numbers(kind: type[MethodConfig]) -> None:
    values = {"use_dynamic_tree": True, "max_draft_len": 3, "dynamic_tree_max_topK": 4}
    kind.parse({**values, "max_total_draft_tokens": 4 + 2 * 16})
    with pytest.raises(ConfigError, match="at most 36.*got 37"):
        kind.parse({**values, "max_total_draft_tokens": 37})
    kind.parse({**values, "max_total_draft_tokens": 37, "use_dynamic_tree": False})


# ---- the token map of FR-Spec


@pytest.mark.parametrize("form", ["list.pt", "tensor.pt", "list.json"])
def test_a_token_map_of_its_own_says_which_tokens_are_drafted(tmp_path: Path, form: str) -> None:
    """As published: a list of ids from torch.save, the most frequent first."""
    target, prompt = judges.target_of("llama"), judges.PROMPTS[0]
    written = plain_greedy(target, prompt, 40)
    ids = [*dict.fromkeys(written), *(i for i in range(60) if i not in written)][:40]
    file = tmp_path / form
    if form.endswith(".json"):
        file.write_text(json.dumps(ids))
    else:
        torch.save(ids if form == "list.pt" else torch.tensor(ids), file)
    values = {"speculative_token_map": str(file), "eagle_choices": [[0, 0, 0], [1, 0]]}
    values["speculative_model"] = str(save_eagle(tmp_path / "head", target))
    for own, allowed in (({}, ids), ({"draft_vocab": 20}, ids[:20])):
        config = EagleConfig.parse({**values, **own})
        text = judges.write(target, config.build(build_context(target)), prompt, tokens=40)
        assert text.output == written and text.num_accepted > 0
        assert {token for step in text.steps for token in step.tokens[1:]} <= set(allowed)


def test_a_wrong_token_map_is_named(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    head = str(save_eagle(tmp_path / "head", target))
    torch.save([5, 5], tmp_path / "twice.pt")
    for named, words in (
        (str(tmp_path / "twice.pt"), "twice.pt must list different token ids below 288"),
        ("nowhere.pt", "'nowhere.pt' is neither a local file nor owner/repository/file"),
    ):
        config = EagleConfig(speculative_model=head, speculative_token_map=named)
        with pytest.raises(PlaygroundError, match=words):
            config.build(build_context(target))
