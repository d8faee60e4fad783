"""Step by step, transformers' own assisted generation drafts and accepts the same tokens.

Its loop is run whole: `generate` is given the text up to the first root, and its candidate
generator is listened to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    PromptLookupCandidateGenerator,
)

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.steps import Step
from tests.models import alike, build_context, tiny_model, tiny_target

PROMPT = [40, 41, 42, 43, 40, 41, 42]
TOKENS = 40
Turns = list[tuple[list[int], int]]
"""Per step, the drafted tokens and how many of them were accepted."""


def theirs(
    generator: type, model: Any, text: list[int], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[Turns, list[int]]:
    """What `generate` drafts and accepts from `text` on, and what it writes."""
    turns: Turns = []
    draft, judge = generator.get_candidates, generator.update_candidate_strategy  # type: ignore[attr-defined]

    def drafting(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        found = draft(self, input_ids, **rest)
        turns.append((found[0][0, input_ids.shape[1] :].tolist(), 0))
        return found

    def judging(self: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        turns[-1] = turns[-1][0], int(num_matches)
        judge(self, input_ids, scores, num_matches)

    monkeypatch.setattr(generator, "get_candidates", drafting)
    monkeypatch.setattr(generator, "update_candidate_strategy", judging)
    ids = torch.tensor([text])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **how
    )
    return turns, whole[0, len(text) :].tolist()


@pytest.mark.parametrize("name", ["Draft_Target", "NGram"])
def test_drafts_and_acceptance_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(eos_token_id=None)
    small = alike(eos_token_id=None)
    small.model.generation_config.num_assistant_tokens = 4
    small.model.generation_config.num_assistant_tokens_schedule = "constant"
    small.model.generation_config.assistant_confidence_threshold = 0.0
    settings, generator, how = {
        "Draft_Target": (
            {"speculative_model": "small", "max_draft_len": 4},
            AssistedCandidateGenerator,
            {"assistant_model": small.model},
        ),
        "NGram": (
            {"lookup": "transformers", "max_draft_len": 4, "max_matching_ngram_size": 3},
            PromptLookupCandidateGenerator,
            {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3},
        ),
    }[name]
    drafter = parse_method({"decoding_type": name, **settings}).build(
        build_context(target, small=small)
    )
    records = list(decode(target, drafter, PROMPT, limits=Limits(max_new_tokens=TOKENS)))
    steps = [record for record in records if isinstance(record, Step)]
    model = tiny_model(eos_token_id=None)  # with transformers' own attention
    turns, text = theirs(generator, model, [*PROMPT, steps[0].tokens[0]], monkeypatch, **how)
    written = [token for step in steps for token in step.committed]
    assert text[: TOKENS - 1] == written[: TOKENS - 1]
    ours = [(list(step.tokens[1:]), step.num_accepted) for step in steps]
    assert ours[:-2] == turns[: len(ours) - 2], "the last steps are cut to the length each its way"
    assert {accepted for _, accepted in ours[:-2]} >= {0, 1}
