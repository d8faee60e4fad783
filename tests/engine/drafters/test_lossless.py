"""Methods without a checkpoint write the target's own text, and sample from its law."""

from __future__ import annotations

from typing import Any

import pytest

from engine.drafters import parse_method, user_provided
from engine.drafters.method import MethodConfig
from tests.engine.drafters import judges
from tests.engine.drafters.example_drafter import PairDrafter
from tests.engine.tuning.controlled import AtRandom
from tests.models import build_context

NGRAM = {"decoding_type": "NGram"}
TREE = {"decoding_type": "Suffix", "use_tree_spec": True}
MIXED = {**TREE, "mix_contexts": True}
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"decoding_type": "Suffix"},
    "suffix-single": {"decoding_type": "Suffix", "max_draft_len": 1},
    "suffix-long": {"decoding_type": "Suffix", "max_spec_factor": 4.0, "min_token_prob": 0.0},
    "suffix-tree": {**TREE, "max_spec_factor": 8.0, "min_token_prob": 0.01},
    "suffix-pool": {**TREE, "use_global_pool": True, "max_tree_depth": 4},
    "suffix-mixed": {**MIXED, "max_total_draft_tokens": 6},
    "suffix-mixed-pool": {**MIXED, "use_global_pool": True, "min_token_prob": 0.0, "escape": 0.5},
    "recycling": {"decoding_type": "Token_Recycling"},
    "recycling-chain": {
        "decoding_type": "Token_Recycling",
        "matrix_top_k": 1,
        "recycling_choices": [[0], [0, 0], [0, 0, 0]],
    },
    "recycling-low-ranks": {
        "decoding_type": "Token_Recycling",
        "matrix_top_k": 3,
        "recycling_choices": [[0, 2], [1, 0], [2]],
    },
    "recycling-no-prompt": {"decoding_type": "Token_Recycling", "recycle_prompt": False},
    "recycling-per-text": {"decoding_type": "Token_Recycling", "keep_matrix": False},
    "lookahead": {"decoding_type": "Lookahead"},
    "lookahead-least": {
        "decoding_type": "Lookahead",
        "max_window_size": 1,
        "max_ngram_size": 2,
        "max_verification_set_size": 1,
    },
    "lookahead-narrow": {"decoding_type": "Lookahead", "max_window_size": 1, "max_ngram_size": 4},
    "lookahead-bigrams": {"decoding_type": "Lookahead", "max_window_size": 5, "max_ngram_size": 2},
    "lookahead-wide": {
        "decoding_type": "Lookahead",
        "max_window_size": 7,
        "max_ngram_size": 5,
        "pool_from_text": False,
    },
    "combined": {"decoding_type": "Combined"},
    "combined-ngram": {"decoding_type": "Combined", "retrieval": NGRAM, "min_match_len": 1},
    "combined-prompt-lookup": {
        "decoding_type": "Combined",
        "retrieval": {**NGRAM, "lookup": "transformers"},
        "min_match_len": 3,
    },
    "combined-tree": {"decoding_type": "Combined", "retrieval": TREE, "model": NGRAM},
    "combined-lookahead": {
        "decoding_type": "Combined",
        "model": {"decoding_type": "Lookahead"},
        "retrieval": NGRAM,
    },
    "user": {"decoding_type": "User_Provided", "drafter": "pairs"},
    "user-single": {"decoding_type": "User_Provided", "drafter": "pairs", "max_draft_len": 1},
}
SEVERAL_DRAFTS = {**MIXED, "max_spec_factor": 4.0, "min_token_prob": 0.01}
SAMPLED: dict[str, dict[str, Any]] = {
    "suffix-mixed": SEVERAL_DRAFTS,
    "suffix-tree": {**SEVERAL_DRAFTS, "mix_contexts": False},
    "suffix-chain": {**SEVERAL_DRAFTS, "mix_contexts": False, "use_tree_spec": False},
    "recycling": METHODS["recycling"],
    "lookahead": METHODS["lookahead"],
    "user": METHODS["user"],
}
CONTEXT_END = [
    ("suffix-long", "llama"),
    ("suffix-tree", "opt"),
    ("recycling", "llama"),
    judges.slow("recycling", "opt"),
    ("lookahead", "llama"),
    ("lookahead-wide", "llama"),
    judges.slow("lookahead", "opt"),
    judges.slow("lookahead-wide", "opt"),
    ("combined", "opt"),
]


@pytest.fixture(autouse=True)
def example_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_provided, "_factories", {"pairs": PairDrafter})


def config_of(name: str) -> MethodConfig:
    return parse_method(METHODS[name])


@pytest.mark.parametrize("family", judges.FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_equals_target_alone(name: str, family: str) -> None:
    accepted = judges.assert_greedy_lossless(config_of(name), family)
    assert accepted > 0 or name.startswith("lookahead")


@pytest.mark.parametrize(("name", "family"), CONTEXT_END)
def test_context_end_is_reached_exactly(name: str, family: str) -> None:
    judges.assert_lossless_to_the_context_end(config_of(name), family)


@pytest.mark.parametrize(
    "name",
    [judges.slow(n) if n in ("suffix-tree", "suffix-chain", "user") else n for n in SAMPLED],
)
def test_sampled_output_follows_the_target(name: str) -> None:
    target = judges.sampled_target()
    drafter = parse_method(SAMPLED[name]).build(build_context(target))
    assert judges.p_value(target, drafter) > 1e-3


@pytest.mark.parametrize("name", [judges.slow(n) if n != "suffix-mixed" else n for n in SAMPLED])
def test_sampled_output_follows_the_target_whatever_is_drafted_when(name: str) -> None:
    target = judges.sampled_target()
    drafter = parse_method(SAMPLED[name]).build(build_context(target))
    assert judges.p_value(target, AtRandom.around(drafter, target)) > 1e-3
