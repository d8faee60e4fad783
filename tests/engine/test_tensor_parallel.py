"""A model divided among processes answers as on one device, whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.errors import ConfigError, OutOfMemoryError, TargetError
from engine.model.batch import OneTextAtATime, batch_of
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.model.tensor_parallel import divided as divide
from engine.proposal import Needs
from engine.steps import End
from tests.models import build_context, save_tiny, tiny_model

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def loaded(folder: Path, device: str, cache_dir: Path) -> Target:
    spec = TargetSpec(name="tiny", path=str(folder), native_kernels="off")
    return load_target(spec, dtype="float32", device=device, cache_dir=cache_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def divided(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = loaded(folder, "tensor=2", tmp_path_factory.mktemp("cache"))
    yield target
    target.close()


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return loaded(folder, "cpu", tmp_path_factory.mktemp("cache"))


CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
"""Sums over two parts are rounded otherwise than over one."""


def answer(
    target: Target, method: dict[str, Any], prompt: list[int] = PROMPT
) -> tuple[int, tuple[int, ...]]:
    """How many steps a text takes, and its tokens."""
    drafter = parse_method(method).build(build_context(target))
    limits = Limits(max_new_tokens=48, ignore_eos=True)
    *steps, end = decode(target, drafter, prompt, limits=limits)
    drafter.close()
    assert isinstance(end, End)
    return len(steps), end.output_ids


@pytest.mark.parametrize(
    "method",
    [
        {"decoding_type": "Autoregressive"},
        {"decoding_type": "NGram"},
        {"decoding_type": "Token_Recycling"},
    ],
    ids=lambda method: method["decoding_type"],
)
def test_a_divided_model_answers_as_a_whole_one(
    method: dict[str, Any], divided: Target, whole: Target
) -> None:
    """A second prompt goes on from what the first left in the caches of both processes."""
    there, here = answer(divided, method), answer(whole, method)
    assert there == here and len(there[1]) == 48
    longer = [*PROMPT, *there[1][:20], 5]
    assert answer(divided, method, longer) == answer(whole, method, longer)


def test_what_drafters_see_is_whole(divided: Target, whole: Target) -> None:
    needs = Needs(hidden=True, layers=(1, 2))
    seen = [t.prefill(PROMPT, t.new_cache(64), needs) for t in (divided, whole)]
    for name in ("logits", "hidden", "layers"):
        torch.testing.assert_close(*(getattr(each, name) for each in seen), **CLOSE)
    hidden = seen[0].hidden
    assert hidden is not None
    with torch.inference_mode():
        torch.testing.assert_close(divided.output(hidden[-1]), seen[0].logits[-1], **CLOSE)


def test_rows_of_the_middle_are_kept_in_every_process(divided: Target, whole: Target) -> None:
    """Also after the cache grew, and in a copy of which the first rows are taken."""
    found = []
    for target in (divided, whole):
        cache = target.new_cache(64)
        target.prefill(PROMPT * 10, cache, Needs())
        cache.reserve(200)
        target.prefill([7, 8, 9, 10, 11, 12], cache, Needs())
        cache.truncate(81)
        target.prefill([13] * 4, cache, Needs())
        copy = cache.copy()
        cache.free()
        other = target.new_cache(64)
        other.paste(copy, 83)
        found.append(target.prefill([14, 15], other, Needs()).logits)
    torch.testing.assert_close(*found, **CLOSE)


def test_what_would_call_its_modules_is_told_not_to(divided: Target) -> None:
    assert isinstance(batch_of(divided, 2, 64), OneTextAtATime)
    with pytest.raises(ConfigError, match="reads the target's keys and values"):
        divided.prefill(PROMPT, divided.new_cache(64), Needs(shared=(1,)))
    assert "tensor parallel over 2" in divided.environment()["forward"]
    assert divided.device_name == "cpu + cpu"


def test_one_model_at_a_time(divided: Target, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="Only one model can be divided"):
        loaded(folder, "tensor=2", tmp_path)


def test_what_cannot_be_divided_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(folder)

    def shares(config: Any, device: str, free: int = 1 << 40) -> Any:
        return divide(config, device, torch.float32, {"cpu": free})

    for device in ("tensor", "tensor=1", "tensor=two", "tensor=65"):
        with pytest.raises(ConfigError, match="must be like tensor=2"):
            shares(config, device)
    with pytest.raises(TargetError, match="4 attention heads and 2 of keys"):
        shares(config, "tensor=4")
    with pytest.raises(TargetError, match="no plan for dividing"):
        shares(tiny_model("opt").config, "tensor=2")
    with pytest.raises(OutOfMemoryError, match=r"cpu \(2 of 2\) 0.0 of 0.0 GiB"):
        shares(config, "tensor=2", 1000)
    with pytest.raises(ConfigError, match="q8 runs on one device only"):
        load_target(
            TargetSpec(name="tiny", path=str(folder)),
            dtype="q8",
            device="tensor=2",
            cache_dir=tmp_path,
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="torch sees 1 CUDA devices"):
        shares(config, "tensor=2")
