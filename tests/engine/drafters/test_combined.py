"""Retrieval where the text repeats, a model elsewhere; both keep up with every outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.accept import Typical
from engine.config import Sampling
from engine.drafters.combined import CombinedConfig, CombinedDrafter
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.errors import ConfigError
from engine.proposal import Budget
from tests.engine.drafters import judges
from tests.engine.drafters.fitted import save_medusa
from tests.engine.drafters.judges import begin, started, target_of
from tests.models import build_context

NGRAM = {"decoding_type": "NGram"}


def test_sampled_output_follows_the_target_with_sampled_and_retrieved_drafts():
    target = judges.sampled_target()
    model = {"decoding_type": "Draft_Target", "speculative_model": "small", "max_draft_len": 3}
    config = CombinedConfig.parse({"model": model, "min_match_len": 2})
    drafter = config.build(build_context(target, small=judges.few_tokens(0.2, seed=1)))
    turns = list[str]()
    spy(drafter, turns, "either")
    spy(drafter.model, turns, "model")
    assert judges.p_value(target, drafter, drawn=True) > 1e-3
    assert 0.2 < turns.count("model") / turns.count("either") < 0.8


def spy(drafter: Any, turns: list[str], name: str) -> None:
    """Note every proposal of a drafter's sessions by this name."""
    propose = drafter.session.propose
    noted = lambda session, budget: turns.append(name) or propose(session, budget)  # noqa: E731
    drafter.session = type("Spied", (drafter.session,), {"propose": noted})


def test_heads_are_shown_what_they_need_and_their_rule_decides(tmp_path: Path):
    target = target_of("llama")
    heads = str(save_medusa(tmp_path, target, 4))
    lossy = CombinedConfig(model=MedusaConfig(speculative_model=heads, acceptance="typical"))
    assert CombinedConfig().lossless and not lossy.lossless
    drafter = lossy.build(build_context(target))
    session = begin(drafter, [1, 2, 3], sampling=Sampling(temperature=1.0))
    assert isinstance(session.rule(), Typical)
    assert judges.assert_greedy_lossless(target, drafter) > 0


def test_remarks_on_either_drafter_are_kept():
    context = build_context(target_of("llama"))
    retrieval, model = (kind().build(context) for kind in (SuffixConfig, TokenRecyclingConfig))
    model.notes = ("It was trained for another target.",)
    assert CombinedDrafter(retrieval, model, 2).notes == model.notes


@pytest.mark.parametrize("retrieval", [NGRAM, {"decoding_type": "Suffix"}])
def test_retrieval_drafts_only_where_the_match_is_long_enough(retrieval: dict[str, Any]):
    model = TokenRecyclingConfig(recycling_choices=((0,), (1,)))
    config = CombinedConfig.parse(
        {"retrieval": retrieval, "model": model.model_dump(), "min_match_len": 2}
    )
    long_match = started(config, [1, 2, 3, 4, 1, 2]).propose(Budget(99))
    assert long_match.tokens.tolist()[:3] == [2, 3, 4]
    short_match = started(config, [1, 2, 3, 4, 9, 2]).propose(Budget(99))
    assert short_match.tokens.tolist() == [2, 3], "the model's, which knows one successor"


def test_suffix_matches_in_earlier_runs_count():
    config = CombinedConfig(retrieval=SuffixConfig(use_global_pool=True))
    session = started(config, [1, 2, 3, 4, 5])
    session.close()
    assert begin(session.drafter, [9, 2, 3]).propose(Budget(99)).tokens.tolist() == [3, 4, 5]


def test_a_match_that_the_retrieval_cannot_find_is_refused():
    config = CombinedConfig.parse({"retrieval": NGRAM, "min_match_len": 3})
    with pytest.raises(ConfigError, match="min_match_len must be at most 2, the retrieval's"):
        config.build(build_context(target_of("llama")))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"retrieval": {"decoding_type": "Medusa"}}, "one of NGram, Suffix, got Medusa"),
        ({"model": {"decoding_type": "Combined"}}, "model.decoding_type must be one of"),
        ({"model": {"decoding_type": "NGram", "max_draft_lenn": 1}}, "did you mean max_draft_len"),
        ({"model": 3}, "model: A method must be a mapping with decoding_type, got 3"),
        ({"retrieval": {**NGRAM, "max_draft_len": 0}}, "retrieval: max_draft_len must be"),
        (
            {"retrieval": {**NGRAM, "drafting": "as set"}},
            "retrieval.drafting must be left out, got",
        ),
        (
            {"model": TokenRecyclingConfig(drafting="as set")},
            "model.drafting must be left out, got",
        ),
    ],
)
def test_wrong_nested_settings_are_named(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        CombinedConfig.parse(values)


def test_parts_stored_by_earlier_versions_draft_as_the_combination_does() -> None:
    """Where they had a setting each, which had no effect within a combination."""
    config = CombinedConfig.parse({"retrieval": {**NGRAM, "adaptive": False}, "adaptive": False})
    assert config.drafting == "as set"
    assert config == CombinedConfig.parse({"retrieval": NGRAM, "drafting": "as set"})
    assert CombinedConfig.parse(config.model_dump()) == config
