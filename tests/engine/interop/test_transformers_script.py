"""The script for transformers runs as it stands and writes what the target alone writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.drafters import parse_method
from engine.interop import ENGINES, export_method
from tests.engine.drafters.test_draft_by_text import learned
from tests.models import save_tiny, tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("small"), seed=1)


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    tiny_model(seed=1, vocab_size=330).save_pretrained(folder)
    learned(330).save_pretrained(folder)
    return folder


def run(settings: dict[str, object], target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the exported script prints, shortened to 12 tokens."""
    export = export_method(parse_method(settings), ENGINES["transformers"], target=str(target))
    script = export.files["generate.py"]
    text = script.replace("max_new_tokens=128", "max_new_tokens=12")
    assert text != script
    exec(compile(text, "generate.py", "exec"), {})
    return capsys.readouterr().out


def test_drafting_scripts_print_the_plain_script_s_text(
    target: Path, small: Path, of_words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run({"decoding_type": "Autoregressive"}, target, capsys)
    draft = {"decoding_type": "Draft_Target", "speculative_model": str(small), "max_draft_len": 3}
    assert run(draft, target, capsys) == plain != ""
    other = {**draft, "speculative_model": str(of_words), "vocabulary": "text"}
    assert run(other, target, capsys) == plain
    lookup = {"decoding_type": "NGram", "lookup": "transformers", "max_matching_ngram_size": 3}
    assert run(lookup, target, capsys) == plain
