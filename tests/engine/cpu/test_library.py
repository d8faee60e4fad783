"""The library of compiled kernels: how it is made, kept, trusted and done without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch

from engine.kernels.cpu import compile
from engine.kernels.cpu.compile import AVX512, REQUIRED, NoKernels, best_instructions, library
from engine.kernels.cpu.decoder import Decoder
from engine.kernels.cpu.operators import Matrix
from engine.model.gguf.file import RawTensor
from engine.safe_text import cpu_flags
from tests.engine.cpu.conftest import INSTRUCTIONS
from tests.engine.cpu.targets import SIZES, WIDE, prompt_logits
from tests.engine.cpu.tiny_gguf import random_blocks, write_gguf
from tests.models import load_tiny, save_tiny


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """As in a process that has not asked for the kernels yet."""
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", **SIZES, **WIDE["llama"])


@pytest.mark.usefixtures("fresh_library", "kernels")
def test_without_kernels_torch_does_the_work_and_the_log_says_why(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_tiny(tiny, "bfloat16")
    assert target.environment()["forward"] == "native" and target.notes == ()
    assert "native_kernels" not in target.environment()
    environment = load_tiny(tiny, "bfloat16", native_kernels=False).environment()
    assert environment["native_kernels"] == "not used: switched off"
    assert environment["forward"] != "native"
    library.cache_clear()
    monkeypatch.setattr(compile, "ZIG_MODULE", "no_such_package")
    monkeypatch.setattr(compile, "COMPILERS", ("no-such-compiler",))
    target = load_tiny(tiny, "bfloat16")
    assert target.environment()["native_kernels"] == f"not used: {compile.NO_COMPILER}"
    assert target.notes == (f"{target.name} runs slowly: {compile.NO_COMPILER}.",)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_library", "kernels")
def test_a_compiler_from_the_package_index_makes_the_same_kernels(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for compilers in (compile.COMPILERS, ()):
        library.cache_clear()
        monkeypatch.setattr(compile, "COMPILERS", compilers)
        target = load_tiny(tiny, "q8")
        assert target.environment()["forward"] == "native, q8"
        texts.append(prompt_logits(target))
        assert compilers or compile.ZIG_MODULE in (compile.find_compiler() or ())
    assert torch.equal(*texts)


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
def test_a_damaged_library_is_compiled_again_and_logged(
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
def test_an_unsupported_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for system, machine in (("Windows", "AMD64"), ("Darwin", "x86_64")):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        with pytest.raises(NoKernels, match=f"macOS on ARM, not {system} on {machine}"):
            library(tmp_path)


def test_the_best_instructions_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = {*REQUIRED, *AVX512, "avx512_bf16", "avx_vnni", "sse4_2"}
    assert best_instructions(everything) == INSTRUCTIONS["AVX-512 VNNI, bf16"]
    assert best_instructions({*REQUIRED, *AVX512}) == INSTRUCTIONS["AVX-512 VNNI"]
    assert best_instructions({*REQUIRED, "avx512f", "avx_vnni"}) == INSTRUCTIONS["AVX-VNNI"]
    assert best_instructions(REQUIRED) == INSTRUCTIONS["AVX2"]
    assert best_instructions({"fp", "asimd", "asimddp", "sve"}) == ("asimd", "asimddp")
    assert best_instructions({"fp", "asimd"}) == ("asimd",)
    with pytest.raises(NoKernels, match="has no fma"):
        best_instructions({"avx2", "f16c"})
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert best_instructions(cpu_flags()) == ("asimd", "asimddp"), "as all of Apple's"


@pytest.mark.usefixtures("kernels")
def test_rare_formats_are_compiled_for_files_that_have_them(tmp_path: Path) -> None:
    kind = int(gguf.GGMLQuantizationType.Q6_K)
    raw = RawTensor(kind, (16, 256), random_blocks("Q6_K", 16, 256))
    assert Matrix.from_gguf(library(tmp_path / "cache"), raw) is None
    for name, count in (("Q4_0", 1), ("Q5_0", 2)):
        load_tiny(write_gguf(tmp_path / f"{name}.gguf", name), "auto")
        assert len([*(tmp_path / "cache/native").iterdir()]) == count


@pytest.mark.usefixtures("kernels")
def test_wrong_kernels_are_not_used_and_the_run_says_why(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Decoder._rotary_rows
    monkeypatch.setattr(Decoder, "_rotary_rows", lambda *args: rows(*args).flip(-1))
    target = load_tiny(tiny, "bfloat16")
    found = target.environment()
    assert found["forward"] == "transformers' modules" and target.kernels is None
    assert "its logits differ from those of transformers' modules" in found["fast_forward"]
