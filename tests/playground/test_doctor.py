"""What the machine brings, what is slow on it, and what is stored of it with a run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import compile as native
from playground.host import doctor, environment
from playground.host.environment import _nvidia_driver
from playground.host.runner import EngineHost
from tests.engine.device.pretend import pretend_device
from tests.playground.asks import finished, start, stored


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there"


def test_ten_lines_say_what_there_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "library", lambda cache_dir: None)
    lines = doctor.diagnose(cache).lines
    labels = [line.split()[0] for line in lines]
    assert labels[:8] == "device driver torch python compiler kernels memory cache".split()
    assert len(lines) <= 10 and torch.__version__ in lines[2] and "GiB free" in lines[6]


def test_without_a_compiler_it_says_what_that_costs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (native, doctor):
        monkeypatch.setattr(module, "find_compiler", lambda: None)
    native.library.cache_clear()
    found = doctor.diagnose(cache)
    assert dict(found.facts)["compiler"] == "none"
    assert any("pip install ziglang" in one for one in found.advice)
    assert found.lines[-1].startswith("slow: ")


def test_a_gpu_that_this_torch_cannot_use_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "library", lambda cache_dir: None)
    monkeypatch.setattr(doctor, "_sees_nvidia", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert any("built without CUDA" in one for one in doctor.diagnose(cache).advice)


def test_on_another_accelerator_it_says_that_nobody_tried(cache: Path) -> None:
    with pretend_device() as device:
        lines = doctor.diagnose(cache, str(device)).lines
    assert lines[0].startswith(f"device    {device}: an accelerator that this program has not")
    assert f"kernels   torch's for {device.type}" in lines and len(lines) <= 10


# ---- what is stored of it with a run


def test_the_surroundings_are_stored_with_every_run(host: EngineHost) -> None:
    known = stored(host, finished(start(host))).environment
    assert {"torch", "transformers", "gradio"} <= known["versions"].keys()
    for name in ("device", "device_name", "threads", "cpu", "cpu_flags", "memory_gib", "platform"):
        assert known[name], name
    assert known.keys() >= {"driver", "cuda", "gpus", "git_commit", "revision", "weights"}
    assert len(known["weights"]) == 64


def test_the_drivers_version_is_read_where_linux_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr("playground.host.environment.NVIDIA_DRIVER", file)
    assert _nvidia_driver() is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release")
    assert _nvidia_driver() == "570.133.20"


def test_a_run_records_the_commit_of_its_own_sources_and_of_no_other_repository(
    tmp_path: Path,
) -> None:
    """A virtual environment may lie in the repository of any project."""

    def git(*command: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", tmp_path, *named, *command], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def recorded() -> str | None:
        spec = importlib.util.spec_from_file_location("installed", installed)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        commit: str | None = module._git_commit()
        return commit

    installed = tmp_path / ".venv/site-packages/playground/host/environment.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(environment.__file__, installed)
    assert recorded() is None, "in no repository"
    git("init", "--quiet")
    (tmp_path / ".gitignore").write_text(".venv")
    git("add", ".gitignore")
    git("commit", "--quiet", "--message", "Another project")
    assert recorded() is None, "in the repository of another project"
    git("add", "--force", str(installed))
    git("commit", "--quiet", "--message", "The sources themselves")
    assert recorded() == git("rev-parse", "HEAD")
