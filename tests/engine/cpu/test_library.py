"""The library of compiled kernels: how it is made, kept, trusted and done without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch

from engine.kernels.cpu import compile
from engine.kernels.cpu.compile import NoKernels, has_rare_formats, library
from engine.kernels.cpu.decoder import Decoder
from engine.kernels.cpu.gguf import RawTensor
from engine.kernels.cpu.operators import Matrix
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs
from engine.safe_text import cpu_flags
from tests.engine.cpu.targets import SIZES, WIDE
from tests.engine.cpu.tiny_gguf import random_blocks, write_gguf
from tests.models import save_tiny


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """As in a process that has not asked for the kernels yet."""
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> TargetSpec:
    folder = save_tiny(tmp_path / "model", **SIZES, **WIDE["llama"])
    return TargetSpec(name="tiny", title="tiny", path=str(folder))


def load(spec: TargetSpec, dtype: str = "bfloat16") -> Target:
    cache_dir = Path(spec.path or "").parent
    return load_target(spec, dtype=dtype, device="cpu", cache_dir=cache_dir)


@pytest.mark.usefixtures("fresh_library", "kernels")
def test_without_a_compiler_torch_does_the_work_and_the_log_says_why(
    tiny: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(tiny)
    assert target.environment()["forward"] == "native" and target.notes == ()
    assert "native_kernels" not in target.environment()
    library.cache_clear()
    monkeypatch.setattr(compile, "ZIG_MODULE", "no_such_package")
    monkeypatch.setattr(compile, "COMPILERS", ("no-such-compiler",))
    target = load(tiny)
    assert target.environment()["native_kernels"] == f"not used: {compile.NO_COMPILER}"
    assert target.notes == (f"{target.name} runs slowly: {compile.NO_COMPILER}.",)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_library", "kernels")
def test_a_compiler_from_the_package_index_makes_the_same_kernels(
    tiny: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for compilers in (compile.COMPILERS, ()):
        library.cache_clear()
        monkeypatch.setattr(compile, "COMPILERS", compilers)
        target = load(tiny, "q8")
        assert target.environment()["forward"] == "native, q8"
        texts.append(target.prefill([1, 2, 3, 4, 5], target.new_cache(8), Needs()).logits)
        assert compilers or compile.ZIG_MODULE in (compile.find_compiler() or ())
    assert torch.equal(*texts)


@pytest.mark.usefixtures("kernels")
def test_a_target_can_do_without(tiny: TargetSpec) -> None:
    environment = load(tiny.replace(native_kernels="off")).environment()
    assert environment["native_kernels"] == "not used: switched off"
    assert environment["forward"] != "native"


MAKES = 'while [ "$1" != -o ]; do shift; done\n'


@pytest.mark.usefixtures("fresh_library", "kernels")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (r"printf '\377\376 broken' >&2; exit 1", "failed: .*broken"),
        (r"printf '\033[2J\a broken' >&2; exit 1", "failed: .*broken"),
        ("exit 1", "failed: no message"),
        (f'{MAKES}true "$2"', "cannot be written"),
        (f'{MAKES}touch "$2"', "could not be loaded"),
        (f'{MAKES}echo no library > "$2"', "could not be loaded"),
    ],
)
def test_a_compiler_that_makes_no_library_is_one_line(
    lines: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd").write_text(f"#!/bin/sh\n{lines}\n")
    (tmp_path / "odd").chmod(0o700)
    monkeypatch.setattr(compile, "COMPILERS", (str(tmp_path / "odd"),))
    with pytest.raises(NoKernels, match=message) as caught:
        library(tmp_path)
    assert str(caught.value).isprintable()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "zeros behind": lambda data: data[:4096] + bytes(len(data) - 4096),
    "another byte": lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
}


@pytest.mark.usefixtures("fresh_library", "kernels")
def test_a_damaged_library_is_compiled_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library(tmp_path)
    (made,) = (tmp_path / "native").iterdir()
    whole = made.read_bytes()
    for damage in DAMAGES.values():
        # Another file: the mapped one must not change under those who run it.
        made.unlink()
        made.write_bytes(damage(whole))
        made.chmod(0o700)
        library.cache_clear()
        caplog.clear()
        assert library(tmp_path).scratch_bytes
        assert "is damaged; the kernels are compiled again" in caplog.text
        (made,) = (tmp_path / "native").iterdir()
        assert compile._digest(made) in made.name


@pytest.mark.usefixtures("fresh_library", "kernels")
def test_the_library_is_kept_and_not_run_where_others_may_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path)
    (made,) = (tmp_path / "native").iterdir()
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("compiled again"))
    library.cache_clear()
    library(tmp_path)
    for place in (made, tmp_path / "native"):
        library.cache_clear()
        place.chmod(0o777)
        with pytest.raises(NoKernels, match="others may write"):
            library(tmp_path)
        place.chmod(0o700)


@pytest.mark.usefixtures("fresh_library")
def test_another_kind_of_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for system, machine in (("Windows", "AMD64"), ("Darwin", "x86_64")):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        with pytest.raises(NoKernels, match=f"macOS on ARM, not {system} on {machine}"):
            library(tmp_path)


def test_every_processor_of_apples_has_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert compile.best_instructions(cpu_flags()) == (compile.NEON, compile.DOT_PRODUCTS)


@pytest.mark.usefixtures("kernels")
def test_rare_formats_are_compiled_for_files_that_have_them(tmp_path: Path) -> None:
    for kind, count in (("Q4_0", 1), ("Q5_0", 2)):
        path = write_gguf(tmp_path / f"{kind}.gguf", kind)
        load_target(TargetSpec(name="tiny", path=str(path)), device="cpu", cache_dir=tmp_path)
        assert len([*(tmp_path / "native").iterdir()]) == count


def test_without_the_rare_formats_a_matrix_is_none(tmp_path: Path) -> None:
    try:
        kernels = library(tmp_path)
    except NoKernels as error:
        pytest.skip(f"no compiled kernels here: {error}")
    assert not has_rare_formats(kernels)
    kind = int(gguf.GGMLQuantizationType.Q6_K)
    raw = RawTensor(kind, (16, 256), random_blocks("Q6_K", 16, 256))
    assert Matrix.from_gguf(kernels, raw) is None


@pytest.mark.usefixtures("kernels")
def test_wrong_kernels_step_aside_and_the_run_says_why(
    tiny: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Decoder._rotary_rows
    monkeypatch.setattr(Decoder, "_rotary_rows", lambda *args: rows(*args).flip(-1))
    target = load(tiny)
    found = target.environment()
    assert found["forward"] == "transformers' modules" and target.kernels is None
    assert "its logits differ from those of transformers' modules" in found["fast_forward"]
