"""A model over several devices answers as on one; what is where is known before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from engine.drafters import parse_method
from engine.drafters.heads.vocabulary import DraftOutput, Vocabulary
from engine.errors import ConfigError, OutOfMemoryError
from engine.model.facts import facts_of
from engine.model.placement import UNITS, free_bytes, place_layers
from engine.model.reading import empty_model
from engine.model.sources import TargetSpec
from tests.engine.drafters.judges import write
from tests.models import build_context, load_tiny, save_tiny

ROOM = 2 * 2**20
"""A third of the model's float32 weights."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of shares is in MiB, as if these were GiB."""
    monkeypatch.setitem(UNITS, "GiB", UNITS["MiB"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=6, hidden_size=128, intermediate_size=512
    )


def answer(folder: Path, device: str, method: dict[str, Any]) -> list[int]:
    target = load_tiny(folder, device=device)
    drafter = parse_method(method).build(build_context(target))
    output = write(target, drafter, [1, 2, 3, 1, 2, 3, 1, 2]).output
    assert ("cpu + disk" if "disk" in device else "threads") in target.device_name
    target.close()
    return output


@pytest.fixture
def empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    # accelerate leaves out cards that are not here
    monkeypatch.setattr("accelerate.utils.modeling.get_max_memory", lambda memory: memory)
    return empty_model(AutoConfig.from_pretrained(folder), None, "tiny")


@pytest.mark.parametrize("decoding_type", ["Autoregressive", "NGram"])
def test_layers_on_disk_answer_as_those_in_memory(decoding_type: str, folder: Path) -> None:
    method = {"decoding_type": decoding_type}
    assert answer(folder, "cpu=2MiB,disk", method) == answer(folder, "cpu", method)


def test_a_head_drafts_the_rows_of_a_matrix_on_disk(folder: Path) -> None:
    ids, hidden = torch.tensor([5, 3, 200]), torch.randn(3, 128)
    whole, placed = (load_tiny(folder, device=device) for device in ("cpu", "cpu=2MiB,disk"))
    assert placed.lm_head.weight.is_meta
    with torch.inference_mode():
        output = DraftOutput(placed, Vocabulary(ids, placed.vocab_size))(hidden)
        torch.testing.assert_close(output, whole.output(hidden)[:, ids])


def test_two_cards_share_a_model_without_cutting_a_layer(empty: PreTrainedModel) -> None:
    free = {"cuda:0": 2 * ROOM, "cuda:1": 2 * ROOM, "cpu": 1 << 40}
    placement = place_layers(empty, "cuda:0,cuda:1", torch.float32, free)
    layers = {k: v for k, v in placement.device_map.items() if ".layers." in k}
    assert list(layers.values()) == sorted(layers.values()) and set(layers.values()) == {0, 1}
    assert all(k.count(".") == 2 for k in layers)
    for share in placement.shares:
        _, size, _, limit, _ = share.split()
        assert 0 < float(size) <= float(limit) == 4
    limited = place_layers(empty, "cuda:1=2MiB,cpu", torch.float32, free)
    assert [share.split()[3] for share in limited.shares] == ["2.0", "1048576.0"]


def test_a_model_that_does_not_fit_is_refused_naming_every_device(empty: PreTrainedModel) -> None:
    free = {"cuda:0": ROOM // 2, "cuda:1": ROOM // 2, "cpu": 1 << 40}
    with pytest.raises(OutOfMemoryError, match=r"cuda:0 .* cuda:1 .* too much\. Add a device"):
        place_layers(empty, "cuda:0,cuda:1", torch.float32, free)


def test_the_facts_say_how_much_goes_on_which_device(folder: Path, tmp_path: Path) -> None:
    spec = TargetSpec(name="tiny", path=str(folder))
    facts = facts_of(spec, dtype="float32", device="cpu=2MiB,disk", cache_dir=tmp_path)
    (cpu, in_memory, *_), (disk, on_disk, _) = (share.split() for share in facts.shares)
    assert facts.fault is None and (cpu, disk) == ("cpu", "disk")
    total = float(in_memory) + float(on_disk)
    assert total == pytest.approx(facts.num_bytes / 2**20, abs=0.1)
    facts = facts_of(spec, dtype="float32", device="cpu=2MiB", cache_dir=tmp_path)
    assert facts.fault is not None and "do not fit" in facts.fault


def test_free_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where `doctor` advised to close other programs: 0 GiB were free."""

    def fail(*_: Any, **__: Any) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", fail)
    assert free_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:7,cpu", "names cuda:7, but there are cpu only"),
        ("cpu,cpu", "each device once"),
        ("disk,cpu", "must begin with one that computes"),
        ("balanced", "torch sees 0"),
        ("cpu=2GB,disk", "must be like"),
    ],
)
def test_an_unavailable_device_is_refused(
    device: str, message: str, empty: PreTrainedModel
) -> None:
    with pytest.raises(ConfigError, match=message):
        place_layers(empty, device, torch.float32, {"cpu": 1 << 40})
