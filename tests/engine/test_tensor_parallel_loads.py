"""Models of several kinds divided among processes, and processes that end."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from engine.errors import TargetError
from engine.model.facts import facts_of
from engine.model.sources import TargetSpec
from engine.proposal import Needs
from tests.engine.test_tensor_parallel import PROMPT, answer, loaded
from tests.models import save_tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text", "qwen3"])
def test_each_device_holds_what_was_said(family: str, tmp_path: Path) -> None:
    """And the same comes of it, for models with experts and with windows, too."""
    overrides = {"num_key_value_heads": 2, "num_attention_heads": 4}
    folder = save_tiny(tmp_path / "model", family, **overrides)
    spec = TargetSpec(name="tiny", path=str(folder), native_kernels="off")
    facts = facts_of(spec, dtype="float32", device="tensor=2", cache_dir=tmp_path)
    assert facts.fault is None and len(facts.shares) == 2
    target, alone = loaded(folder, "tensor=2", tmp_path), loaded(folder, "cpu", tmp_path)
    local = (getattr(p, "to_local", lambda p=p: p)() for p in target.model.parameters())
    assert sum(p.nbytes for p in local) == facts.shares[0].num_bytes
    method = {"decoding_type": "NGram"}
    assert answer(target, method) == answer(alone, method)
    target.close()
    assert not multiprocessing.active_children()


def test_a_process_that_ends_is_told_of(tmp_path: Path) -> None:
    """With an error for what runs and for what comes later; the target can be loaded again."""
    folder = save_tiny(tmp_path / "model")
    target = loaded(folder, "tensor=2", tmp_path)
    cache = target.new_cache(64)
    target.prefill(PROMPT, cache, Needs())
    (process,) = multiprocessing.active_children()
    process.kill()
    process.join()
    for _ in range(2):
        with pytest.raises(TargetError, match="has failed: .* Load the target again"):
            target.prefill(PROMPT, cache, Needs())
    assert target.fault is not None
    target.close()
    again = loaded(folder, "tensor=2", tmp_path)
    assert len(answer(again, {"decoding_type": "NGram"})[1]) == 48
    again.close()
