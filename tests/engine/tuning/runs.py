"""Real greedy runs to hold replays against."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.heads.redrafter import ReDrafterConfig
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.model.target import Target
from engine.steps import End, Step
from engine.tuning import StoppedError
from tests.engine.drafters.golden import ROOT, golden_case
from tests.models import build_context

LIMITS = Limits(max_new_tokens=12)


def stopped(done: float) -> None:
    """Somebody stops the measurement at once."""
    raise StoppedError("stopped")


@dataclass(frozen=True)
class Ran:
    """What a run did, step by step."""

    steps: list[Step]
    output: tuple[int, ...]

    @property
    def accepted(self) -> list[int]:
        return [step.num_accepted for step in self.steps]


def ran(target: Target, drafter: Drafter, prompt: Sequence[int], limits: Limits = LIMITS) -> Ran:
    """A greedy run with its records."""
    records = list(decode(target, drafter, prompt, limits=limits))
    end = records[-1]
    assert isinstance(end, End)
    return Ran([record for record in records if isinstance(record, Step)], end.output_ids)


def texts_of(
    bench: BuildContext, prompts: Sequence[Sequence[int]], limits: Limits = LIMITS
) -> list[Text]:
    """What the target alone writes."""
    plain = AutoregressiveConfig().build(bench)
    return [
        Text(
            tuple(prompt),
            ran(bench.target, plain, prompt, limits).output,
            category=f"kind {number % 2}",
            limits=limits,
            source=f"run {number}",
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Case:
    """A tiny target with heads that are often right, and five prompts."""

    bench: BuildContext
    config: MethodConfig
    prompts: list[list[int]]
    texts: list[Text]


@functools.cache
def golden(name: str) -> Case:
    """Golden heads, which were trained on what their target writes."""
    folder, config = _GOLDEN[name]
    case = golden_case(folder)
    values: Any = config(speculative_model=str(ROOT / folder / "head"))
    given = [p.get("ids") or p["input_ids"] for p in case.expected["prompts"]]
    prompts = [*given, given[0][2:7], given[1][4:17], given[1][:1]]
    bench = build_context(case.target)
    return Case(bench, values, prompts, texts_of(bench, prompts))


_GOLDEN: dict[str, tuple[str, Any]] = {
    "medusa": ("medusa/case_a", MedusaConfig),
    "eagle": ("eagle/eagle1", EagleConfig),
    "eagle3": ("eagle/eagle3", Eagle3Config),
    "redrafter": ("redrafter/case_a_rnn", ReDrafterConfig),
}
