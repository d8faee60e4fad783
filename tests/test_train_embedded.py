"""scripts/train_embedded: cut short, it goes on; finished, it leaves drafters and one table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from engine.model.corpus import Corpus
from tests.models import save_tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_embedded"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["train_embedded", *(str(a) for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.slow
def test_a_call_cut_short_goes_on_and_measures_every_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny(tmp_path / "target", num_hidden_layers=2)
    common = [tmp_path / "out", "--target", target, "--dtype", "float32", "--tokens", 900]
    small = ["--methods", "redrafter,eagle", "--eval-tokens", 8, "--eval-per-category", 1]
    assert run(monkeypatch, *common, *small, "--seconds", 0) == 3
    written = Corpus.open(tmp_path / "out" / "corpus").num_tokens
    assert 0 < written < 900
    assert run(monkeypatch, *common, *small) == 0
    table = (tmp_path / "out" / "evaluation.md").read_text()
    assert all(f"## {name}" in table for name in ("redrafter", "eagle", "eagle, static tree of 25"))
    before = (tmp_path / "out" / "eagle" / "model.safetensors").stat().st_mtime_ns
    assert run(monkeypatch, *common, *small) == 0
    assert (tmp_path / "out" / "eagle" / "model.safetensors").stat().st_mtime_ns == before


def test_an_unknown_method_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--methods", "medusa,eagle4") == 2
    assert "got 'eagle4'" in capsys.readouterr().err
