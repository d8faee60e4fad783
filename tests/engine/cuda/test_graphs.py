"""Real graphs on a device. Methods are run by them in `tests/engine/device`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.cuda.targets import captured, model_of, plain, runner_of
from tests.engine.scripted import assert_same_walk
from tests.models import load_tiny, save_tiny

pytestmark = pytest.mark.gpu
BIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_graphs_show_what_modules_show(family: str) -> None:
    model = model_of(family, **BIG).to("cuda")
    theirs, ours = plain(model), captured(model)
    # These weights magnify rounding: of logits up to 21, that of a CPU's float32 is 0.0007.
    near = {"rtol": 2e-2, "atol": 2e-2}
    sizes = (1, 7, 30, 64, 1, 60, 12) * 3
    assert_same_walk(ours, theirs, sizes, prompts=[200], room=900, **near)
    assert len(runner_of(ours).buckets) >= 5 and ours.environment()["cuda_graphs"] == "used"


@pytest.mark.parametrize("switch", [True, False])
def test_a_loaded_target_says_whether_graphs_run_it(switch: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    target = load_tiny(folder, "bfloat16", device="cuda", cuda_graphs=switch)
    expected = {True: "used: a plain step takes ", False: "not used: switched off"}
    assert target.environment()["cuda_graphs"].startswith(expected[switch])
