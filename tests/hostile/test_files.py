"""Damaged and hostile model files, each through the real loader.

Every case must end in one sentence of ours, or in the text that the undamaged files write (another
text only where the case says that they are another valid model).
"""

from __future__ import annotations

import resource
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters import parse_method
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext
from engine.errors import PlaygroundError
from engine.model.corpus import Corpus
from engine.model.files import check_folder, read_tensors
from engine.model.gguf.file import GGUFFile
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from tests.engine.drafters.judges import write
from tests.hostile.damages import Case
from tests.hostile.model_files import DRAFTERS, TARGETS, drafter_cases, target_cases
from tests.hostile.watch import MOST_S, Watch
from tests.models import build_context, tiny_target

pytestmark = pytest.mark.slow

MOST_BYTES = 1 << 30
"""What all cases together may add to the process."""
LONGEST = 600
NEVER_SAID = ("weights_only", "trust_remote_code=True", "Traceback", "ignore_mismatched_sizes")
PROMPT = [5, 9, 200, 31]
CHAT = [{"role": "user", "content": "hi"}]


class Bases:
    """Valid files of every kind, and the texts that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, tiny_target()
        for name, save in TARGETS.items():
            save(folder / name)
        for name, (_, save_for) in DRAFTERS.items():
            save_for(folder / name, self.target)
        self.texts = {name: self.text(name, folder / name) for name in (*TARGETS, *DRAFTERS)}

    def text(self, base: str, folder: Path) -> list[int]:
        """What is written with these files."""
        if base in TARGETS:
            target = load(folder)
            if target.tokenizer is not None:
                target.encode("abc")
            if target.has_chat_template:
                target.encode_chat(CHAT)
            plain = AutoregressiveConfig().build(build_context(target))
            return write(target, plain, PROMPT, tokens=6).output
        fixed, _ = DRAFTERS[base]
        place = "datastore" if base == "Suffix" else "speculative_model"
        values = {"decoding_type": base.split()[0], **fixed, place: str(folder)}
        context = BuildContext(self.target, TargetSpec.of_path_or_hub, load_spec)
        drafter = parse_method(values, where=base).build(context)
        return write(self.target, drafter, PROMPT, tokens=6).output


def load_spec(spec: TargetSpec) -> Target:
    assert spec.path is not None
    cache = Path(spec.path).parent / "cache"
    return load_target(spec, dtype="float32", device="cpu", cache_dir=cache)


def load(folder: Path) -> Target:
    file = folder / "tiny.gguf"
    return load_spec(TargetSpec.of_path_or_hub(str(file if file.exists() else folder)))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def check(cases: Sequence[Case], bases: Bases, folder: Path) -> None:
    """Nothing but our own errors may come out of a case, soon and in bounded memory."""
    assert len(cases) > 150 and len({str(case) for case in cases}) == len(cases)
    faults, before = [], peak_bytes()
    for case in cases:
        place = folder / case.base.replace(" ", "-")
        shutil.copytree(bases.folder / case.base, place)
        case.damage(place)
        watch = Watch()
        fault = fault_of(case, bases, place)
        if fault or watch.took_s > MOST_S:
            faults.append(f"{case}: {fault or f'{watch.took_s:.1f} s'}")
        shutil.rmtree(place)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    assert not faults, "\n".join(faults)
    assert peak_bytes() - before < MOST_BYTES


def fault_of(case: Case, bases: Bases, folder: Path) -> str:
    """What is wrong with how a case ended; nothing if it was refused, or wrote its own text."""
    try:
        with warnings.catch_warnings(action="ignore"):
            text = bases.text(case.base, folder)
    except PlaygroundError as error:
        said = str(error)
        plain = said.isprintable() and 10 < len(said) <= LONGEST
        return "" if plain and not any(w in said for w in NEVER_SAID) else f"said {said!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if case.refused:
        return "it was not refused"
    same = text == bases.texts[case.base] or case.another
    return "" if same else "it wrote another text"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_every_damaged_target_is_refused_or_writes_its_own_text(
    bases: Bases, tmp_path: Path
) -> None:
    check(list(target_cases()), bases, tmp_path)


def test_every_damaged_drafter_is_refused_or_drafts_losslessly(
    bases: Bases, tmp_path: Path
) -> None:
    check(list(drafter_cases(bases.folder)), bases, tmp_path)


# ---- any bytes


def flipped(data: bytes, changes: list[tuple[float, int]]) -> bytes:
    """Some bytes changed: where as a share of the whole, and to what."""
    changed = bytearray(data)
    for where, value in changes:
        changed[int(where * len(changed))] = value
    return bytes(changed)


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "GGUF": ("gguf", "tiny.gguf", GGUFFile),
    "safetensors": ("target", "model.safetensors", read_tensors),
    "names of safetensors": ("target", "model.safetensors", partial(read_tensors, values=False)),
    "pickle": ("bin", "pytorch_model.bin", read_tensors),
    "names of a pickle": ("bin", "pytorch_model.bin", partial(read_tensors, values=False)),
    "config": ("target", "config.json", lambda file: check_folder(file.parent)),
    "corpus": ("Suffix", "dialogues.jsonl", lambda file: Corpus.open(file.parent)),
    "manifest": ("Suffix", "corpus.json", lambda file: Corpus.open(file.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_bytes_a_file_has_its_reader_reads_or_refuses(
    name: str, bases: Bases, tmp_path: Path
) -> None:
    base, file_name, read = READERS[name]
    folder = shutil.copytree(bases.folder / base, tmp_path / "copy")
    file = folder / file_name
    whole = file.read_bytes()
    # Most of a weight file is numbers, any of which is valid: the ends are where its form is.
    near = st.one_of(st.floats(0, 0.06), st.floats(0.94, 0.9999), st.floats(0, 0.9999))
    changes = st.lists(st.tuples(near, st.integers(0, 255)), min_size=1, max_size=4)

    @settings(max_examples=60, derandomize=True, deadline=5000, database=None)
    @given(changes, st.one_of(st.just(1.0), st.floats(0, 1)))
    def reads_or_refuses(changes: list[tuple[float, int]], share: float) -> None:
        damaged = flipped(whole, changes)
        file.write_bytes(damaged[: int(share * len(damaged))])
        try:
            read(file)
        except PlaygroundError as error:
            assert str(error).isprintable() and len(str(error)) <= LONGEST

    reads_or_refuses()
