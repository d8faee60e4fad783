"""What a log keeps of the runs of processes that were killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from playground.experiments.statistics import finished_requests
from storage import RunDetail, RunLog, RunQuery, Status
from tests.playground.serving import TOKEN
from tests.playground.test_http import held

MOST_RUNS = 500


def streamed(log: RunLog, run: RunDetail) -> str:
    """The text that its steps have."""
    rows = log.steps(run.id)
    return run.first_text + "".join(text for row in rows for text in row.committed_texts)


def check_run(log: RunLog, run: RunDetail, shown: str, whole: str | None = None) -> None:
    """A killed run has all that was shown, and is marked as interrupted unless it is whole.

    Args:
        whole: the text of a run that nobody killed, if that is known.
    """
    kept = run.text or streamed(log, run)
    assert kept.startswith(shown), "tokens were shown and are not in the log"
    assert run.status == "interrupted" or (run.status == "completed" and run.text == whole)
    assert whole is None or whole.startswith(kept)


def check_marks(db: Path) -> None:
    """Of what is not going on any more, no experiment and no run is marked as running."""
    with RunLog.open(str(db)) as log:
        experiments = (*log.benchmarks.list(), *log.benchmarks.list(sweeps=True))
        assert "running" not in {one.status for one in experiments}
        runs = log.find(RunQuery(limit=MOST_RUNS)).rows
        assert {run.status for run in runs} <= {"completed", "interrupted"}


def ids_of(db: Path, status: Status) -> list[str]:
    """The runs of this status, in a log that need not be there yet."""
    if not db.exists():
        return []
    with RunLog.open(str(db)) as log:
        return list(log.ids(RunQuery(status=status)))


def answers(log: RunLog, benchmark_id: str, trial: str = "") -> dict[Any, tuple[int, ...]]:
    """Every finished request of an experiment, and its tokens."""
    found = finished_requests(log, benchmark_id, trial=trial)
    return {request.key: request.output_ids for request in found}


def slow(*, delay_ms: int) -> dict[str, Any]:
    """A long run of the page with a pause in every step."""
    limits = {"limits": {"max_new_tokens": "400", "ignore_eos": True}}
    form = {"values": {"method": {"delay_ms": str(delay_ms)}}}
    return {"form": form, "run_form": {"values": limits}}


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
        for batch in json.loads(message["batches"]).values():
            status = batch["status"]
            self.log_id = status["log_id"] or self.log_id
            self.state, self.error = status["state"], status["error"]
            for number, pieces, *_ in batch.get("events", ()):
                self._pieces[number] = "".join(pieces)

    @property
    def shown(self) -> str:
        return "".join(self._pieces[number] for number in sorted(self._pieces))
