"""The campaign of damaged and hostile model files, each through the real loader.

Every case must end in one sentence of ours, or in the text that the undamaged files write (another
text only where the case says that they are another valid model).
"""

from __future__ import annotations

import resource
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext, Drafter
from engine.errors import PlaygroundError
from engine.kernels.cpu.gguf import GGUFFile
from engine.model.corpus import Corpus
from engine.model.files import check_folder, read_tensors
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import End
from tests.hostile.damages import Case
from tests.hostile.model_files import DRAFTERS, TARGETS, drafter_cases, target_cases
from tests.models import build_context, tiny_target

pytestmark = pytest.mark.slow

SHARE = 8
"""Without `--hostile-long`, one case of so many is tried."""
SLOWEST_S = 5.0
MOST_BYTES = 1 << 30
"""What the whole campaign may add to the process."""
LONGEST = 600
NEVER_SAID = ("weights_only", "trust_remote_code=True", "Traceback", "ignore_mismatched_sizes")
LIMITS = Limits(max_new_tokens=6, ignore_eos=True)
PROMPT = [5, 9, 200, 31]
CHAT = [{"role": "user", "content": "hi"}]


@dataclass
class Campaign:
    """What the cases came to."""

    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""

    def __str__(self) -> str:
        return (
            f"tried {self.ended.total()}, refused {self.ended['refused']}, "
            f"loaded {self.ended['loaded']}, lost {len(self.lost)}, "
            f"slowest {1000 * self.slowest_s:.0f} ms ({self.slowest})"
        )


class Bases:
    """Valid files of every kind, and the texts that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, tiny_target()
        for name, write in TARGETS.items():
            write(folder / name)
        for name, (_, write_for) in DRAFTERS.items():
            write_for(folder / name, self.target)
        self.texts = {name: self.text(name, folder / name) for name in (*TARGETS, *DRAFTERS)}

    def text(self, base: str, folder: Path) -> tuple[int, ...]:
        """What is written with these files."""
        if base in TARGETS:
            target = load(folder)
            if target.tokenizer is not None:
                target.encode("abc")
            if target.has_chat_template:
                target.encode_chat(CHAT)
            return written(target, AutoregressiveConfig().build(build_context(target)))
        fixed, _ = DRAFTERS[base]
        place = "datastore" if base == "Suffix" else "speculative_model"
        values = {"decoding_type": base.split()[0], **fixed, place: str(folder)}
        context = BuildContext(self.target, TargetSpec.of_path_or_hub, load_spec)
        drafter = parse_method(values, where=base).build(context)
        return written(self.target, drafter)


def load_spec(spec: TargetSpec) -> Target:
    assert spec.path is not None
    cache = Path(spec.path).parent / "cache"
    return load_target(spec, dtype="float32", device="cpu", cache_dir=cache)


def load(folder: Path) -> Target:
    file = folder / "tiny.gguf"
    return load_spec(TargetSpec.of_path_or_hub(str(file if file.exists() else folder)))


def written(target: Target, drafter: Drafter) -> tuple[int, ...]:
    *_, end = decode(target, drafter, PROMPT, limits=LIMITS)
    assert isinstance(end, End)
    return end.output_ids


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def share(request: pytest.FixtureRequest) -> int:
    return 1 if request.config.getoption("--hostile-long") else SHARE


def tried(cases: Sequence[Case], bases: Bases, folder: Path) -> Campaign:
    """Run the campaign; nothing but our own errors may come out of a case."""
    campaign, before = Campaign(), peak_bytes()
    for case in cases:
        place = folder / case.base.replace(" ", "-")
        shutil.copytree(bases.folder / case.base, place)
        case.damage(place)
        began_s = time.perf_counter()
        ended, fault = outcome(case, bases, place)
        took_s = time.perf_counter() - began_s
        if took_s > campaign.slowest_s:
            campaign.slowest_s, campaign.slowest = took_s, str(case)
        if took_s > SLOWEST_S:
            fault = f"took {took_s:.1f} s"
        campaign.ended[ended] += 1
        if fault is not None:
            campaign.lost.append(f"{case}: {fault}")
        shutil.rmtree(place)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    if peak_bytes() - before > MOST_BYTES:
        campaign.lost.append(f"took {(peak_bytes() - before) >> 20} MiB")
    return campaign


def outcome(case: Case, bases: Bases, folder: Path) -> tuple[str, str | None]:
    """How a case ended, and what is wrong with that."""
    try:
        with warnings.catch_warnings(action="ignore"):
            text = bases.text(case.base, folder)
    except PlaygroundError as error:
        said = str(error)
        plain = said.isprintable() and 10 < len(said) <= LONGEST
        if not plain or any(words in said for words in NEVER_SAID):
            return "refused", f"in these words: {said!r}"
        return "refused", None
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    if case.refused:
        return "loaded", "it was not refused"
    if text != bases.texts[case.base] and not case.another:
        return "loaded", "it wrote another text"
    return "loaded", None


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def ends(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{campaign}")
    assert not campaign.lost, "\n".join(campaign.lost)


def test_every_damaged_target_is_refused_or_writes_its_own_text(
    bases: Bases, share: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = list(target_cases())
    assert len(cases) > 500 and len({str(case) for case in cases}) == len(cases)
    ends(tried(cases[::share], bases, tmp_path), capsys)


def test_every_damaged_drafter_is_refused_or_drafts_losslessly(
    bases: Bases, share: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = list(drafter_cases(bases.folder))
    assert len(cases) > 500 and len({str(case) for case in cases}) == len(cases)
    ends(tried(cases[::share], bases, tmp_path), capsys)


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
