"""What drafting as set will cost is said before a run, once runs have found it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from playground.cli.main import app
from playground.host.result import NOT_KNOWN, drafting_sentence
from tests.playground.tiny import save_tiny_llama


def test_a_run_says_how_much_it_drafted() -> None:
    metrics = {"num_steps": 50, "num_drafted": 120, "bypasses": {"not_worth_it": 10}}
    assert drafting_sentence({**metrics, "expected_tok_s": 81.26}) == (
        "Drafted in 40 of 50 steps, 3.0 tokens each; the controller expected 81.3 tok/s."
    )
    assert drafting_sentence(metrics) == ""


@pytest.mark.usefixtures("auto_drafting")
@pytest.mark.slow
def test_generate_says_what_as_set_costs_before_it_runs(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "model")

    def generate(*settings: str) -> Any:
        options = ["--target", str(folder), "--prompt-ids", ",".join(map(str, [5, 6, 7] * 6))]
        options += ["--max-new-tokens", "150", "--ignore-eos", "--no-save"]
        options += ["--method", "NGram", "--cache-dir", str(tmp_path / "cache")]
        result = CliRunner().invoke(app, ["generate", *options, *settings])
        assert result.exit_code == 0, result.output
        return result.output

    as_set = ("--set", "drafting=as set")
    assert NOT_KNOWN in generate(*as_set)
    assert "As set" not in generate()
    assert "× plain decoding is expected: " in generate(*as_set)
    assert NOT_KNOWN in generate(*as_set, "--set", "max_draft_len=2")
