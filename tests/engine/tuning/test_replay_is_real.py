"""A replayed tree makes the very steps that a real greedy run with it makes, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.config import Limits
from engine.drafters.base import BuildContext
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.model.target import Target
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable, measure_ranks
from engine.tuning.replay import Replay, replay
from tests.engine.drafters.golden import golden_case
from tests.engine.drafters.judges import write
from tests.engine.training.conftest import learnable_target
from tests.engine.tuning.runs import Case, golden, texts_of
from tests.engine.tuning.tables import position_rates, random_tree, replay_chain
from tests.models import build_context

NUM_TREES = 30


def by_text(table: RankTable, result: Replay) -> list[list[tuple[int, int]]]:
    """Per text, the steps as (output index of the root, accepted)."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(table.num_texts)]
    for row, accepted in zip(result.roots, result.accepted_lengths, strict=True):
        text, at = table.locate(int(row))
        found[text].append((at, int(accepted)))
    return found


def assert_equals_runs(
    table: RankTable,
    result: Replay,
    target: Target,
    config: MethodConfig,
    bench: BuildContext,
    texts: Sequence[Text],
) -> None:
    """Step by step, for every text; one drafter writes them all."""
    drafter = config.build(bench)
    replayed = by_text(table, result)
    num_steps = num_accepted = 0
    for text, steps in zip(texts, replayed, strict=True):
        real = write(target, drafter, text.prompt_ids, limits=text.limits)
        assert real.end.output_ids == text.output_ids, "the drafter changed the text"
        roots = [step.context_len - len(text.prompt_ids) for step in real.steps]
        assert steps == list(zip(roots, (s.num_accepted for s in real.steps), strict=True))
        num_steps += len(real.steps)
        num_accepted += real.num_accepted
    assert result.num_steps == num_steps and result.num_accepted == num_accepted
    assert result.mat == 1 + num_accepted / num_steps


def trees_of(table: RankTable, count: int) -> Iterator[ChoiceTree]:
    rng = random.Random(7)
    for _ in range(count):
        size, ranks = rng.randint(1, 40), rng.choice([2, 4, 10])
        yield random_tree(size, depth=table.depths, ranks=ranks, seed=rng.randrange(1 << 30))


@pytest.mark.parametrize("name", ["medusa", "eagle"])
@pytest.mark.slow
def test_replay_of_random_trees_equals_real_runs_step_by_step(name: str) -> None:
    case: Case = golden(name)
    table = measure_ranks(case.config, case.bench, case.texts, depths=6)
    deepest = 0
    for tree in trees_of(table, NUM_TREES):
        result = replay(table, tree)
        config = case.config.with_tree(tree)
        assert_equals_runs(table, result, case.bench.target, config, case.bench, case.texts)
        deepest = max(deepest, len(position_rates(result)))
    assert deepest >= 3, "the heads must be right often enough to tell trees apart"


@pytest.mark.parametrize(("name", "field"), [("medusa", "tree"), ("eagle", "name")])
def test_replay_of_published_trees_equals_the_reference(name: str, field: str) -> None:
    """The golden runs were made by the papers' own code."""
    case = golden(name)
    folder = {"medusa": "medusa/case_a", "eagle": "eagle/eagle1"}[name]
    expected = golden_case(folder).expected
    written = ("plain_greedy", "greedy_new_ids")
    texts = [
        Text(tuple(asked), tuple(next(p[key] for key in written if key in p)))
        for asked, p in zip(case.prompts, expected["prompts"], strict=False)
    ]
    table = measure_ranks(case.config, case.bench, texts, depths=6)
    trees = expected["trees"]
    if isinstance(trees, list):
        trees = {tree["name"]: tree for tree in trees}
    compared = 0
    for run in expected["runs"]:
        if run.get("mode", "greedy") != "greedy":
            continue
        result = replay(table, ChoiceTree.parse(trees[run[field]]["choices"]))
        ours = [accepted for _, accepted in by_text(table, result)[run["prompt"]]]
        theirs = run.get("accept_lengths") or [s["accept_length"] for s in run["steps"]]
        shared = min(len(ours), len(theirs))
        assert shared > 8 and ours[:shared] == theirs[:shared]
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_drafts_are_cut_where_the_context_ends_as_decoding_cuts_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden(name)
    target = case.bench.target
    prompt = case.prompts[0]
    monkeypatch.setattr(target.config, "max_position_embeddings", len(prompt) + 20)
    texts = texts_of(case.bench, [prompt], Limits(max_new_tokens=100))
    assert len(texts[0].output_ids) == 20
    table = measure_ranks(case.config, case.bench, texts, depths=6)
    for tree in trees_of(table, 6):
        config = case.config.with_tree(tree)
        assert_equals_runs(table, replay(table, tree), target, config, case.bench, texts)


# ---- chains


def repeating_target(noise: float = 0.0) -> Target:
    """Writes few different tokens, and much of it again; with noise, nearly the same ones."""
    target = learnable_target(num_layers=3)
    weight = target.lm_head.get_parameter("weight")
    with torch.no_grad():
        weight.add_(noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    return target


def chain_case(name: str) -> tuple[BuildContext, MethodConfig, list[Text]]:
    if name in ("redrafter", "eagle3"):
        case = golden(name)
        beam = {"beam_width": 1} if name == "redrafter" else {}
        return case.bench, case.config.replace(**beam), case.texts
    bench = build_context(repeating_target(), small=repeating_target(noise=1.0))
    prompts = [[10, 20, 30] * 4, [77, 78, 77, 78, 77], list(range(40, 60))]
    configs: dict[str, MethodConfig] = {
        "draft": DraftTargetConfig(speculative_model="small"),
        "unsure": DraftTargetConfig(speculative_model="small", confidence_threshold=0.8),
        "ngram": NGramConfig(),
        "ngram, own pool": NGramConfig(is_public_pool=False, is_keep_all=False),
        "prompt lookup": NGramConfig(lookup="transformers", max_matching_ngram_size=3),
        "suffix": SuffixConfig(),
        "suffix tree": SuffixConfig(use_tree_spec=True, use_global_pool=True),
    }
    return bench, configs[name], texts_of(bench, prompts, Limits(max_new_tokens=60))


CHAINS = (
    *("draft", "unsure", "ngram", "ngram, own pool", "prompt lookup", "suffix", "suffix tree"),
    *("redrafter", "eagle3"),
)


@pytest.mark.parametrize("name", CHAINS)
def test_chain_of_every_length_equals_real_runs_step_by_step(name: str) -> None:
    bench, config, texts = chain_case(name)
    table = measure_ranks(config, bench, texts, depths=5)
    mats = set[float]()
    for length in (1, 5):
        result = replay_chain(table, length)
        chosen = config.with_tree(ChoiceTree.chain(length))
        assert_equals_runs(table, result, bench.target, chosen, bench, texts)
        mats.add(result.mat)
    assert len(mats) > 1, "no draft was right"
