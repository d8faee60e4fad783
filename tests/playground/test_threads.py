"""What threads of the playground share: nothing is lost, and two that ask for one thing get one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.model.sources import TargetSpec
from playground.experiments.worker import TaskContext, Worker, WorkerConfig


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_worker_loses_no_message_that_comes_while_it_is_looked_at(
    tiny_folder: Path, tmp_path: Path, eager_switches: None
) -> None:
    spec, worker, num_messages = TargetSpec(name="tiny", path=str(tiny_folder)), Worker(), 20_000
    worker.prepare(WorkerConfig(spec, "float32", None, "cpu", tmp_path), gpu=False)

    def task(context: TaskContext) -> None:
        for number in range(num_messages):
            context.send(number)

    thread = threading.Thread(target=worker.run_task, args=(task,))
    thread.start()
    messages: list[Any] = []
    while thread.is_alive():
        messages += worker.take_messages()
    messages += worker.take_messages()
    assert messages == list(range(num_messages)) and worker.take_messages() == []
