"""Every method, wholly on a device: the CPU's text, no mixed devices, one wait a step.

On a pretended one; with --gpu on a real one as well, whose random draws are others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Sampling
from engine.drafters import methods as all_methods
from engine.drafters.texts import Text
from engine.training.methods import METHODS as TRAINED
from engine.tuning.ranks import trace_text
from tests.engine.cuda.targets import captured, runner_of
from tests.engine.device.runs import PROMPT, assert_waits, run
from tests.engine.drafters.judges import slow
from tests.engine.methods import FAMILIES, METHODS, drafter_for, moved, target_of
from tests.models import alike, tiny_target

WAYS = {
    "greedy": Sampling(),
    "tokens": Sampling(temperature=0.8, seed=4, verification="token"),
    "block": Sampling(temperature=0.8, seed=4, verification="block"),
}
QUICK = (
    *((name, "greedy") for name in ("plain", "ngram", "eagle3-dynamic", "medusa", "draft-model")),
    *((name, "tokens") for name in ("eagle", "draft-model")),
    ("ngram", "block"),
)
"""Not slow tests."""
KINDS_OF_STATE = ("qwen3_5_text", "lfm2", "jamba", "mamba2", "granitemoehybrid", "falcon_h1")
"""Delta rule, convolution, state spaces alone and beside attention."""
TOPOLOGY = "which nodes the tree has is decided on the device and needed to verify it"
MORE_WAITS: dict[str, tuple[int, int, str]] = {
    "recycling": (3, 2, "the prompt's rows are ranked once; " + TOPOLOGY),
    "combined": (3, 2, "as its model, recycling"),
    "eagle-dynamic": (2, 2, TOPOLOGY),
    "eagle3-dynamic": (2, 2, TOPOLOGY),
    "dflash-tree": (2, 2, TOPOLOGY),
    "redrafter": (2, 2, TOPOLOGY),
    "draft-model-unsure": (5, 5, "each draft token may be the last, which its probability says"),
    "draft-model-text": (2, 2, "the draft is tokenized again"),
    "medusa-typical": (2, 2, "typical acceptance reads its own verdict; lossy"),
    "mtp-relaxed": (9, 9, "relaxed acceptance reads node by node; lossy"),
}
"""Waits of the first step and of the others, and why."""
LOOKUP_TENSORS, NETWORK_TENSORS = 560, 2300
"""A tiny target's forward makes about 300; draft models and assistants make four of their own."""


def test_every_method_is_here() -> None:
    assert {values["decoding_type"] for values in METHODS.values()} == {*all_methods()}


def _cases() -> list[Any]:
    """Greedy, and block verification, which is the default; token by token where draws differ."""
    cases = [(name, way) for name in METHODS for way in ("greedy", "block")]
    cases += [case for case in QUICK if case not in cases]
    return [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize(("name", "way"), _cases())
def test_a_method_writes_the_cpus_text(name: str, way: str, device: torch.device) -> None:
    own = target_of(name)
    expected = run(own, drafter_for(own, name), WAYS[way])
    target = moved(own, device)
    drafter = drafter_for(target, name)
    result = run(target, drafter, WAYS[way])
    if way == "greedy" or device.type == "pretend":
        assert result.output == expected.output and result.num_accepted == expected.num_accepted
    first, later, _ = MORE_WAITS.get(name, (1, 1, ""))
    assert_waits(result.logs, first, later)
    assert max(result.tensors) < (NETWORK_TENSORS if drafter.traits.has_network else LOOKUP_TENSORS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in METHODS if METHODS[n]["decoding_type"] not in FAMILIES]
)
def test_graphs_write_the_cpus_text(name: str, device: torch.device) -> None:
    own = target_of(name)
    expected = run(own, drafter_for(own, name), tokens=32)
    target, small = (captured(moved(t, device).model) for t in (own, alike(eos_token_id=None)))
    result = run(target, drafter_for(target, name, small=small), tokens=32)
    assert result.output == expected.output and result.num_accepted == expected.num_accepted
    assert runner_of(target).buckets and target.environment()["cuda_graphs"] == "used"
    first, later, _ = MORE_WAITS.get(name, (1, 1, ""))
    assert_waits(result.logs, first, later)


@pytest.mark.parametrize(
    ("name", "levels"), [("ngram", 0), slow("eagle-chain", 4), ("draft-model", 4)]
)
def test_the_controller_decides_without_reading_more(
    name: str, levels: int, device: torch.device
) -> None:
    """Its choices follow the clock, the text does not; a drafter that wakes reads once more, and
    one with probabilities before every further level: whether it may still pay."""
    own = target_of(name)
    target = moved(own, device)
    result = run(target, drafter_for(target, name, "auto"), tokens=40)
    assert result.output == run(own, drafter_for(own, "plain"), tokens=40).output
    assert_waits(result.logs, 2 + levels, 2 + levels)


@pytest.mark.parametrize("name", ["draft-model", "eagle", "eagle3", "medusa", "redrafter"])
def test_a_drafter_ranks_as_on_the_cpu_before_its_first_text(
    name: str, device: torch.device
) -> None:
    own = target_of(name)
    drafters = drafter_for(own, name), drafter_for(moved(own, device), name)
    text = Text(tuple(PROMPT), run(own, drafter_for(own, "plain")).output)
    trace = trace_text(own, text, drafters[0].needs, tail=3)
    with torch.inference_mode():
        expected, ranks = (drafter.ranks(trace, 3) for drafter in drafters)
    assert torch.equal(ranks, expected)


@pytest.mark.parametrize("way", ["greedy", "tokens"])
@pytest.mark.parametrize("name", ["ngram", "eagle", "medusa"])
def test_a_grammar_reads_the_draft_once_more(name: str, way: str, device: torch.device) -> None:
    """Its matcher walks the draft before it is verified."""
    grammar = {"structured_output": "regex", "grammar": "[ab]{3}cd[0-9]{4}(ef){2}"}
    sampling = WAYS[way].replace(**grammar)
    own = target_of(name)
    target = moved(own, device)
    own.config.eos_token_id = target.config.eos_token_id = 256
    try:
        result = run(target, drafter_for(target, name), sampling)
        if way == "greedy" or device.type == "pretend":
            assert result.output == run(own, drafter_for(own, name), sampling).output
        assert_waits(result.logs, 2, 2)
    finally:
        own.config.eos_token_id = None


@pytest.mark.parametrize("name", ["ngram", "medusa", "draft-model", *map(slow, ("eagle3", "mtp"))])
def test_the_next_turn_goes_on_from_the_last_one(name: str, device: torch.device) -> None:
    own = target_of(name)
    target = moved(own, device)
    drafter, reference = drafter_for(target, name), drafter_for(own, name)
    prompt = list(PROMPT)
    for turn in range(3):
        result = run(target, drafter, prompt=prompt, tokens=10, prefix_caching=True)
        expected = run(own, reference, prompt=prompt, tokens=10, prefix_caching=True)
        assert result.output == expected.output
        assert_waits(result.logs)
        prompt += [*result.output, 3 + turn, 4]
    own.prefixes.clear()


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "lfm2" else pytest.mark.slow) for f in KINDS_OF_STATE],
)
def test_recurrent_states_are_rolled_back_without_waiting(
    family: str, device: torch.device
) -> None:
    own = tiny_target(family, eos_token_id=None)
    target = moved(own, device)
    for prompt in (PROMPT, (*PROMPT, 3, 4, 5, 6)):
        for sampling in (WAYS["greedy"], WAYS["tokens"]):
            result = run(target, drafter_for(target, "ngram"), sampling, prompt=prompt, tokens=12)
            expected = run(own, drafter_for(own, "ngram"), sampling, prompt=prompt, tokens=12)
            if not sampling.temperature or device.type == "pretend":
                assert result.output == expected.output
            assert_waits(result.logs)


@pytest.mark.slow
def test_a_training_step_is_the_cpus(tmp_path: Path) -> None:
    """In a process of its own: torch's autograd knows the devices of its first backward pass."""
    line = [sys.executable, "-m", "tests.engine.device.training", str(tmp_path)]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    losses = json.loads(ran.stdout)
    assert losses.keys() == {*TRAINED}
    for own, other in losses.values():
        assert other == pytest.approx(own, rel=1e-5)
