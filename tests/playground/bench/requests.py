"""Plans, and finished requests made by hand, for reports over known numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters import parse_method
from engine.model.sources import TargetSpec
from playground.experiments.plan import Configuration, ExperimentPlan, Item
from playground.experiments.statistics import FinishedRequest
from storage import RunLog, RunQuery, RunSummary
from tests.playground.tiny import ScriptedConfig


def runs_of(log: RunLog, benchmark_id: str) -> Sequence[RunSummary]:
    """Every run of an experiment, oldest first."""
    return log.rows(RunQuery(experiment_id=benchmark_id, descending=False, limit=1000))


def measured(configuration: str = "plain", **changes: Any) -> FinishedRequest:
    """A request of 5 prompt tokens: first token after 0.1 s, four more in 0.4 s.

    Plain decoding takes a step for each, others one step for all.
    """
    num_accepted = 0 if configuration.lower().startswith("plain") else 3
    values: dict[str, Any] = {
        "run_id": f"run-{configuration}",
        "experiment_id": "b",
        "suite": "s",
        "category": "writing",
        "group": "chat",
        "prompt": "1",
        "turn": 0,
        "repeat": 0,
        "configuration": configuration,
        "num_prompt_tokens": 5,
        "num_new_tokens": 5,
        "num_steps": 4 - num_accepted,
        "num_drafted": num_accepted,
        "num_accepted": num_accepted,
        "ttft_s": 0.1,
        "decode_s": 0.4,
        "itl_s": 0.1,
        "at_least": (),
        "split_s": (0.0, 0.4, 0.0, 0.0, 0.0),
        "output_ids": (1, 2, 3, 4, 5),
        "text": "text",
        "finish_reason": "length",
    }
    return FinishedRequest(**{**values, **changes})


def plan_of(*names: str, temperature: float = 0.0, **changes: Any) -> ExperimentPlan:
    """A plan whose first configuration is plain decoding, with parts of it changed."""
    methods = {name: "NGram" for name in names} | dict.fromkeys(names[:1], "Autoregressive")
    made: dict[str, Any] = {
        "target": TargetSpec(name="tiny", path="."),
        "dtype": "float32",
        "configurations": [
            Configuration(name, name, parse_method({"decoding_type": method}))
            for name, method in methods.items()
        ],
        "items": [Item("s", str(n), "writing", "chat", ("x",)) for n in range(1, 9)],
        "sampling": Sampling(temperature=temperature),
    }
    return ExperimentPlan.parse({**made, **changes})


def item(name: str, *turns: str, group: str = "chat") -> Item:
    return Item("s", name, group, group, turns or (f"Prompt {name}.",))


def scripted(name: str = "scripted", **settings: Any) -> Configuration:
    return Configuration(name, "Scripted", ScriptedConfig(**settings))


def tiny_plan(
    *configurations: Configuration, items: tuple[Item, ...] = (), repeats: int = 1
) -> ExperimentPlan:
    """Two prompts, one of two turns, of eight tokens each."""
    return plan_of(
        configurations=configurations or (scripted(),),
        items=items or (item("a"), item("b", "One?", "Two?", group="maths")),
        repeats=repeats,
        limits=Limits(max_new_tokens=8, ignore_eos=True),
    )
