"""Methods without weights draft what they have seen, and nothing that stands for "not known"."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters import methods, parse_method
from engine.drafters.base import Drafter, Start
from engine.proposal import Budget, Outcome, Proposal
from engine.steps import End, Step
from tests.engine.drafters.judges import target_of
from tests.models import VOCAB, build_context, plain_greedy

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


class Watched(Drafter):
    """Notes what the inner drafter was shown, and what it drafted of nothing shown."""

    def __init__(self, inner: Drafter, top: int) -> None:
        self.inner, self.needs, self.top = inner, inner.needs, top
        self.seen, self.unseen, self.num_drafted = set[int](), list[int](), 0

    def start(self, start: Start) -> None:
        self.seen.update(start.prompt_ids, [start.root])
        self.seen.update(start.output.logits[-1].topk(self.top).indices.tolist())
        self.inner.start(start)

    def propose(self, budget: Budget) -> Proposal:
        proposal = self.inner.propose(budget)
        drafted = proposal.tokens[1:].tolist()
        self.unseen += [token for token in drafted if token not in self.seen]
        self.num_drafted += len(drafted)
        return proposal

    def observe(self, outcome: Outcome) -> None:
        self.seen.update(outcome.committed)
        self.seen.update(outcome.output.logits.topk(self.top).indices.flatten().tolist())
        self.inner.observe(outcome)

    def finish(self) -> None:
        self.inner.finish()


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
    limits = Limits(max_new_tokens=16, ignore_eos=True)
    for ids in (PROMPTS[prompt], [180, *PROMPTS[prompt]], PROMPTS[prompt]):
        *records, end = decode(target, drafter, ids, limits=limits)
        assert isinstance(end, End) and list(end.output_ids) == plain_greedy(target, ids, 16)
        tokens = [token for step in records if isinstance(step, Step) for token in step.tokens]
        assert all(0 <= token < VOCAB for token in tokens)
    assert drafter.unseen == [] and drafter.num_drafted > 0
