"""`app.py tune`: tables, trees and curves from the command line; errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from engine.tuning.replay import replay
from playground.cli.main import app
from playground.trees.tables import load_table
from presets.choice_trees import tree_preset
from storage import RunLog
from tests.engine.drafters.golden import ROOT

pytestmark = pytest.mark.slow

CASE = ROOT / "medusa" / "case_a"
PROMPTS = ("5,9,200,31", "77,12,8", "40,41,42,43", "1,2,3,4,5")


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with four runs and a rank table of them."""
    db = tmp_path_factory.mktemp("tune") / "runs.sqlite3"
    for ids in PROMPTS:
        options = ["--target", CASE / "target", "--dtype", "float32", "--max-new-tokens", 24]
        invoke("generate", "--prompt-ids", ids, *options, "--db", db)
    ranks(db, *medusa())
    return db


def medusa() -> tuple[object, ...]:
    return "--method", "Medusa", "--drafter", CASE / "head"


def ranks(db: Path, *arguments: object, code: int = 0) -> Any:
    return invoke("tune", "ranks", "--runs", runs_of(db), *arguments, "--db", db, code=code)


def runs_of(db: Path) -> str:
    log = RunLog.open(str(db))
    ids = [row.id for row in log.find().rows]
    log.close()
    assert len(ids) == len(PROMPTS)
    return ",".join(ids)


def test_ranks_of_runs_are_described_and_kept_with_the_runs_own_target_and_dtype(
    db: Path,
) -> None:
    result = ranks(db, *medusa(), "--depths", 3)
    assert "92 positions of 4 texts" in result.output and "in float32, Medusa" in result.output
    assert result.output.count("\n| ") == 4, "a heading and three depths"
    look_up = ranks(db, "--method", "NGram", "--depths", 2)
    assert "| draft length | MAT |" in look_up.output


def test_fitted_trees_are_presets_with_their_measured_figures(db: Path, tmp_path: Path) -> None:
    ranked = ranks(db, *medusa())
    table_id = ranked.output.split("table ")[1].strip()
    options = ("--table", table_id, "--nodes", "4,9", "--held-out", 2, "--output", tmp_path)
    result = invoke("tune", "fit", *options, "--name", "mine", "--prompts", "four", "--db", db)
    assert "held out" in result.output and "mc_sim_7b_63-medusa" in result.output
    log = RunLog.open(str(db))
    table = load_table(log, table_id)
    log.close()
    fitted, held = table.pick([0, 2]), table.pick([1, 3])
    for nodes in (4, 9):
        file = tmp_path / f"mine-{nodes}.yaml"
        preset = tree_preset(yaml.safe_load(file.read_text()), where=str(file))
        assert preset.measured is not None and preset.methods == ("Medusa",)
        assert len(preset.tree) == nodes and preset.measured.prompts == "four"
        assert preset.measured.mat == pytest.approx(replay(fitted, preset.tree).mat, abs=1e-4)
        assert preset.measured.texts == 2 and preset.measured.positions == fitted.num_positions
        judged = replay(held, preset.tree).mat
        assert preset.measured.held_out_mat == pytest.approx(judged, abs=1e-4)
        used = ["--set", f"medusa_choices={preset.tree.as_lists()}"]
        target = ["--target", CASE / "target", "--dtype", "float32", "--no-save"]
        ids = ["--prompt-ids", PROMPTS[0], "--max-new-tokens", 8]
        invoke("generate", *ids, *target, *medusa(), *used)


def test_latency_is_measured_and_then_predicts_speed(db: Path) -> None:
    options = ("--target", CASE / "target", "--dtype", "float32", "--db", db)
    shown = invoke("tune", "latency", *medusa(), *options)
    assert "| rows | ms |" in shown.output and "ms per level" in shown.output
    figures = json.loads(invoke("tune", "latency", *medusa(), *options, "--json").stdout)
    assert figures["start_ms"] + figures["level_ms"] > 0
    assert figures["verify"]["rows"][0] == 1 and min(figures["verify"]["ms"]) > 0
    fits = json.loads(invoke("tune", "fit", "--nodes", "4,8", "--json", "--db", db).stdout)
    assert all(fit["predicted_tok_s"] > 0 for fit in fits)
    words = invoke("tune", "fit", "--nodes", "4,8", "--db", db).output
    assert "Fastest on this machine, as predicted" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "--nodes", "4,x"), "--nodes must be like 8,16,32, got '4,x'"),
        (("fit", "--nodes", "0"), "Nodes must be in [1, 1024], got 0"),
        (("fit", "--category", "maths"), "category must be one of"),
        (("fit", "--held-out", "1"), "--held-out must be 0 or at least 2, got 1"),
        (("fit", "--held-out", "9"), "leaves nothing to judge by"),
        (("fit", "--table", "zz"), "No artifact 'zz'"),
        (("ranks", "--method", "Medusa"), "runs or a benchmark"),
        (("ranks", "--method", "NGram", "--runs", "zz"), "No run 'zz'"),
        (("ranks", "--method", "NGram", "--benchmark", "zz"), "No benchmark 'zz'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str, db: Path) -> None:
    target = () if arguments[0] == "fit" else ("--target", CASE / "target")
    result = invoke("tune", *arguments, *target, "--db", db, code=2)
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


def test_a_log_without_tables_says_how_to_get_one(tmp_path: Path) -> None:
    result = invoke("tune", "fit", "--db", tmp_path / "empty.sqlite3", code=2)
    assert "Measure one first: app.py tune ranks" in result.output
