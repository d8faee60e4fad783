"""Real greedy runs to hold replays against."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Limits
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.heads.redrafter import ReDrafterConfig
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.tuning import StoppedError
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.drafters.judges import write
from tests.models import build_context

LIMITS = Limits(max_new_tokens=12)


def stopped(done: float) -> None:
    """Somebody stops the measurement at once."""
    raise StoppedError("stopped")


def texts_of(
    bench: BuildContext, prompts: Sequence[Sequence[int]], limits: Limits = LIMITS
) -> list[Text]:
    """What the target alone writes."""
    plain = AutoregressiveConfig().build(bench)
    return [
        Text(
            tuple(prompt),
            write(bench.target, plain, prompt, limits=limits).end.output_ids,
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
