"""scripts/train_heads: cut short, it goes on; finished, it leaves drafters and one table."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from engine.model.corpus import Corpus
from engine.training.corpus.dialogues import ChatFormat, CorpusSettings
from engine.training.methods import training_settings
from engine.training.session import SessionSettings
from tests.models import save_tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_heads"
RECIPES = sorted((SCRIPT.parent / "recipes").glob("*.yaml"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["train_heads", *(str(a) for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.slow
def test_a_repeated_call_continues_and_measures_every_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny(tmp_path / "target", num_hidden_layers=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {target}\ntokens: 900\ncorpus: {{max_len: 128, answer_tokens: 32}}\n"
        "methods: {redrafter: {}, eagle: {epochs: 1.0, weights_dtype: int8}}\n"
        "dialogues: {shares: {mine: 1.0}, openings: {mine: ['{word} [line]']}, "
        "slots: {word: [up, down]}}\n"
    )
    common = [tmp_path / "out", "--recipe", recipe, "--dtype", "float32"]
    small = ["--eval-tokens", 8, "--eval-per-category", 1]
    assert run(monkeypatch, *common, *small, "--seconds", 0) == 3
    written = Corpus.open(tmp_path / "out" / "corpus")
    assert 0 < written.num_tokens < 900 and {e.category for e in written.entries} == {"mine"}
    assert run(monkeypatch, *common, *small) == 0
    table = (tmp_path / "out" / "evaluation.md").read_text()
    assert all(f"## {name}" in table for name in ("redrafter", "eagle", "eagle, static tree of 25"))
    before = (tmp_path / "out" / "eagle" / "model.safetensors").stat().st_mtime_ns
    assert run(monkeypatch, *common, *small) == 0
    assert (tmp_path / "out" / "eagle" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_shipped_recipe_can_be_followed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_heads"])
    recipe = runpy.run_path(str(SCRIPT))["Recipe"].read(file)
    chat = ChatFormat("", " ", " ")
    made = [recipe.dialogues.dialogue(chat, n, CorpusSettings()) for n in range(300)]
    assert {spec.category for spec in made} == set(recipe.dialogues.shares)
    CorpusSettings(**recipe.corpus), SessionSettings(**recipe.session)
    for method, values in recipe.methods.items():
        training_settings(method, values)
