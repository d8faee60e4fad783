"""What is drafted follows from what the drafter was shown, whether it was asked before or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.drafters import methods, parse_method
from engine.drafters.base import Drafter, Start, root_only
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from tests.engine.drafters import judges
from tests.engine.drafters.heads import save_head
from tests.engine.drafters.judges import target_of, write
from tests.engine.drafters.tiny_mtp import load_deepseek, save_deepseek
from tests.models import alike, build_context


class Wrapped(Drafter):
    """Passes every call on."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.needs = inner, inner.needs

    def start(self, start: Start) -> None:
        super().start(start)
        self.inner.start(start)

    def propose(self, budget: Budget) -> Proposal:
        return self.inner.propose(budget)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.inner.observe(outcome)

    def finish(self) -> None:
        self.inner.finish()


# ---- drafts after steps that the drafter was not asked for

TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
PAUSED: dict[str, dict[str, Any]] = {
    "Eagle": {"decoding_type": "Eagle", **TREE, "max_draft_len": 3},
    "Eagle-static": {"decoding_type": "Eagle", "eagle_choices": [[0, 0, 0], [1, 0]]},
    "Eagle3": {"decoding_type": "Eagle3", **TREE, "eagle3_layers_to_capture": [0, 1, 2]},
    "Medusa": {"decoding_type": "Medusa", "medusa_choices": [[0, 0], [0, 1], [1]]},
    "ReDrafter": {"decoding_type": "ReDrafter", "beam_width": 3, "beam_length": 4},
    "Draft_Target": {
        "decoding_type": "Draft_Target",
        "speculative_model": "other",
        "max_draft_len": 3,
    },
    "NGram": {"decoding_type": "NGram", "max_draft_len": 3},
    "Suffix": {"decoding_type": "Suffix", "max_draft_len": 3},
    "MTP": {"decoding_type": "MTP", "max_draft_len": 3},
    "MTP_Assistant": {"decoding_type": "MTP_Assistant", "max_draft_len": 3},
    "PARD": {"decoding_type": "PARD", "speculative_model": "other", "mask_token_id": 270},
    **{name: {"decoding_type": name} for name in ("DFlash", "DSpark", "P_EAGLE")},
}


class Pausing(Wrapped):
    """Asks for a draft every few steps only."""

    def __init__(self, inner: Drafter, target: Target, every: int) -> None:
        super().__init__(inner)
        self._device, self._every, self._step = target.device, every, 0
        self.drawn: dict[int, tuple[list[int], tuple[int, ...]]] = {}

    def propose(self, budget: Budget) -> Proposal:
        self._step += 1
        if self._step % self._every:
            return root_only(self.text[-1], self._device)
        proposal = super().propose(budget)
        self.drawn[len(self.text)] = (proposal.tokens.tolist(), proposal.shape.parents)
        # The root alone is fed: every context comes up, whatever would have been accepted.
        return proposal.keep([0])


def drafts(
    target: Target, values: dict[str, Any], every: int
) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    context = build_context(target, other=alike(eos_token_id=None))
    drafter = Pausing(parse_method(values).build(context), target, every)
    judges.write(target, drafter, judges.PROMPTS[0], tokens=60)
    return drafter.drawn


@pytest.mark.parametrize("name", PAUSED)
def test_drafts_after_a_pause_are_those_without_one(name: str, tmp_path: Path) -> None:
    values = PAUSED[name]
    target = judges.target_of("gemma4_text" if name == "MTP_Assistant" else "llama")
    if name == "MTP":
        target = load_deepseek(save_deepseek(tmp_path / "deepseek", num_mtp_layers=3))
    if head := save_head(values["decoding_type"], tmp_path / "head", target):
        values = {**values, "speculative_model": head}
    always, seldom = (drafts(target, values, every) for every in (1, 5))
    assert len(seldom) >= 10
    assert {at: always[at] for at in seldom} == seldom


# ---- methods without weights draft what they have seen, and nothing that stands for "not known"

PROMPTS = {
    "nothing repeats": [200, 150, 201, 151, 202],
    "some of it repeats": [200, 150, 201, 200, 150, 202, 200],
}
METHODS: dict[str, dict[str, Any]] = {
    "NGram": {},
    "NGram, transformers": {"lookup": "transformers"},
    "Suffix": {"min_token_prob": 0.0},
    "Suffix, tree": {"use_tree_spec": True, "mix_contexts": True, "use_global_pool": True},
    "Token_Recycling": {},
    "Token_Recycling, narrow": {"matrix_top_k": 2, "recycling_choices": [[0, 0, 0], [1, 1]]},
    "Token_Recycling, without the prompt": {"recycle_prompt": False, "keep_matrix": False},
    "Lookahead": {},
    "Lookahead, wide": {"max_window_size": 9, "max_ngram_size": 5, "pool_from_text": False},
    "Combined": {},
    "Combined, lookahead": {"model": {"decoding_type": "Lookahead"}},
}


class Watched(Wrapped):
    """Notes what the inner drafter was shown, and what it drafted of nothing shown."""

    def __init__(self, inner: Drafter, top: int) -> None:
        super().__init__(inner)
        self.top, self.seen, self.unseen, self.num_drafted = top, set[int](), list[int](), 0

    def start(self, start: Start) -> None:
        self.seen.update(start.prompt_ids, [start.root])
        self.seen.update(start.output.logits[-1].topk(self.top).indices.tolist())
        super().start(start)

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        drafted = proposal.tokens[1:].tolist()
        self.unseen += [token for token in drafted if token not in self.seen]
        self.num_drafted += len(drafted)
        return proposal

    def observe(self, outcome: Outcome) -> None:
        self.seen.update(outcome.committed)
        self.seen.update(outcome.output.logits.topk(self.top).indices.flatten().tolist())
        super().observe(outcome)


def test_every_method_without_weights_is_here() -> None:
    weightless = {
        n for n, kind in methods().items() if "speculative_model" not in kind.model_fields
    }
    assert {name.partition(",")[0] for name in METHODS} == weightless - {
        "Autoregressive",
        "MTP",  # its weights are the target's
        "User_Provided",
    }


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", METHODS)
def test_no_placeholder_is_ever_verified(name: str, prompt: str) -> None:
    """A first text, of which a second one may know, and a third after weights were released."""
    target = target_of("llama")
    config = parse_method({"decoding_type": name.partition(",")[0], **METHODS[name]})
    top = max(1, getattr(config, "matrix_top_k", 8 if name == "Combined" else 1))
    drafter = Watched(config.build(build_context(target)), top)
    for ids in (PROMPTS[prompt], [180, *PROMPTS[prompt]], PROMPTS[prompt]):
        write(target, drafter, ids, tokens=16)
    assert drafter.unseen == [] and drafter.num_drafted > 0
