"""Where a training run stands, so that a killed one goes on as if nothing had happened.

The order of packs and the noise of a step follow from the seed and the step's number, so weights,
optimizer and step are all there is to keep.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError

_FILE = "training.pt"


@dataclass(slots=True)
class State:
    """What is saved.

    Attributes:
        step: optimizer steps done.
        run: what must be the same to go on: method, settings, corpus, target.
        log: one mapping per report so far.
        seconds: of training so far.
    """

    step: int
    run: dict[str, Any]
    student: dict[str, Any]
    optimizer: dict[str, Any]
    average: dict[str, Any]
    log: list[dict[str, Any]]
    seconds: float


def save_state(folder: Path, state: State) -> None:
    """Write it whole or not at all."""
    partial = folder / (_FILE + ".partial")
    fields = {name: getattr(state, name) for name in State.__slots__}
    with partial.open("wb") as file:
        torch.save(fields, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / _FILE)


def load_state(folder: Path, run: dict[str, Any], device: torch.device) -> State | None:
    """The state of the run in this folder; None where there is none.

    Raises:
        ConfigError: damaged, or of a run with other settings; names what differs.
    """
    file = folder / _FILE
    if not file.is_file():
        return None
    try:
        state = State(**torch.load(file, map_location=device, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, OSError) as error:
        reason = str(error).split(".")[0].splitlines()[0][:200]
        raise ConfigError(
            f"{file} could not be read: {reason}. Remove it to start anew."
        ) from error
    differing = [key for key in run if state.run.get(key) != run[key]]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"The run in {folder} was made with {key} = {state.run.get(key)!r:.200}, but now it is "
            f"{run[key]!r:.200}. Give the same, or another --output."
        )
    return state
