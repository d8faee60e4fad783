"""ReDrafter against the reference's golden data, and its promises on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafters.heads.redrafter import (
    Beams,
    ReDrafterConfig,
    ReDrafterDrafter,
    best_candidates,
    merge,
    read_head,
    search_beams,
)
from engine.errors import DrafterError, VocabularyError
from engine.metrics import Tally
from engine.model.target import Target
from engine.proposal import Needs
from engine.steps import Step
from engine.tree import TreeShape
from tests.engine.drafters import judges
from tests.engine.drafters.fitted import save_redrafter
from tests.engine.drafters.golden import golden_case
from tests.engine.drafters.judges import write
from tests.models import build_context, tiny_target

CASES = ("case_a_rnn", "case_b_norn_inputproj")


def build(target: Target, head: Path, **settings: Any) -> ReDrafterDrafter:
    values = {"speculative_model": str(head), **settings}
    return ReDrafterConfig.parse(values).build(build_context(target))


# ---- equal to the reference


@pytest.mark.parametrize("name", CASES)
def test_head_outputs_equal_the_reference(name: str) -> None:
    case = golden_case(f"redrafter/{name}")
    head = read_head(str(case.folder / "head"), case.target)
    contexts, tokens = case.tensors["head_check.context"], case.tensors["head_check.tokens"]
    for row, context in enumerate(contexts):
        state = torch.zeros(1, len(context))
        for step, token in enumerate(tokens[row]):
            with torch.inference_mode():
                state = head.advance(state, token[None])
                logits = head.logits(context[None], state)
            golden = {k: case.tensors[f"head_check.{k}"][row, step] for k in KINDS}
            torch.testing.assert_close(state[0], golden["states"], atol=2e-4, rtol=0)
            torch.testing.assert_close(logits[0], golden["raw_logits"], atol=2e-4, rtol=0)
            best, candidates = best_candidates(logits)
            kept = golden["log_probs"] > -1000
            assert kept.sum() == 50
            assert set(candidates[0].tolist()) == set(kept.nonzero()[:, 0].tolist())
            wanted = golden["log_probs"][candidates[0]]
            torch.testing.assert_close(best[0], wanted, atol=2e-4, rtol=0)


KINDS = ("states", "raw_logits", "log_probs")


@pytest.mark.parametrize("name", CASES)
def test_first_beam_search_equals_the_reference_in_full_precision(name: str) -> None:
    case = golden_case(f"redrafter/{name}")
    head = read_head(str(case.folder / "head"), case.target)
    for golden in case.expected["runs"]:
        if (golden["beam_width"], golden["beam_length"]) != (4, 4):
            continue
        ids = case.expected["prompts"][golden["prompt"]]["ids"]
        key = f"run.{golden['prompt']}.4x4.step0"
        shown = case.target.prefill(ids, case.target.new_cache(64), Needs(hidden=True))
        assert shown.hidden is not None
        wanted = case.tensors[f"{key}.context"]
        torch.testing.assert_close(shown.hidden[-1], wanted, atol=2e-4, rtol=0)
        root = golden["steps"][0]["init_token"]
        with torch.inference_mode():
            beams = search_beams(head, shown.hidden[-1:], root, width=4, length=3)
        assert beams.tokens.tolist() == [beam[1:] for beam in golden["steps"][0]["beams"]]
        wanted = case.tensors[f"{key}.token_log_probs"]
        torch.testing.assert_close(beams.log_probs, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", CASES)
def test_every_step_and_text_equal_the_reference(name: str, number: int) -> None:
    case = golden_case(f"redrafter/{name}")
    golden = case.expected["runs"][number]
    shape = {key: golden[key] for key in ("beam_width", "beam_length")}
    drafter = build(case.target, case.folder / "head", **shape)
    prompt = case.expected["prompts"][golden["prompt"]]
    text = write(case.target, drafter, prompt["ids"], tokens=64)
    tally = Tally()
    for ours, theirs in zip(text.steps, golden["steps"], strict=False):
        check_step(ours, theirs)
        tally.add(ours)
    assert tally.metrics.num_steps == golden["n_steps"]
    assert tally.metrics.mat == pytest.approx(golden["mean_tokens_per_step"])
    assert text.output[:48] == golden["final_tokens"] == prompt["plain_greedy"]


def check_step(ours: Step, theirs: dict[str, Any]) -> None:
    assert ours.context_len == theirs["committed_len"]
    assert list(ours.tokens) == theirs["packed_tokens"]
    shape = TreeShape(ours.parents)
    paths = [[0, *shape.path_to(node)] for node in range(len(shape))]
    assert paths == theirs["packed_ancestors"]
    assert [len(path) - 1 for path in paths] == theirs["position_offsets"]
    assert [ours.tokens[0], *ours.committed[:-1]] == theirs["accepted_tokens"]
    assert ours.num_accepted == theirs["n_accepted"]
    assert ours.bonus == theirs["next_init_token"]
    for nodes, log_probs in zip(theirs["unpacker"], theirs["token_log_probs"], strict=True):
        probs = torch.tensor([ours.draft_probs[node] or 0.0 for node in nodes[1:]])
        torch.testing.assert_close(probs.log(), torch.tensor(log_probs), atol=2e-3, rtol=0)


# ---- the search


def test_tokens_that_tie_with_the_last_candidate_count_in_the_normaliser() -> None:
    logits = torch.cat([torch.arange(49.0, 0.0, -1.0), torch.zeros(4)])[None] / 8
    kept, tokens = best_candidates(logits)
    torch.testing.assert_close(kept[0, :49], logits.log_softmax(dim=-1)[0, :49])
    assert tokens[0, :49].tolist() == list(range(49))
    kept, _ = best_candidates(torch.cat([logits, logits - 9], dim=-1))
    torch.testing.assert_close(kept[0, :49], logits.log_softmax(dim=-1)[0, :49])


def test_beams_are_never_more_than_there_are_continuations(tmp_path: Path) -> None:
    target = judges.sampled_target()
    head = read_head(str(save_redrafter(tmp_path, target)), target)
    with torch.inference_mode():
        beams = search_beams(head, torch.ones(1, target.hidden_size), 0, width=200, length=2)
    ids = range(judges.SAMPLED_VOCAB)
    assert sorted(map(tuple, beams.tokens.tolist())) == [(i, j) for i in ids for j in ids]


def test_merged_beams_keep_token_rank_and_probability_together() -> None:
    """The worked example; the last beam ends with a token of another one."""
    tokens = torch.tensor([[5, 6, 7], [5, 6, 8], [9, 1, 5]])
    ranks = torch.tensor([[0, 0, 0], [0, 0, 2], [1, 3, 4]])
    probs = torch.tensor([[0.5, 0.25, 0.3], [0.5, 0.25, 0.125], [0.2, 0.1, 0.4]])
    proposal = merge(Beams(tokens, ranks, probs.log()), 2)
    assert proposal.tokens.tolist() == [2, 5, 6, 7, 8, 9, 1, 5]
    assert proposal.shape.parents == (-1, 0, 1, 2, 2, 0, 5, 6)
    assert proposal.ranks == [0, 0, 0, 0, 2, 1, 3, 4]
    assert proposal.draft_probs is not None
    wanted = [0.5, 0.25, 0.3, 0.125, 0.2, 0.1, 0.4]
    assert proposal.draft_probs[1:].tolist() == pytest.approx(wanted)


# ---- what may be loaded


def test_head_of_another_target_is_refused_with_both_numbers(tmp_path: Path) -> None:
    rnn, plain = (golden_case(f"redrafter/{name}") for name in CASES)
    with pytest.raises(VocabularyError, match="predicts 200 tokens, but tiny-llama has 288"):
        build(tiny_target(), rnn.folder / "head")
    with pytest.raises(DrafterError, match=r"lm_head\.2\.weight is 200×128, .* needs 200×64"):
        build(tiny_target(vocab_size=200, eos_token_id=None), rnn.folder / "head")
    with pytest.raises(DrafterError, match=r"input_proj\.weight is 72×96, .* needs 72×64"):
        build(tiny_target(vocab_size=160, eos_token_id=None), plain.folder / "head")
    tensors = load_file(rnn.folder / "head" / "model.safetensors")
    for kept in (tensors.keys() - {"rnn_u.bias"}, {"rnn_u.bias"}):
        save_file({name: tensors[name] for name in kept}, tmp_path / "model.safetensors")
        missing = "rnn_u.bias" if len(kept) > 1 else "lm_head.0.weight"
        with pytest.raises(DrafterError, match=f"no tensor {missing}"):
            build(rnn.target, tmp_path)
