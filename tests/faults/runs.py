"""What a log keeps of the runs of processes that were killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from playground.experiments.finished import FinishedRequest, finished_requests
from storage import RunDetail, RunLog
from tests.faults.conftest import Tally
from tests.playground.serving import TOKEN
from tests.playground.test_http import held


@contextmanager
def opened(db: Path) -> Iterator[RunLog]:
    """The log as the next process sees it."""
    with RunLog.open(str(db)) as log:
        yield log


def streamed(log: RunLog, run: RunDetail) -> str:
    """The text that its steps have."""
    rows = log.steps(run.id)
    return run.first_text + "".join(text for row in rows for text in row.committed_texts)


def check_run(log: RunLog, run: RunDetail, whole: str, shown: str, tally: Tally) -> bool:
    """Count what is missing or wrong of a killed run; whether its text is as without the kill.

    Args:
        whole: the text of a run that nobody killed.
        shown: what was on show when it was killed.
    """
    kept = run.text or streamed(log, run)
    tally.unlogged += 0 if kept.startswith(shown) else max(1, len(shown) - len(kept))
    done = run.status == "completed" and run.text == whole
    tally.wrongly_marked += not (done or run.status == "interrupted")
    return whole.startswith(kept)


def answers(log: RunLog, benchmark_id: str) -> dict[Any, tuple[int, ...]]:
    """Every finished request of an experiment, and its tokens."""
    found: list[FinishedRequest] = finished_requests(log, benchmark_id)
    return {request.key: request.output_ids for request in found}


def follow(url: str, on_message: Callable[[dict[str, Any]], None], **changes: Any) -> None:
    """Generate by the page's own route; returns when the stream ends or breaks off."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        try:
            body = {"data": held(**changes), "session_hash": "tab"}
            begun = client.post("/gradio_api/call/run", json=body)
            if begun.status_code >= 500:  # the page is just ending
                return
            event = begun.json()["event_id"]
            with client.stream("GET", f"/gradio_api/call/run/{event}") as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: ["):
                        on_message(json.loads(line.removeprefix("data: "))[0])
        except httpx.TransportError:
            return


class Watcher:
    """What a browser tab has on show of one run."""

    def __init__(self) -> None:
        self.log_id: str | None = None
        self.state = ""
        self.error: str | None = None
        self._pieces: dict[int, str] = {}

    def take(self, message: dict[str, Any]) -> None:
        for status in message["status"].values():
            self.log_id = status["log_id"] or self.log_id
            self.state, self.error = status["state"], status["error"]
        for _, number, pieces, *_ in json.loads(message["ev"]):
            self._pieces[number] = "".join(pieces)

    @property
    def shown(self) -> str:
        return "".join(self._pieces[number] for number in sorted(self._pieces))
