"""A drafter that is not asked for some steps drafts afterwards as if it had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import Drafter, Start, root_only
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from engine.steps import End, Step
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.fitted import save_medusa, save_redrafter
from tests.engine.drafters.judges import slow
from tests.engine.tuning.controlled import AtRandom
from tests.models import build_context, plain_greedy, tiny_target

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
TOKENS = 60
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
METHODS: dict[str, dict[str, Any]] = {
    "Eagle": {"decoding_type": "Eagle", **TREE, "max_draft_len": 3},
    "Eagle-static": {"decoding_type": "Eagle", "eagle_choices": [[0, 0, 0], [1, 0]]},
    "Eagle3": {"decoding_type": "Eagle3", **TREE, "eagle3_layers_to_capture": [0, 1]},
    "Medusa": {"decoding_type": "Medusa", "medusa_choices": [[0, 0], [0, 1], [1]]},
    "ReDrafter": {"decoding_type": "ReDrafter", "beam_width": 3, "beam_length": 4},
    "Draft_Target": {"decoding_type": "Draft_Target", "max_draft_len": 3},
    "NGram": {"decoding_type": "NGram", "max_draft_len": 3},
    "Suffix": {"decoding_type": "Suffix", "max_draft_len": 3},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(eos_token_id=None)


@pytest.fixture(scope="module")
def settings(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("heads")
    heads: dict[str, Path] = {
        "Eagle": save_eagle(root / "eagle", target),
        "Eagle3": save_eagle3(root / "eagle3", target, (1, 2), draft_vocab=64),
        "Medusa": save_medusa(_made(root / "medusa"), target, num_heads=2),
        "ReDrafter": save_redrafter(_made(root / "redrafter"), target),
    }
    named = {**{k: str(v) for k, v in heads.items()}, "Draft_Target": "other"}
    settings = {}
    for name, values in METHODS.items():
        model = named.get(values["decoding_type"])
        settings[name] = {**values, **({"speculative_model": model} if model else {})}
    return settings


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Pausing(Drafter):
    """Passes every outcome on, and asks for a draft every few steps only."""

    def __init__(self, inner: Drafter, target: Target, every: int) -> None:
        self.inner, self.needs = inner, inner.needs
        self._device, self._every = target.device, every
        self._step, self._root = 0, 0
        self.drawn: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        self._length = 0

    def start(self, start: Start) -> None:
        self._step, self._root, self._length = 0, start.root, len(start.prompt_ids)
        self.inner.start(start)

    def propose(self, budget: Budget) -> Proposal:
        self._step += 1
        if self._step % self._every:
            return root_only(self._root, self._device)
        proposal = self.inner.propose(budget)
        self.drawn[self._length] = (proposal.tokens.tolist(), proposal.shape.parents)
        # The root alone is fed: every context comes up, whatever would have been accepted.
        return proposal.keep([0])

    def observe(self, outcome: Outcome) -> None:
        self._root = outcome.next_root
        self._length += len(outcome.committed)
        self.inner.observe(outcome)

    def finish(self) -> None:
        self.inner.finish()


def drafts(
    target: Target, values: dict[str, Any], every: int
) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    other = tiny_target("llama", seed=5, hidden_size=16, num_hidden_layers=1)
    drafter = Pausing(parse_method(values).build(build_context(target, other=other)), target, every)
    list(decode(target, drafter, PROMPT, limits=Limits(max_new_tokens=TOKENS)))
    return drafter.drawn


@pytest.mark.parametrize("name", METHODS)
def test_drafts_after_a_pause_are_those_without_one(
    name: str, target: Target, settings: dict[str, dict[str, Any]]
) -> None:
    always = drafts(target, settings[name], every=1)
    seldom = drafts(target, settings[name], every=5)
    assert len(seldom) >= 10
    assert {at: always[at] for at in seldom} == seldom


@pytest.mark.parametrize("name", [n if n in ("Eagle", "NGram") else slow(n) for n in METHODS])
def test_output_is_the_targets_whatever_is_drafted_when(
    name: str, target: Target, settings: dict[str, dict[str, Any]]
) -> None:
    other = tiny_target("llama", seed=5, hidden_size=16, num_hidden_layers=1)
    drafter = parse_method(settings[name]).build(build_context(target, other=other))
    drafter = AtRandom.around(drafter, target)
    *records, end = decode(target, drafter, PROMPT, limits=Limits(max_new_tokens=TOKENS))
    assert isinstance(end, End)
    assert list(end.output_ids) == plain_greedy(target, PROMPT, TOKENS)
    assert any(record.num_drafted for record in records if isinstance(record, Step))
