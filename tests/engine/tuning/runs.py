"""Real greedy runs to hold replays against, and random trees for them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.eagle.methods import EagleConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.method import MethodConfig
from engine.drafters.texts import Text
from engine.model.target import Target
from engine.steps import End, Step
from engine.tree import ChoiceTree, Path
from engine.tuning import StoppedError
from tests.engine.drafters.golden import ROOT, golden_case
from tests.models import build_context

LIMITS = Limits(max_new_tokens=12)


def stopped(done: float) -> None:
    """Somebody stops the measurement at once."""
    raise StoppedError


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
    field: str
    prompts: list[list[int]]
    texts: list[Text]

    def with_tree(self, tree: ChoiceTree) -> Drafter:
        return self.config.replace(**{self.field: tree.paths}).build(self.bench)


@functools.cache
def golden(name: str) -> Case:
    """Golden heads, which were trained on what their target writes."""
    folder, config, field = _GOLDEN[name]
    case = golden_case(folder)
    values: Any = config(speculative_model=str(ROOT / folder / "head"))
    given = [p.get("ids") or p["input_ids"] for p in case.expected["prompts"]]
    prompts = [*given, given[0][2:7], given[1][4:17], given[1][:1]]
    bench = build_context(case.target)
    return Case(bench, values, field, prompts, texts_of(bench, prompts))


_GOLDEN: dict[str, tuple[str, Any, str]] = {
    "medusa": ("medusa/case_a", MedusaConfig, "medusa_choices"),
    "eagle": ("eagle/eagle1", EagleConfig, "eagle_choices"),
}


def random_tree(rng: random.Random, max_depth: int, max_nodes: int = 40) -> ChoiceTree:
    """A tree of random size and form; low ranks are likelier, as they are right more often."""
    paths: set[Path] = set()
    open_paths: list[Path] = [()]
    goal = rng.randint(1, max_nodes)
    reach = rng.choice([2, 4, 10])
    while len(paths) < goal:
        parent = rng.choice(open_paths[-8:] if rng.random() < 0.5 else open_paths)
        path = (*parent, min(rng.randrange(reach), rng.randrange(reach)))
        if len(path) <= max_depth and path not in paths:
            paths.add(path)
            open_paths.append(path)
        elif rng.random() < 0.02:
            break
    return ChoiceTree(tuple(sorted(paths or {(0,)}, key=lambda p: (len(p), p))))
