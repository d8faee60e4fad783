"""Finished requests made by hand, for reports over known numbers."""

from __future__ import annotations

from typing import Any

from playground.experiments.finished import FinishedRequest


def measured(configuration: str = "plain", **changes: Any) -> FinishedRequest:
    """A request of 5 prompt tokens: first token after 0.1 s, four more in 0.4 s.

    Plain decoding takes a step for each, others one step for all.
    """
    num_accepted = 0 if configuration.lower().startswith("plain") else 3
    values: dict[str, Any] = {
        "run_id": f"run-{configuration}",
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


def plan_of(*names: str, temperature: float = 0.0) -> dict[str, Any]:
    """A stored plan, as far as a report reads it."""
    configurations = [
        {"name": name, "title": name, "lossless": True, "config": {"decoding_type": "NGram"}}
        for name in names
    ]
    return {"configurations": configurations, "sampling": {"temperature": temperature}}
