"""`app.py bench`: tables, files, configurations by name, and one that is stopped."""

from __future__ import annotations

import csv
import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.safe_text import file_name
from playground.cli.bench import configurations_of
from playground.experiments.plan import BASELINE_NAME
from storage import RunLog
from tests.commands import invoke, refused
from tests.models import save_tiny

EVIL = "../../short"
"""A name that must lead out of no folder."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("suite") / "question.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 2, "category": "qa", "turns": ["Why?"]},
        {"question_id": 3, "category": "qa", "turns": ["Who?"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def bench(folder: Path, *arguments: object, code: int = 0) -> Any:
    return invoke("bench", "--target", folder, "--dtype", "float32", *arguments, code=code)


def test_json_has_every_figure_of_every_configuration(
    folder: Path, questions: Path, tmp_path: Path
) -> None:
    out = bench(
        *(folder, "--suite", questions, "--methods", "ngram"),
        *("--method", f"NGram name={EVIL} max_draft_len=2 is_keep_all=false"),
        *("--max-new-tokens", 12, "--ignore-eos", "--repeats", 2, "--json"),
        *("--db", tmp_path / "runs.sqlite3", "--output", tmp_path / "out"),
    )
    shown = json.loads(out.stdout)
    assert shown["status"] == "completed" and shown["concurrency"] == 1
    assert [c["name"] for c in shown["configurations"]] == [BASELINE_NAME, "ngram", EVIL]
    short = shown["configurations"][2]["config"]
    assert (short["max_draft_len"], short["is_keep_all"]) == (2, False)
    assert shown["configurations"][1]["config"]["is_keep_all"] is True
    assert len(shown["requests"]) == 4 * 3 * 2
    assert shown["report"]["groups"] == ["chat", "qa"]
    for section in shown["report"]["configurations"]:
        assert section["overall"]["num_new_tokens"] == 4 * 12 * 2
    assert shown["definitions"]["speedup"] and shown["environment"]["versions"]["torch"]

    assert {file.name for file in tmp_path.iterdir()} == {"runs.sqlite3", "out"}
    files = {file.name for file in (tmp_path / "out").iterdir() if file.is_file()}
    assert files == {"report.html", "report.json", "speedup.csv", "latency.csv", "requests.csv"}
    folder = tmp_path / "out" / "genai-perf" / file_name(EVIL)
    export = folder / "profile_export_genai_perf.json"
    theirs, ours = json.loads(export.read_text()), shown["report"]["configurations"][2]["latency"]
    row = ours["rows"]["inter_token_latency_ms"]
    assert theirs["inter_token_latency"] == {"unit": "ms", **row}
    assert theirs["request_count"] == {"unit": "count", "avg": 8}
    above, below = export.with_suffix(".csv").read_text().split("\n\n")
    titles = [line.split(",")[0] for line in above.splitlines()]
    assert titles[1:3] == ["Request Latency (ms)", "Time To First Token (ms)"]
    assert float(list(csv.reader(above.splitlines()))[3][1]) == pytest.approx(row["avg"], abs=0.01)
    assert "Request Count (count),8" in below
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written == shown
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "requests.csv").read_text())))
    names = {row["configuration"] for row in rows}
    assert len(rows) == 24 and names == {BASELINE_NAME, "ngram", EVIL}


def test_tables_of_a_base_model_show_groups_throughput_and_verdict(
    folder: Path, questions: Path, tmp_path: Path
) -> None:
    """Without a chat template, it completes the questions."""
    base = shutil.copytree(folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    out = bench(
        *(base, "--suite", questions, "--methods", "ngram", "--categories", "qa"),
        *("--limit-per-category", 1, "--max-new-tokens", 6, "--ignore-eos", "--no-save"),
    ).stdout
    for words in (
        *("speedup by kind", "MAT by kind of task: 1 +", "qa", "overall", "Request latency (ms)"),
        *("p99", "1 requests, concurrency 1", "ngram: 1 of 1 answers identical to plain"),
    ):
        assert words in out
    assert "chat" not in out


def test_csv_has_a_line_per_configuration_and_group_and_no_save_leaves_no_log(
    folder: Path, questions: Path, tmp_path: Path
) -> None:
    db, table, files = tmp_path / "none.sqlite3", tmp_path / "new" / "a.csv", tmp_path / "out"
    bench(
        *(folder, "--suite", questions, "--methods", "suffix", "--csv", table, "--output", files),
        *("--no-save", "--db", db, "--max-new-tokens", 5, "--ignore-eos"),
    )
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert table.read_text() == (files / "speedup.csv").read_text()
    assert [(row["configuration"], row["group"]) for row in rows] == [
        (name, group) for name in (BASELINE_NAME, "suffix") for group in ("chat", "qa", "overall")
    ]
    assert bool(rows[-1]["speedup"]) is not bool(rows[-1]["doubt"])
    assert int(rows[-1]["pairs"]) == 4
    text = (files / "report.html").read_text()
    assert text.startswith("<!doctype html>") and "<script" not in text
    assert f"--target {folder}" in text and "Suffix name=suffix" in text
    assert not db.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "quik"], "Did you mean quick"),
        (["--methods", "ngran"], "Did you mean ngram?"),
        (["--methods", "ngram", "--set", "x=1"], "x is not a setting of NGramConfig"),
        (["--methods", "ngram,ngram"], "Two configurations are named ngram"),
        (["--method", "NGram 'name=x"], "--method takes a method"),
        (["--resume", "abc"], "No experiment 'abc'"),
        (["--resume", "abc", "--no-save"], "--no-save"),
        (["--ray", "local", "--no-save"], "--ray needs a run log that its workers can reach"),
        (["--suite", "starter", "--workers", "2"], "need --ray ADDRESS"),
        (["--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--repeats", "101"], "repeats must be less than or equal to 100"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert words in refused("bench", "--target", folder, "--db", tmp_path / "a.db", *arguments)


def test_configurations_have_names_and_their_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("decoding_type: NGram\nmax_draft_len: 2\n")
    found = configurations_of(
        ["ngram", f"{file} max_matching_ngram_size=4", "NGram name=long max_draft_len=9"],
        ["is_keep_all=false"],
    )
    assert [c.name for c in found] == ["ngram", "mine", "long"]
    values = [(c.config.max_draft_len, c.config.max_matching_ngram_size) for c in found]  # type: ignore[attr-defined]
    assert values == [(10, 3), (2, 4), (9, 2)]
    assert not any(c.config.is_keep_all for c in found)  # type: ignore[attr-defined]
    assert found[0].title == "N-gram lookup"
    with pytest.raises(ConfigError, match="did you mean max_draft_len"):
        configurations_of(["NGram max_draft_length=3"])


def test_a_stopped_benchmark_says_how_to_resume_it(
    folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "runs.sqlite3"
    monkeypatch.setattr(
        "playground.cli.bench.until_interrupt", lambda: nullcontext(lambda: num_completed(db) > 1)
    )
    out = bench(
        *(folder, "--suite", questions, "--methods", "ngram", "--db", db, "--max-new-tokens", 5),
        code=130,
    )
    with RunLog.open(str(db)) as log:
        (row,) = log.benchmarks.list()
    assert row.status == "cancelled" and f"specdec bench --resume {row.id}" in out.stderr
    assert "speedup by kind of task" in out.stdout


def num_completed(db: Path) -> int:
    with RunLog.open(str(db)) as log:
        return sum(run.status == "completed" for run in log.find().rows)
