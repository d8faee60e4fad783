"""What hours of mixed use leave behind: memory, threads, open files; how long pages take meanwhile.

    python -m benchmarks.soak [--seconds 600] [--clients 8] [--target NAME] [--seed 0]

Starts the program as a person does, with a log of its own, and lets that many clients use it over
HTTP: they open the page, ask panels for runs, generate (one at a time on the engine), leave in the
middle, stop. The first minute, or tenth, warms up; then memory, threads and open files of the
server are taken, and again at the end. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import TARGET, read_options
from benchmarks.servers import own_server

API = "/gradio_api"
METHODS = ("plain", "ngram", "suffix")
PROMPTS = ("Tell me about tea.", "Count to twenty.", "def fib(n):", "Name three rivers.")
WARM_UP = 0.1
MOST_STREAM_S = 300.0


def main() -> None:
    """Use and print."""
    smoke = {"seconds": 5.0, "clients": 2}
    options = read_options(__doc__, smoke=smoke, seconds=600.0, clients=8, target=TARGET, seed=0)
    with (
        tempfile.TemporaryDirectory() as folder,
        own_server(Path(folder), options.target) as (server, url),
    ):
        try:
            _use(url, server.pid, options)
        finally:
            began = time.monotonic()
            server.send_signal(signal.SIGINT)
            server.wait()
    print(f"Ctrl+C ended it in {time.monotonic() - began:.1f} s")


@dataclass
class ClientStats:
    """What the clients saw, from several threads."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    states: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: list[str] = field(default_factory=list)


def _use(url: str, pid: int, options: argparse.Namespace) -> None:
    stats, until = ClientStats(), time.monotonic() + options.seconds
    clients = [
        threading.Thread(target=_Client(url, options, number, stats).work, args=(until,))
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    time.sleep(min(60.0, WARM_UP * options.seconds))
    first = _state(pid)
    for client in clients:
        client.join()
    time.sleep(2.0)  # what was left in the middle ends
    last = _state(pid)
    states = ", ".join(f"{count} {state}" for state, count in sorted(stats.states.items()))
    print(f"{options.clients} clients, {options.seconds:.0f} s; runs: {states}")
    for name in first:
        print(f"  {name:14} {first[name]:8.0f} after warming up {last[name]:8.0f} at the end")
    for name, seconds in sorted(stats.seconds.items()):
        milliseconds = sorted(1000 * one for one in seconds)
        late = milliseconds[int(0.99 * (len(milliseconds) - 1))]
        print(
            f"  {name:14} {len(seconds):6} times, median {statistics.median(milliseconds):7.1f} ms"
            f", p99 {late:7.1f} ms, most {milliseconds[-1]:7.1f} ms"
        )
    print(f"  errors: {len(stats.errors)}{''.join(f'{chr(10)}    {e}' for e in stats.errors[:5])}")


def _state(pid: int) -> Mapping[str, float]:
    """Of the server now."""
    process = Path(f"/proc/{pid}")
    lines = (process / "status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {
        "memory MiB": int(values["VmRSS"].split()[0]) / 1024,
        "threads": int(values["Threads"]),
        "open files": len(list((process / "fd").iterdir())),
    }


class _Client:
    """One browser tab's worth of use."""

    def __init__(
        self, url: str, options: argparse.Namespace, number: int, stats: ClientStats
    ) -> None:
        address, _, token = url.partition("/?token=")
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=address, headers=headers, timeout=600)
        self._draw = random.Random(1000 * options.seed + number)
        self._target, self._tab, self._stats = options.target, f"client{number}", stats
        self._page = 0
        self._runs: list[str] = []
        config = self._http.get("/config").json()
        self._panel = next(
            component["id"]
            for component in config["components"]
            if component["props"].get("elem_id") == "pg-panel"
        )

    def work(self, until: float) -> None:
        """Do one thing after the other, with pauses, as people do."""
        actions: tuple[Callable[[], None], ...]
        actions = (self._open, self._open, self._look, self._look, self._stop, self._generate)
        with closing(self._http):
            while time.monotonic() < until:
                try:
                    self._draw.choice(actions)()
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    self._stats.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(self._draw.uniform(0.0, 1.0))

    def _timed(self, name: str, ask: Callable[[], httpx.Response]) -> Any:
        began = time.perf_counter()
        answer = ask()
        self._stats.seconds[name].append(time.perf_counter() - began)
        answer.raise_for_status()
        return answer

    def _session(self) -> str:
        """Of a page opened anew: Gradio gives what is sent to a session to any of its streams."""
        self._page += 1
        return f"{self._tab}-{self._page}"

    def _open(self) -> None:
        path = self._draw.choice(("/", "/config", f"{API}/info"))
        self._timed(path.removeprefix(API), lambda: self._http.get(path))

    def _look(self) -> None:
        """Read a run, as a panel does that was reloaded."""
        question = {"run": self._draw.choice(self._runs or ["none"]), "have": 0}
        body = {"data": question, "component_id": self._panel, "fn_name": "since"}
        body["session_hash"] = self._session()
        self._timed("read a run", lambda: self._http.post(f"{API}/component_server", json=body))

    def _stop(self) -> None:
        body = {"data": [self._tab, None], "session_hash": self._session()}
        self._timed("stop", lambda: self._http.post(f"{API}/call/stop", json=body))

    def _generate(self) -> None:
        """A short run; now and then the tab is closed in the middle."""
        leaves = self._draw.random() < 0.2
        request = {"data": self._form(), "session_hash": self._session()}
        post = self._timed(
            "ask for a run", lambda: self._http.post(f"{API}/call/run", json=request)
        )
        event = post.json()["event_id"]
        began = time.monotonic()
        with self._http.stream("GET", f"{API}/call/run/{event}") as answer:
            for line in answer.iter_lines():
                if time.monotonic() - began > MOST_STREAM_S:
                    raise ValueError(f"a run's stream had no end after {MOST_STREAM_S} s")
                update = json.loads(line[6:]) if line.startswith("data: [") else None
                if not update:
                    continue
                batches = json.loads(update[0]["batches"]).values()
                for status in (batch["status"] for batch in batches):
                    if status["state"] in ("completed", "cancelled", "failed"):
                        self._stats.states[status["state"]] += 1
                        self._runs = [*self._runs[-20:], status["log_id"] or "none"]
                if leaves and any(batch.get("events") for batch in batches):
                    self._stats.states["left"] += 1
                    return

    def _form(self) -> list[Any]:
        """What the Generate page's components hold."""
        limits = {"max_new_tokens": str(self._draw.choice((8, 24, 48))), "ignore_eos": True}
        form: dict[str, Any] = {"groups": [], "values": {}}
        held = {"values": {"limits": limits}}
        method, prompt = self._draw.choice(METHODS), self._draw.choice(PROMPTS)
        request = [self._target, "auto", method, "chat", "", prompt, form, held]
        return [*request, None, self._tab]


if __name__ == "__main__":
    main()
