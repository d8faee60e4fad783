"""`app.py train`: one command makes the corpus, trains, measures; errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.commands import invoke, refused
from tests.models import save_tiny

pytestmark = pytest.mark.slow

SMALL = ("--tokens", 1200, "--dtype", "float32", "--set", "pack_tokens=256")
REDRAFTER = ("--method", "redrafter", "--set", "epochs=0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def train(folder: Path, output: Path, *words: object) -> Result:
    return invoke("train", "--target", folder, "--output", output, *words, *SMALL)


def test_two_drafters_train_from_one_corpus_and_decode(folder: Path, tmp_path: Path) -> None:
    result = train(folder, tmp_path / "medusa", "--method", "medusa", "--set", "epochs=1e0")
    assert "| overall |" in result.output
    index = (tmp_path / "corpus" / "dialogues.jsonl").read_bytes()
    train(folder, tmp_path / "redrafter", *REDRAFTER)
    assert (tmp_path / "corpus" / "dialogues.jsonl").read_bytes() == index
    card = json.loads((tmp_path / "medusa" / "card.json").read_text())
    assert card["method"] == "medusa" and card["held_out"]["overall"]["num_tokens"] > 0
    drafter = ("--method", "Medusa", "--drafter", tmp_path / "medusa", "--prompt-ids", "1,2,3")
    options = ("--dtype", "float32", "--no-save", "--max-new-tokens", 8)
    invoke("generate", "--target", folder, *drafter, *options)


def test_prompts_of_files_are_used_for_texts_and_for_measuring(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"category": "mine", "turns": ["How are you?"]}) + "\n")
    prompts = ("--prompts", file, "--eval-prompts", file)
    assert "| mine |" in train(folder, tmp_path / "out", *REDRAFTER, *prompts).output
    assert b'"mine"' in (tmp_path / "corpus" / "dialogues.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "eagel"), "Did you mean eagle?"),
        (("--method", "medusa", "--set", "haeds=3"), "did you mean heads?"),
        (("--method", "medusa", "--set", "heads"), "--set takes field=value, got 'heads'"),
        (("--method", "medusa", "--prompts", "/nowhere.jsonl"), "could not be read"),
        (("--method", "medusa", "--grid", "seed"), "seed"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[object, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    assert message in refused("train", "--target", folder, "--output", tmp_path, *arguments)


def test_a_grid_trains_a_drafter_per_combination(folder: Path, tmp_path: Path) -> None:
    grid = ("--grid", "learning_rate=0.001,0.002", "--grid", "seed=1,2")
    result = train(folder, tmp_path / "grid", *REDRAFTER, *grid)
    rows = [line for line in result.output.splitlines() if line.startswith("MAT ")]
    cards = (tmp_path / "grid").glob("*/card.json")
    settings = {file.parent.name: json.loads(file.read_text())["settings"] for file in cards}
    assert {(one["learning_rate"], one["seed"]) for one in settings.values()} == {
        (rate, seed) for rate in (0.001, 0.002) for seed in (1, 2)
    }
    assert all(f"seed={one['seed']}" in name for name, one in settings.items())
    assert len(rows) == 4 and rows == sorted(rows, key=lambda row: -float(row.split()[1]))
