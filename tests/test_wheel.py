"""The installed wheel: commands, presets, templates, kernels' sources, static files, migrations."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.faults.test_kills import serving_app
from tests.models import save_tiny

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
FILES = {
    "engine": ".cpp .h",
    "presets": "",
    "playground": ".js .css .html .jinja .toml",
    "storage": ".mako",
}
"""Of each package, what it ships besides Python; of presets everything."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git has, without a network."""
    pytest.importorskip("setuptools", "77", reason="the wheel is built by setuptools 77 or newer")
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    for name in listed.stdout.split("\n"):
        if name.partition("/")[0] in {*FILES, "app.py", "pyproject.toml", "README.md", "LICENSE"}:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    line = "-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir".split()
    built = subprocess.run(
        [sys.executable, *line, folder, folder / "source"], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A virtual environment that has the wheel, and this one's other packages."""
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = "-m pip install --quiet --disable-pip-version-check --no-index --no-deps".split()
    subprocess.run([folder / "bin" / "python", *pip, wheel], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "others.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin"


def test_the_wheel_has_every_file_that_a_package_reads(wheel: Path) -> None:
    packed = {*zipfile.ZipFile(wheel).namelist()}
    for package, endings in FILES.items():
        listed = [file for file in (wheel.parent / "source" / package).rglob("*") if file.is_file()]
        own = {str(file.relative_to(wheel.parent / "source")) for file in listed}
        wanted = {name for name in own if name.endswith((".py", *endings.split())) or not endings}
        assert wanted <= packed, sorted(wanted - packed)
    assert {name.partition("/")[0] for name in packed if name.endswith(".py")} == {*FILES, "app.py"}


def test_the_installed_program_runs_exports_and_serves(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder without its sources: presets, templates, migrations and static files."""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(line: str, program: str = "specdec") -> str:
        command = [str(installed / program), *line.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c __import__('sys').stdout.write(__import__('engine').__file__)", "python")
    assert str(installed.parent) in where, "the sources of the checkout are used"
    assert "smollm2-135m-instruct" in run("models") and "max_draft_len" in run("methods")
    tiny = save_tiny(tmp_path / "tiny", eos_token_id=None)
    db = tmp_path / "runs.db"
    run(f"generate hello --target {tiny} --dtype float32 --db {db} --max-new-tokens 4")
    assert "hello" in run(f"runs list --db {db}")
    assert "vllm serve" in run("export --method ngram --to vllm --target owner/model")
    with serving_app(tmp_path, [installed / "specdec"]) as (_, url):
        modules = re.findall(r"modules/\w+/[\w/]+\.js", httpx.get(f"{url}/config").text)
        assert modules and all(httpx.get(f"{url}/{one}").status_code == 200 for one in modules)
