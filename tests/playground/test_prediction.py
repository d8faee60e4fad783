"""What drafting as set will cost is said before a run, once runs have found it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from engine.tuning.experience import ExperienceStore
from playground.host.result import NOT_KNOWN, as_set_sentence, drafting_sentence
from tests.commands import invoke
from tests.playground.tiny import save_tiny_llama


def test_a_run_says_how_much_it_drafted() -> None:
    metrics = {"num_steps": 50, "num_drafted": 120, "bypasses": {"not_worth_it": 10}}
    assert drafting_sentence({**metrics, "expected_tok_s": 81.26}) == (
        "Drafted in 40 of 50 steps, 3.0 tokens each; the controller expected 81.3 tok/s."
    )
    assert drafting_sentence(metrics) == ""


@pytest.mark.usefixtures("auto_drafting")
@pytest.mark.slow
def test_earlier_runs_say_what_as_set_costs(tmp_path: Path) -> None:
    folder, cache = save_tiny_llama(tmp_path / "model"), tmp_path / "cache"

    def expected(config: NGramConfig) -> str:
        return as_set_sentence(ExperienceStore(cache / "drafting"), str(folder), config)

    as_set = NGramConfig(drafting="as set")
    assert expected(as_set) == NOT_KNOWN
    options = ["--target", folder, "--prompt-ids", ",".join(map(str, [5, 6, 7] * 6))]
    options += ["--max-new-tokens", 150, "--ignore-eos", "--no-save"]
    invoke("generate", *options, "--method", "NGram", "--cache-dir", cache)
    assert "× plain decoding is expected: " in expected(as_set)
    assert expected(as_set.replace(max_draft_len=2)) == NOT_KNOWN
    assert expected(NGramConfig()) == ""
