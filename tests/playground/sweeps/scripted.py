"""Sweeps over a method whose speed is a formula, so that what a sweep should find is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import Limits
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.method import MethodConfig
from engine.model.sources import TargetSpec
from playground.experiments.finished import FinishedRequest, Pair
from playground.experiments.plan import Item
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.run import RunningTrial
from playground.experiments.sweep.space import parse_vary
from playground.experiments.sweep.store import SweepStore
from storage import RunLog

PLAIN_TOK_S = 10.0
NUM_PROMPTS = 4
Speed = Callable[[Any], float]
"""tok/s of the method at a point."""


def plan(*vary: str, base: MethodConfig | None = None, **changes: Any) -> SweepPlan:
    """A sweep over n-gram lookup."""
    varied = [parse_vary(text) for text in vary or ("max_draft_len=1:8",)]
    made: dict[str, Any] = {
        "target": TargetSpec(name="tiny", path="/nowhere"),
        "dtype": "float32",
        "method": "ngram",
        "title": "N-gram",
        "base": NGramConfig() if base is None else base,
        "varied": varied,
        "objective": "speedup",
        "mode": "search",
        "trials": 5,
        "prune": False,
        "seed": 0,
        "items": [Item("s", str(i), "chat", "chat", ("x",)) for i in range(NUM_PROMPTS)],
        "suite": "s",
        "limits": Limits(max_new_tokens=21),
    }
    return SweepPlan.parse({**made, **changes})


def peak_at_5(config: Any) -> float:
    """Fastest with five draft tokens; the lookup plays no part."""
    return 20.0 / (1 + abs(config.max_draft_len - 5) / 5)


def answer(
    tok_s: float, prompt: int, configuration: str, *, accepted: int = 15, text: int = 7
) -> FinishedRequest:
    """Twenty-one tokens: the first, one per step, and those accepted."""
    return FinishedRequest(
        run_id=f"{configuration}{prompt}",
        suite="s",
        category="chat",
        group="chat",
        prompt=str(prompt),
        turn=0,
        repeat=0,
        configuration=configuration,
        num_prompt_tokens=3,
        num_new_tokens=21,
        num_steps=20 - accepted,
        num_drafted=20,
        num_accepted=accepted,
        ttft_s=0.1,
        decode_s=20 / tok_s,
        itl_s=None,
        at_least=(),
        split_s=(0.0,) * 5,
        output_ids=(text, prompt),
        text="",
        finish_reason="length",
    )


def pair(tok_s: float, prompt: int = 0, *, drift: float = 1.0) -> Pair:
    """The method's answer and plain decoding's, on a machine that is `drift` times as fast."""
    plain = answer(drift * PLAIN_TOK_S, prompt, "plain", accepted=0)
    return answer(drift * tok_s, prompt, "trial"), plain


class Scripted:
    """Measures by formula; remembers what it was asked."""

    def __init__(
        self, speed: Speed = peak_at_5, *, drift: Callable[[int], float] = lambda trial: 1.0
    ) -> None:
        self.speed = speed
        self.drift = drift
        self.configs: list[Any] = []
        self.groups: list[str] = []
        self.num_answers: list[int] = []

    def __call__(self, config: MethodConfig, run_group: str, trial: RunningTrial) -> list[Pair]:
        drift = self.drift(len(self.configs))
        self.configs.append(config)
        self.groups.append(run_group)
        pairs: list[Pair] = []
        for prompt in range(NUM_PROMPTS):
            trial.say(f"prompt {prompt}")
            if trial.is_over():
                break
            # Prompts differ, as prompts do: every later one is a little faster.
            pairs.append(pair(self.speed(config) * (1 + prompt / 10), prompt, drift=drift))
            trial.report(pairs)
        self.num_answers.append(len(pairs))
        return pairs


def open_store(folder: Path) -> tuple[RunLog, SweepStore]:
    """A run log and the sweeps beside it."""
    log = RunLog.open(str(folder / "runs.sqlite3"))
    return log, SweepStore.beside(log)
