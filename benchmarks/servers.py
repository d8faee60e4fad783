"""Servers that benchmarks ask: this program's own, and llama-server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from benchmarks import ROOT

START_S = 60.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_server(
    folder: Path, target: str, *options: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`app.py serve` with a log of its own in a folder, and the address that it prints.

    Raises RuntimeError: it did not start.
    """
    line = [sys.executable, "app.py", "serve", "--port", str(free_port()), *options]
    line += ["--db", str(folder / "runs.sqlite3"), "--target", target]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            for printed in process.stdout or ():
                if match := re.search(r"http://\S+", printed):
                    yield process, match[0]
                    return
            raise RuntimeError("the server did not start")
        finally:
            process.terminate()


class LlamaServer:
    """A llama-server that listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=300.0)

    def ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def seconds(self, prompt_ids: Sequence[int], num_tokens: int) -> float:
        """Of decoding, as it reports them."""
        request = {
            "prompt": list(prompt_ids),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._http.post("/completion", json=request).raise_for_status().json()
        timings: dict[str, float] = answer["timings"]
        if timings["predicted_n"] < num_tokens - 1:
            raise RuntimeError(f"llama-server wrote {timings['predicted_n']} tokens")
        return timings["predicted_ms"] / 1000 / timings["predicted_n"] * (num_tokens - 1)

    def reading_seconds(self, prompt_ids: Sequence[int]) -> float:
        """Of reading a prompt, as it reports them."""
        request = {"prompt": list(prompt_ids), "n_predict": 1, "cache_prompt": False}
        answer = self._http.post("/completion", json=request).raise_for_status().json()
        seconds: float = answer["timings"]["prompt_ms"] / 1000
        return seconds


@contextmanager
def llama_server(program: Path, file: Path, options: Sequence[str]) -> Iterator[LlamaServer]:
    """Start a llama-server with these options and end it.

    Raises RuntimeError: it did not start.
    """
    threads = str(torch.get_num_threads())
    line = [str(program), "--model", str(file), "--port", str(port := free_port())]
    line += ["--ctx-size", "4096", "--parallel", "1"]
    line += ["--threads", threads, "--threads-batch", threads, *options]
    try:
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise RuntimeError(f"{program} could not be started: {error.strerror}") from error
    with process:
        try:
            server, began_s = LlamaServer(f"http://127.0.0.1:{port}"), time.monotonic()
            while not server.ready():
                if process.poll() is not None or time.monotonic() - began_s > START_S:
                    raise RuntimeError(f"{program} did not start: {' '.join(options) or 'plain'}")
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
