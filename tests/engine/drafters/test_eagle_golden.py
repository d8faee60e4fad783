"""EAGLE-1, 2 and 3 against what the papers' own code did with the same checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.accept import Lossless, VerifiedTree
from engine.config import Sampling
from engine.drafters.eagle.head import HeadEntries
from engine.drafters.eagle.methods import MC_SIM_7B_63, Eagle3Config, EagleConfig, EagleDrafter
from engine.drafters.heads.layer import HeadCache
from engine.feature_log import features_of
from engine.proposal import Budget, DraftDists, Outcome
from engine.sampling import SeededDraws
from engine.steps import Step
from engine.tree import ChoiceTree
from tests.engine.drafters.golden import ROOT, GoldenCase, golden_case
from tests.engine.drafters.judges import observe, open_session, write
from tests.models import build_context

CASES = {
    **{name: (f"eagle/{name}", "") for name in ("eagle1", "eagle2", "eagle3")},
    "eagle3_fullvocab": ("eagle/eagle3", "_fullvocab"),
}
FLOAT: dict[str, Any] = {"atol": 5e-5, "rtol": 0.0}
PROB: dict[str, Any] = {"atol": 1e-5, "rtol": 0.0}


def case_of(name: str) -> GoldenCase:
    return golden_case(*CASES[name])


def drafter_of(case: GoldenCase, settings: dict[str, Any] | None = None) -> EagleDrafter:
    """The reference's loader arguments, in our settings."""
    values: dict[str, Any] = {}
    method = case.expected["method"]
    if method == "eagle1":
        values |= settings or {}
    else:
        params = settings or {"total_token": 16, "depth": 5, "top_k": 10}
        values |= {
            "use_dynamic_tree": True,
            "max_draft_len": params["depth"] + 1,
            "max_total_draft_tokens": params["total_token"] - 1,
            "dynamic_tree_max_topK": params["top_k"],
        }
    values["speculative_model"] = str(case.folder / case.expected["head_dir"])
    kind = Eagle3Config if method == "eagle3" else EagleConfig
    return kind.parse(values).build(build_context(case.target))


def prompt_of(case: GoldenCase, record: dict[str, Any]) -> list[int]:
    ids: list[int] = case.expected["prompts"][record["prompt"]]["input_ids"]
    return ids


def choices_of(case: GoldenCase, name: str) -> Any:
    return next(tree["choices"] for tree in case.expected["trees"] if tree["name"] == name)


def runs() -> list[Any]:
    return [
        pytest.param(case, i, id=f"{case}-{record['name']}-prompt{record['prompt']}")
        for case, (folder, suffix) in CASES.items()
        for i, record in enumerate(
            json.loads((ROOT / folder / f"expected{suffix}.json").read_text())["runs"]
        )
    ]


# ---- one pass of the head


@pytest.mark.parametrize("name", CASES)
def test_features_and_head_outputs_equal_the_reference(name: str) -> None:
    case = case_of(name)
    drafter, wanted = drafter_of(case), case.tensors
    prompt = prompt_of(case, case.expected["head_io"])
    shown = case.target.prefill(prompt, case.target.new_cache(64), drafter.needs)
    features = features_of(shown)
    torch.testing.assert_close(features, wanted["target_features"], **FLOAT)
    head, fed = drafter.head, wanted["head_input_ids"]
    with torch.inference_mode():
        outputs = head(head.fuse(features), fed, torch.arange(len(fed)), HeadCache(1))
    torch.testing.assert_close(outputs, wanted["head_hidden"], **FLOAT)
    check_top10(drafter, outputs, wanted, "head")


@pytest.mark.parametrize("name", CASES)
def test_siblings_fed_as_tree_entries_equal_the_reference(name: str) -> None:
    case = case_of(name)
    drafter, wanted = drafter_of(case), case.tensors
    session = HeadEntries(drafter.head, drafter.new_cache())
    fed = wanted["level1_input_ids"]
    with torch.inference_mode():
        session.feed_base(wanted["target_features"], wanted["head_input_ids"])
        torch.testing.assert_close(session.output, wanted["head_hidden"][-1:], **FLOAT)
        siblings = torch.eye(10, dtype=torch.bool)
        outputs, _ = session.expand(session.output.expand(10, -1), fed, 1, siblings)
    torch.testing.assert_close(outputs, wanted["level1_hidden"], **FLOAT)
    check_top10(drafter, outputs, wanted, "level1")


def check_top10(
    drafter: EagleDrafter, outputs: Tensor, wanted: dict[str, Tensor], name: str
) -> None:
    with torch.inference_mode():
        best, draft_ids = drafter.head.logits(outputs).topk(10)
        ids = drafter.head.vocabulary.target_ids(draft_ids)
    torch.testing.assert_close(best, wanted[f"{name}_top10_logits"], **FLOAT)
    assert torch.equal(ids, wanted[f"{name}_top10_ids"])
    if f"{name}_top10_draft_ids" in wanted:
        assert torch.equal(draft_ids, wanted[f"{name}_top10_draft_ids"])


# ---- trees and runs


def test_the_default_tree_is_the_reference_s() -> None:
    trees = golden_case("eagle/eagle1").expected["trees"]
    assert EagleConfig().eagle_choices == MC_SIM_7B_63.paths
    assert MC_SIM_7B_63.as_lists() == trees[0]["choices"] and trees[0]["name"] == "mc_sim_7b_63"
    for tree in trees:
        shape = ChoiceTree.parse(tree["choices"]).shape
        assert list(shape.parents) == tree["parents"]
        assert shape.depths.tolist() == tree["depths"] and len(shape) == tree["n_nodes"]


@pytest.mark.parametrize(("name", "index"), runs())
def test_every_step_of_a_run_equals_the_reference(name: str, index: int) -> None:
    case = case_of(name)
    record = case.expected["runs"][index]
    static = name == "eagle1"
    settings = {"eagle_choices": choices_of(case, record["name"])} if static else record["params"]
    drafter = drafter_of(case, settings)
    assert drafter.notes == ()
    text = write(case.target, drafter, prompt_of(case, record), tokens=64)
    steps, output = text.steps, text.output
    for step, golden in zip(steps, record["steps"], strict=False):
        assert list(step.tokens) == golden["tokens"]
        assert [0, *step.accepted] == golden["accepted_path"]
        assert step.bonus == golden["next_root"]
        assert step.context_len == golden["n_context"]
        if static:
            check_sibling_logits(step, golden["draft_logits"])
        else:
            assert list(step.parents) == golden["parents"]
            assert scores_of(step) == pytest.approx(golden["scores"], abs=5e-5)
    steps = steps[: record["n_steps"]]
    assert [step.num_accepted for step in steps] == record["accept_lengths"]
    mat = 1 + sum(step.num_accepted for step in steps) / len(steps)
    assert mat == pytest.approx(record["mean_tokens_per_step"], abs=1e-6)
    golden_output = record["output_new_ids"]
    assert output[: len(golden_output)] == golden_output
    assert output == case.expected["prompts"][record["prompt"]]["greedy_new_ids"][:64]


def scores_of(step: Step) -> list[float]:
    """Cumulative log-probability of every node, from the probabilities in the record."""
    scores = [0.0]
    for parent, prob in zip(step.parents[1:], step.draft_probs[1:], strict=True):
        assert prob is not None
        scores.append(scores[parent] + math.log(prob))
    return scores


def check_sibling_logits(step: Step, draft_logits: Sequence[float]) -> None:
    """Siblings' probabilities and logits come from one softmax: their ratios must agree."""
    eldest: dict[int, int] = {}
    for node, parent in enumerate(step.parents):
        if node:
            first = eldest.setdefault(parent, node)
            ours, other = step.draft_probs[node], step.draft_probs[first]
            assert ours is not None and other is not None
            apart = draft_logits[node] - draft_logits[first]
            assert math.log(ours / other) == pytest.approx(apart, abs=1e-4)


# ---- sampling: the reference's draws replayed


class Replay(SeededDraws):
    """Recorded uniform draws; the final draw is the recorded next root."""

    def __init__(self, step: dict[str, Any], next_root_probs: Tensor | None) -> None:
        self._uniform: Iterator[float] = iter(step["draws"])
        self._next_root: int = step["next_root"]
        self._probs = next_root_probs

    def uniform(self) -> float:
        return next(self._uniform)

    def pick(self, probs: Tensor) -> int:
        assert next(self._uniform, None) is None, "all recorded draws are used"
        if self._probs is not None:
            torch.testing.assert_close(probs, self._probs, **PROB)
        return self._next_root


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
@torch.inference_mode()
def test_sampled_runs_replay_with_the_recorded_draws(name: str) -> None:
    case = case_of(name)
    record = case.expected["sampling"][0]
    settings = {key: record[key] for key in ("temperature", "top_k")}
    sampling = Sampling(top_p=record["top_p"] or 1.0, **settings)
    target, prompt = case.target, prompt_of(case, record)
    drafter = drafter_of(case, record["params"])
    cache = target.new_cache(256)
    shown = target.prefill(prompt, cache, drafter.needs)
    root = record["steps"][0]["tokens"][0]
    session = open_session(drafter, prompt, root, shown, sampling)
    for golden in record["steps"]:
        proposal = session.propose(Budget(100))
        assert proposal.dists is None, "dynamic trees follow from the context alone"
        assert proposal.tokens.tolist() == golden["tokens"]
        assert list(proposal.shape.parents) == golden["parents"]
        shown = target.verify(proposal, cache, drafter.needs)
        prefix, probs = golden.get("tensors"), None
        if prefix:
            torch.testing.assert_close(shown.logits, case.tensors[f"{prefix}.node_logits"], **FLOAT)
            probs = case.tensors[f"{prefix}.next_root_probs"]
        verified = VerifiedTree(golden["tokens"], proposal.shape, shown.logits)
        accepted = Lossless(sampling)(verified, Replay(golden, probs))
        rows = (0, *accepted.path)
        assert list(rows) == golden["accepted_path"]
        cache.commit(rows)
        committed = (*golden["accepted_tokens"][1:], golden["next_root"])
        observe(session, Outcome(proposal, shown, rows, committed))


def test_sampled_static_trees_verify_as_recorded() -> None:
    case = case_of("eagle1")
    record = case.expected["sampling"][0]
    shape = ChoiceTree.parse(choices_of(case, record["tree_name"])).shape
    for golden in record["steps"]:
        prefix = golden["tensors"]
        levels = [case.tensors[f"{prefix}.draft_probs{depth}"] for depth in range(5)]
        first = [sum(len(level) for level in levels[:depth]) for depth in range(5)]
        rows = {
            shape.parents[node]: first[depth] + row
            for node, (depth, row) in enumerate(record["node_level_row"])
            if node
        }
        dists = DraftDists(torch.cat(levels), rows)
        logits = case.tensors[f"{prefix}.node_logits"]
        verified = VerifiedTree(golden["tokens"], shape, logits, dists)
        replay = Replay(golden, case.tensors[f"{prefix}.next_root_probs"])
        sampling = Sampling(temperature=record["temperature"], verification="token")
        accepted = Lossless(sampling)(verified, replay)
        assert [0, *accepted.path] == golden["accepted_path"]


@torch.inference_mode()
def test_static_trees_name_the_distributions_in_the_reference_s_order() -> None:
    case = case_of("eagle1")
    drafter, prompt = drafter_of(case), prompt_of(case, case.expected["sampling"][0])
    shown = case.target.prefill(prompt, case.target.new_cache(64), drafter.needs)
    root = case.expected["head_io"]["root"]
    sampling = Sampling(temperature=1.0)
    session = open_session(drafter, prompt, root, shown, sampling, seed=3)
    proposal = session.propose(Budget(100))
    assert proposal.dists is not None and proposal.draft_probs is not None
    parents = proposal.shape.parents
    wanted = {parents[n]: row for n, row in enumerate(flat_rows(case)) if n}
    assert proposal.dists.row_of_parent == wanted
    for node, token in enumerate(proposal.tokens.tolist()):
        if node:
            prob = proposal.dists.probs[wanted[parents[node]], token]
            assert float(prob) == pytest.approx(float(proposal.draft_probs[node]))
    first_row = case.tensors["head_hidden"][-1:] @ case.target.lm_head.get_parameter("weight").T
    torch.testing.assert_close(proposal.dists.probs[:1], first_row.softmax(-1), **PROB)


def flat_rows(case: GoldenCase) -> list[int]:
    """Row of every node's distribution when the levels' rows are counted through."""
    pairs = case.expected["sampling"][0]["node_level_row"]
    sizes = [1 + max(row for level, row in pairs if level == depth) for depth in range(5)]
    return [sum(sizes[:level]) + row if level >= 0 else -1 for level, row in pairs]
