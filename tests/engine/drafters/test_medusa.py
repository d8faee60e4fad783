"""Medusa against the reference's golden data, and its promises on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.accept import Acceptance, Lossless, Typical, VerifiedTree
from engine.config import Sampling
from engine.drafters.heads.medusa import MedusaConfig, MedusaDrafter, choice_slots, read_heads
from engine.errors import DrafterError, TreeError, VocabularyError
from engine.metrics import Tally
from engine.model.target import Target
from engine.proposal import Needs
from engine.sampling import SeededDraws
from engine.tree import ChoiceTree, tree_buffers
from tests.engine.drafters.fitted import save_medusa
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.drafters.judges import assert_greedy_lossless, begin, write
from tests.models import build_context, tiny_target

CASE = ROOT / "medusa" / "case_a"
V1, V2 = CASE / "head" / "medusa_lm_head.pt", CASE / "head_v2" / "medusa_lm_head.safetensors"
TREES = ("mc_sim_7b_63", "vicuna_7b_stage1", "trtllm_9")


def build(target: Target, heads: Path, choices: Any = ((0,),), **settings: Any) -> MedusaDrafter:
    values = {"speculative_model": str(heads), "medusa_choices": choices, **settings}
    return MedusaConfig.parse(values).build(build_context(target))


# ---- equal to the reference


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_head_outputs_equal_the_reference(layout: str) -> None:
    case = golden_case("medusa/case_a")
    heads = read_heads(str(CASE / {"v1": "head", "v2": "head_v2"}[layout]), case.target)
    assert heads.count == 5, "the file's number of heads, not the config's"
    with torch.inference_mode():
        logits = heads.logits(case.tensors["head_check.hidden"], 5)
    wanted = case.tensors[f"head_check.logits_{layout}"]
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=0)
    for prompt in case.expected["prefill_check"]:
        ids = case.expected["prompts"][prompt["prompt"]]["ids"]
        shown = case.target.prefill(ids, case.target.new_cache(64), Needs(hidden=True))
        assert shown.hidden is not None
        key = f"prefill.{prompt['prompt']}"
        hidden = case.tensors[f"{key}.hidden_last"]
        torch.testing.assert_close(shown.hidden[-1], hidden, atol=2e-4, rtol=0)
        with torch.inference_mode():
            logits = heads.logits(shown.hidden[-1:], 5)[:, 0]
        wanted = case.tensors[f"{key}.medusa_logits_last_{layout}"]
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=0)
        assert logits.argmax(dim=-1).tolist() == prompt[f"{layout}_head_argmax"]


@pytest.mark.parametrize("name", TREES)
def test_tree_buffers_equal_the_reference(name: str) -> None:
    case = golden_case("medusa/case_a")
    tree = ChoiceTree.parse(case.expected["trees"][name]["choices"])
    golden = {
        part: case.tensors[f"tree.{name}.{part}"].long()
        for part in ("tree_indices", "position_ids", "attn_mask", "retrieve_indices")
    }
    assert torch.equal(choice_slots(tree, 10), golden["tree_indices"])
    assert torch.equal(tree.shape.depths, golden["position_ids"])
    assert torch.equal(tree.shape.ancestors.long(), golden["attn_mask"])
    buffers = tree_buffers(tree.shape)
    assert buffers["retrieve_indices"] == golden["retrieve_indices"].tolist()
    words = torch.tensor(buffers["spec_decoding_packed_mask"])
    bits = words[:, :, None] >> torch.arange(32) & 1
    assert torch.equal(bits.flatten(1)[:, : len(tree) + 1], golden["attn_mask"])
    assert not bits.flatten(1)[:, len(tree) + 1 :].any()


@pytest.mark.parametrize("number", range(10))
def test_every_step_and_text_equal_the_reference(number: int) -> None:
    case = golden_case("medusa/case_a")
    golden = case.expected["runs"][number]
    settings: dict[str, Any] = {}
    if golden["mode"] != "greedy":
        names = ("posterior_threshold", "posterior_alpha")
        settings = {"acceptance": "typical", **{name: golden[name] for name in names}}
    choices = case.expected["trees"][golden["tree"]]["choices"]
    drafter = build(case.target, CASE / "head", choices, **settings)
    prompt = case.expected["prompts"][golden["prompt"]]
    heat = golden.get("temperature", 0.0)
    text = write(case.target, drafter, prompt["ids"], tokens=64, temperature=heat)
    tally = Tally()
    for ours, theirs in zip(text.steps, golden["steps"], strict=False):
        assert ours.context_len == theirs["committed_len"]
        assert list(ours.tokens) == theirs["tree_tokens"]
        assert [0, *ours.accepted] == theirs["accepted_nodes"]
        assert [ours.tokens[0], *ours.committed[:-1]] == theirs["accepted_tokens"]
        assert ours.bonus == theirs["next_root"]
        tally.add(ours)
    assert tally.metrics.num_steps == golden["n_steps"]
    assert tally.metrics.mat == pytest.approx(golden["mean_tokens_per_step"])
    assert text.output[:48] == golden["final_tokens"]
    if golden["mode"] == "greedy":
        assert text.output[:48] == prompt["plain_greedy"]


def test_typical_acceptance_judges_every_edge_as_the_reference() -> None:
    case = golden_case("medusa/case_a")
    num_tie_breaks = 0
    for check in case.expected["typical_checks"]:
        tree = ChoiceTree.parse(case.expected["trees"][check["tree"]]["choices"])
        rows = case.tensors[f"tree.{check['tree']}.retrieve_indices"].long()
        tokens = case.tensors[f"{check['name']}.tree_tokens"].tolist()
        logits = case.tensors[f"{check['name']}.tree_logits"]
        verified = VerifiedTree(tokens, tree.shape, logits)
        for j, result in enumerate(check["results"]):
            names = ("temperature", "posterior_threshold", "posterior_alpha")
            rule = Typical(*(result[name] for name in names))
            chance, bar = rule.judge(verified)
            real = rows[:, 1:] >= 0
            edges = rows[:, 1:][real] - 1
            for ours, name in ((chance, "candidate_prob"), (bar, "threshold")):
                theirs = case.tensors[f"{check['name']}.{j}.{name}"][real]
                torch.testing.assert_close(ours[edges], theirs, rtol=1e-3, atol=1e-9)
            accepted = rule(verified, SeededDraws(0))
            assert [tokens[0], *(tokens[node] for node in accepted.path)] == (
                result["accepted_tokens"]
            )
            assert len(accepted.path) == result["accept_length"]
            last = accepted.path[-1] if accepted.path else 0
            assert accepted.next_token == int(logits[last].argmax())
            num_tie_breaks += result["n_distinct_best_prefixes"] > 1
    assert num_tie_breaks, "the golden data must exercise the tie-break"


def test_typical_acceptance_never_accepts_padding() -> None:
    """The reference reads a dummy token 0 behind a short leaf; a tree has nothing there."""
    tree = ChoiceTree.parse([[0], [1], [1, 0]])
    logits = torch.full((4, 6), -20.0)
    logits[0, 3] = 20.0
    logits[1, 0] = logits[2, 0] = logits[3, 0] = 20.0
    verified = VerifiedTree([5, 3, 4, 2], tree.shape, logits)
    assert Typical(1.0, 0.09, 0.3)(verified, SeededDraws(0)) == Acceptance((1,), 0)


# ---- what may be loaded


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_heads_merged_into_a_full_model_equal_flat_ones(version: str, tmp_path: Path) -> None:
    case = golden_case("medusa/case_a")
    flat = torch.load(V1, weights_only=True) if version == "v1" else load_file(V2)
    merged = load_file(CASE / "target" / "model.safetensors")
    merged |= {f"medusa_head.{name}": tensor.contiguous() for name, tensor in flat.items()}
    save_file(merged, tmp_path / "model.safetensors")
    hidden = case.tensors["head_check.hidden"]
    with torch.inference_mode():
        logits = read_heads(str(tmp_path), case.target).logits(hidden, 5)
    wanted = case.tensors[f"head_check.logits_{version}"]
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=0)


def test_residual_layers_beyond_the_first_are_applied_in_turn(tmp_path: Path) -> None:
    target = tiny_target()
    generator = torch.Generator().manual_seed(1)
    shapes = {"linear.weight": (32, 32), "linear.bias": (32,)}
    tensors = {
        f"{head}.{layer}.{name}": 0.2 * torch.randn(shape, generator=generator)
        for head in range(2)
        for layer in range(3)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "heads.safetensors")
    hidden = torch.randn(4, 32, generator=generator)
    with torch.inference_mode():
        logits = read_heads(str(tmp_path), target).logits(hidden, 2)
        x = hidden
        for layer in range(3):
            weight, bias = (tensors[f"1.{layer}.{name}"] for name in shapes)
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        torch.testing.assert_close(logits[1], target.lm_head(x))


def test_a_tree_beyond_the_heads_is_refused_at_build() -> None:
    target, heads = golden_case("medusa/case_a").target, CASE / "head"
    with pytest.raises(TreeError, match=r"\[0, 0, 0, 0\] has depth 4, but .* drafts 3 tokens"):
        build(target, heads, [[0, 0, 0, 0], [1]], num_medusa_heads=3)
    build(target, heads, [[0, 0, 0], [1]], num_medusa_heads=3)
    with pytest.raises(TreeError, match=r"\[256\] uses rank 256, but .* ranks 0 to 255"):
        build(target, heads, [[0], [256]])


def test_heads_of_another_target_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"predicts 256 tokens, but tiny-llama has 288"):
        build(tiny_target(hidden_size=64), CASE / "head")
    with pytest.raises(DrafterError, match=r"0\.0\.linear\.weight is 64×64, .* needs 32×32"):
        build(tiny_target(), CASE / "head_v2")
    tensors = torch.load(V1, weights_only=True)
    del tensors["2.0.linear.bias"]
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(DrafterError, match=r"no tensor 2\.0\.linear\.bias"):
        build(golden_case("medusa/case_a").target, tmp_path)
    with pytest.raises(DrafterError, match=r"num_medusa_heads is 6, but .* holds 5 heads"):
        build(golden_case("medusa/case_a").target, CASE / "head", num_medusa_heads=6)
    with pytest.raises(DrafterError, match="holds no Medusa heads"):
        build(golden_case("medusa/case_a").target, CASE / "target")


# ---- promises


def test_typical_acceptance_is_labelled_lossy_and_off_under_greedy(tmp_path: Path) -> None:
    assert MedusaConfig().lossless
    assert not MedusaConfig(acceptance="typical").lossless
    target = tiny_target(eos_token_id=None)
    settings = {"acceptance": "typical", "posterior_threshold": 0.0}
    drafter = build(target, save_medusa(tmp_path, target, num_heads=2), [[0, 0], [1]], **settings)
    warm = begin(drafter, [1, 2, 3], target=target, sampling=Sampling(temperature=0.7))
    assert warm.rule() == Typical(0.7, 0.0, 0.3)
    assert begin(drafter, [1, 2, 3], target=target).rule() == Lossless(Sampling())
    assert_greedy_lossless(target, drafter)


def test_draft_probabilities_are_the_heads_own(tmp_path: Path) -> None:
    case = golden_case("medusa/case_a")
    drafter = build(case.target, CASE / "head", [[0, 0], [3, 1]])
    steps = write(case.target, drafter, case.expected["prompts"][0]["ids"]).steps
    probs = case.tensors["prefill.0.medusa_logits_last_v1"].softmax(dim=-1)
    best = probs.sort(dim=-1, descending=True).values
    assert steps[0].parents == (-1, 0, 0, 1, 2) and steps[0].ranks == (0, 0, 3, 0, 1)
    wanted = [best[0, 0], best[0, 3], best[1, 0], best[1, 1]]
    assert steps[0].draft_probs[0] is None
    assert steps[0].draft_probs[1:] == pytest.approx([float(p) for p in wanted], rel=1e-3)
