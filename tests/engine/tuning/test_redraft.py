"""Texts drafted again offline with other settings: the steps are those of real runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.config import Limits
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.heads.redrafter import ReDrafterConfig
from engine.drafters.lookup.lookahead import LookaheadConfig
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.errors import ConfigError
from engine.tuning import StoppedError
from engine.tuning.ranks import measure_ranks
from engine.tuning.redraft import Redraft, Redrafter
from engine.tuning.replay import replay
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.tuning.runs import golden, ran, random_tree, stopped, texts_of
from tests.engine.tuning.tables import slow_steps
from tests.models import build_context

DYNAMIC: dict[str, Any] = {"eagle2": EagleConfig, "eagle3": Eagle3Config}


def dynamic(name: str) -> tuple[Any, MethodConfig, list[Text]]:
    """A golden EAGLE-2 or -3 head with the texts that the reference wrote."""
    case = golden_case(f"eagle/{name}")
    head = str(ROOT / "eagle" / name / "head")
    config = DYNAMIC[name](speculative_model=head, use_dynamic_tree=True)
    texts = [
        Text(tuple(p["input_ids"]), tuple(p["greedy_new_ids"]), limits=Limits(max_new_tokens=64))
        for p in case.expected["prompts"]
    ]
    return case, config, texts


def sized(config: MethodConfig, total: int, depth: int, top_k: int) -> MethodConfig:
    """In the reference's words."""
    size = {"dynamic_tree_max_topK": top_k, "max_total_draft_tokens": total - 1}
    if top_k == 1:
        return config.replace(use_dynamic_tree=False, max_draft_len=depth + 1)
    return config.replace(max_draft_len=depth + 1, **size)


def steps_of(redraft: Redraft, text: int) -> list[tuple[int, int]]:
    mine = redraft.texts == text
    roots, accepted = redraft.roots[mine], redraft.accepted_lengths[mine]
    return list(zip(roots.tolist(), accepted.tolist(), strict=True))


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_trees_of_all_sizes_equal_the_reference_s_runs(name: str) -> None:
    case, config, texts = dynamic(name)
    redrafter = Redrafter(config, build_context(case.target), texts, tail=8)
    drafted: dict[str, Redraft] = {}
    for run in case.expected["runs"]:
        params = run["params"]
        if run["name"] not in drafted:
            other = sized(config, params["total_token"], params["depth"], params["top_k"])
            drafted[run["name"]] = redrafter.draft(other)
        redraft = drafted[run["name"]]
        ours = [accepted for _, accepted in steps_of(redraft, run["prompt"])]
        theirs = run["accept_lengths"]
        shared = min(len(ours), len(theirs))
        assert shared > 8 and ours[:shared] == theirs[:shared]
        golden_nodes = [len(step["tokens"]) - 1 for step in run["steps"][:shared]]
        mine = redraft.node_counts[redraft.texts == run["prompt"]].tolist()
        assert mine[:shared] == golden_nodes
    redrafter.close()


def test_beams_of_all_widths_equal_real_runs_and_are_not_what_ranks_would_say() -> None:
    case = golden_case("redrafter/case_a_rnn")
    head = str(ROOT / "redrafter" / "case_a_rnn" / "head")
    config = ReDrafterConfig(speculative_model=head)
    bench = build_context(case.target)
    texts = texts_of(bench, [p["ids"] for p in case.expected["prompts"]])
    redrafter = Redrafter(config, bench, texts, tail=8)
    for width, length in ((1, 4), (3, 4), (6, 6)):
        other = config.replace(beam_width=width, beam_length=length)
        redraft = redrafter.draft(other)
        drafter = other.build(bench)
        for number, text in enumerate(texts):
            real = ran(case.target, drafter, text.prompt_ids, text.limits)
            assert [n for _, n in steps_of(redraft, number)] == real.accepted
    assert redraft.num_accepted > 4


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_choice_trees_drafted_again_equal_their_replay(name: str) -> None:
    """Two ways to the same figures: the drafter itself, and its rank table."""
    case = golden(name)
    table = measure_ranks(case.config, case.bench, case.texts, depths=4)
    redrafter = Redrafter(case.config, case.bench, case.texts, tail=4)
    rng = random.Random(3)
    for _ in range(5):
        tree = random_tree(rng, table.depths)
        redraft, replayed = redrafter.draft(case.config.with_tree(tree)), replay(table, tree)
        rows = np.array(table.texts)[redraft.texts] + redraft.roots
        assert rows.tolist() == replayed.roots.tolist()
        assert redraft.mat == replayed.mat
        assert redraft.position_rates == replayed.position_rates
        assert redraft.trees.drafted[tree.paths[-1]] == redraft.num_steps
        taken = [path for _, path in slow_steps(table, tree)]
        for node in tree.paths:
            counted = sum(path[: len(node)] == node for path in taken)
            assert redraft.trees.accepted[node] == counted


def test_what_cannot_be_drafted_again_is_refused() -> None:
    case, config, texts = dynamic("eagle2")
    bench = build_context(case.target)
    redrafter = Redrafter(config, bench, texts, tail=5)
    assert redrafter.tail == 5
    with pytest.raises(ConfigError, match="at most 5 tokens deep, got 6"):
        redrafter.draft(config.replace(max_draft_len=6))
    with pytest.raises(ConfigError, match="speculative_model must stay"):
        redrafter.draft(config.replace(speculative_model="elsewhere", max_draft_len=2))
    with pytest.raises(ConfigError, match="decoding_type must stay Eagle .* got Suffix"):
        redrafter.draft(SuffixConfig(max_draft_len=2))
    with pytest.raises(ConfigError, match="to draft without the target, got Lookahead"):
        Redrafter(LookaheadConfig(), bench, texts)
    with pytest.raises(StoppedError):
        redrafter.draft(config.replace(max_draft_len=3), on_progress=stopped)


def test_texts_whose_features_take_too_much_memory_are_left_out() -> None:
    case, config, texts = dynamic("eagle2")
    context = build_context(case.target)
    whole = Redrafter(config, context, texts)
    sizes = [reading.num_bytes for reading in whole._readings]
    some = Redrafter(config, context, texts, max_bytes=sizes[0] + 1)
    assert whole.num_left_out == 0 and some.num_left_out == len(texts) - 1 > 0
    assert set(some.draft(config).texts.tolist()) == {0}
    with pytest.raises(ConfigError, match="must take at most 100 bytes, got"):
        Redrafter(config, context, texts, max_bytes=100)
