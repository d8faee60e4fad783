"""Devices that are not `cuda:0`: another card, a card without bfloat16, one that is not CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from engine.drafters.heads.vocabulary import DraftOutput, Vocabulary
from engine.model import clock, plan
from engine.model.batch import TextBatch
from engine.model.loading import load_target
from engine.model.plan import pick_dtype
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.sampling import widest_float
from tests.engine.device.pretend import pretend_device
from tests.engine.device.runs import run
from tests.engine.device.test_methods import KINDS_OF_STATE, WAYS
from tests.engine.drafters.judges import slow
from tests.engine.methods import METHODS, drafter_for, moved, target_of
from tests.models import load_tiny, save_tiny, tiny_target

CARDS = {0: (8, 6), 1: (7, 5)}
"""Compute capability of two cards, the first of which is the current one."""


@pytest.fixture
def no_float64() -> Iterator[torch.device]:
    with pretend_device(float64=False) as device:
        widest_float.cache_clear()
        yield device
    widest_float.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cuda:0", torch.bfloat16), ("cuda:1", torch.float16), ("mps", torch.float16)],
)
def test_bfloat16_that_is_only_emulated_is_not_chosen(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capability(device: torch.device | None = None) -> tuple[int, int]:
        return CARDS[0 if device is None else device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    assert pick_dtype("auto", torch.device(device)) == dtype


def test_timestamps_are_recorded_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.stream = "the current card's"

        def record(self, stream: str = "the current card's") -> None:
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    event: Any = clock.now(torch.device("cuda", 1))[0]
    assert event.stream == "that of cuda:1"


def test_an_accelerator_without_graphs_and_float64_runs_a_target(
    no_float64: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "pick_device", lambda name: torch.device(name))
    folder = save_tiny(tmp_path / "tiny")
    spec = TargetSpec(name="tiny", path=str(folder))
    target = load_target(spec, dtype="float32", device=str(no_float64), cache_dir=tmp_path)
    assert target.environment()["forward"] == "transformers' modules"
    assert target.environment()["cuda_graphs"] == "not used: pretend has none"
    expected = run(load_tiny(folder), drafter_for(target_of("ngram"), "ngram")).output
    assert run(target, drafter_for(target, "ngram")).output == expected


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in ("draft-model", "eagle") for way in ("tokens", "block")),
        *(slow(name, ("tokens", "block")[turn % 2]) for turn, name in enumerate(METHODS)),
    ],
)
def test_a_method_drafts_without_float64(name: str, way: str, no_float64: torch.device) -> None:
    own = target_of(name)
    expected = run(own, drafter_for(own, name), WAYS[way])
    target = moved(own, no_float64)
    result = run(target, drafter_for(target, name), WAYS[way])
    assert result.output == expected.output


def spread(target: Target, first: torch.device) -> Target:
    """A copy whose embedding and first layer are on one card, all that follows on another."""
    model, second = moved(target, torch.device("cpu")).model, f"{first.type}:1"
    decoder, device_map = model.base_model_prefix, dict[str, str]()
    for name, module in model.named_children():
        if module is not model.base_model:
            device_map[name] = second
    for name, _ in model.base_model.named_children():
        parts = [f"{name}.{i}" for i in range(target.num_layers)] if name == "layers" else [name]
        for part in parts:
            is_late = part.startswith(("norm", "final")) or name == "layers" and part != "layers.0"
            device_map[f"{decoder}.{part}"] = second if is_late else str(first)
    dispatch_model(model, device_map, main_device=str(first))
    return Target(model, target.tokenizer, name=target.name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("eagle3", "medusa", "mtp") else pytest.mark.slow)
        for name in METHODS
    ],
)
def test_a_method_drafts_for_layers_on_two_cards(name: str) -> None:
    own = target_of(name)
    expected = run(own, drafter_for(own, name))
    with pretend_device() as device:
        target = spread(own, device)
        result = run(target, drafter_for(target, name))
    assert result.output == expected.output and result.num_accepted == expected.num_accepted


def test_a_draft_vocabulary_is_taken_from_a_matrix_on_another_card() -> None:
    own = tiny_target("phi")
    hidden, ids = torch.randn(3, own.hidden_size), torch.tensor([5, 3, 200])
    with pretend_device() as device, torch.inference_mode():
        target = spread(own, device)
        outputs = [
            DraftOutput(t, Vocabulary(ids.to(t.device), t.vocab_size))(hidden.to(t.device))
            for t in (own, target)
        ]
        assert outputs[1].device == target.device
        torch.testing.assert_close(outputs[1].cpu(), own.output(hidden)[:, ids])


def test_a_batch_of_texts_is_read_by_layers_on_two_cards() -> None:
    own = tiny_target()
    with pretend_device() as device:
        batches = [TextBatch(target, 2, 64) for target in (own, spread(own, device))]
        texts = [(0, 0, [5, 6, 7]), (1, 0, [8, 9])]
        expected, output = (batch.advance(texts).logits.cpu() for batch in batches)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "lfm2" else pytest.mark.slow) for f in KINDS_OF_STATE],
)
def test_recurrent_states_are_rolled_back_on_two_cards(family: str) -> None:
    own = tiny_target(family, eos_token_id=None)
    expected = run(own, drafter_for(own, "ngram"), tokens=12)
    with pretend_device() as device:
        target = spread(own, device)
        assert run(target, drafter_for(target, "ngram"), tokens=12).output == expected.output
