"""`app.py train`: one command makes the corpus, trains, measures; errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from playground.cli.main import app
from tests.models import save_tiny

pytestmark = pytest.mark.slow

SMALL = ("--tokens", 1200, "--dtype", "float32", "--set", "pack_tokens=256")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def train(folder: Path, output: Path, *arguments: object, code: int = 0) -> Any:
    values = ["train", "--target", folder, "--output", output, *arguments]
    result = CliRunner().invoke(app, [str(value) for value in values])
    assert result.exit_code == code, result.output
    return result


def test_two_drafters_train_from_one_corpus_and_decode(folder: Path, tmp_path: Path) -> None:
    result = train(folder, tmp_path / "medusa", "--method", "medusa", "--set", "epochs=1e0", *SMALL)
    assert "| overall |" in result.output
    index = (tmp_path / "corpus" / "dialogues.jsonl").read_bytes()
    train(folder, tmp_path / "redrafter", "--method", "redrafter", "--set", "epochs=1", *SMALL)
    assert (tmp_path / "corpus" / "dialogues.jsonl").read_bytes() == index
    card = json.loads((tmp_path / "medusa" / "card.json").read_text())
    assert card["method"] == "medusa" and card["held_out"]["overall"]["num_tokens"] > 0
    drafter = ["--method", "Medusa", "--drafter", tmp_path / "medusa", "--prompt-ids", "1,2,3"]
    options = ["--dtype", "float32", "--no-save", "--max-new-tokens", 8]
    values = ["generate", "--target", folder, *drafter, *options]
    assert CliRunner().invoke(app, [str(value) for value in values]).exit_code == 0


def test_prompts_of_files_are_used_for_texts_and_for_measuring(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"category": "mine", "turns": ["How are you?"]}) + "\n")
    method = ("--method", "redrafter", "--set", "epochs=1")
    result = train(
        folder, tmp_path / "out", *method, "--prompts", file, "--eval-prompts", file, *SMALL
    )
    assert "| mine |" in result.output
    assert b'"mine"' in (tmp_path / "corpus" / "dialogues.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "eagel"), "Did you mean eagle?"),
        (("--method", "medusa", "--set", "haeds=3"), "did you mean heads?"),
        (("--method", "medusa", "--set", "heads"), "--set takes field=value, got 'heads'"),
        (("--method", "medusa", "--prompts", "/nowhere.jsonl"), "could not be read"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[object, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    result = train(folder, tmp_path / "out", *arguments, code=2)
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


GRID = ("--method", "redrafter", "--set", "epochs=0.5", "--grid", "learning_rate=0.001,0.002")


def test_a_grid_trains_a_drafter_per_combination(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "grid"
    result = train(folder, output, *GRID, "--grid", "seed=1,2", *SMALL)
    rows = [line for line in result.output.splitlines() if line.startswith("MAT ")]
    cards = {path.parent.name: json.loads(path.read_text()) for path in output.glob("*/card.json")}
    assert sorted(cards) == [
        f"learning_rate={rate},seed={seed}" for rate in ("0.001", "0.002") for seed in (1, 2)
    ]
    assert len(rows) == 4 and rows == sorted(rows, key=lambda row: -float(row.split()[1]))
    assert all(card["settings"]["learning_rate"] in (0.001, 0.002) for card in cards.values())
    train(folder, output, *GRID, "--grid", "seed", *SMALL, code=2)
