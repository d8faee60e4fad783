"""Every benchmark runs whole, in seconds and offline, and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLES: dict[str, tuple[str, ...]] = {
    "chat_turns": ("cold TTFT", "\nplain ", "\nngram ", "same"),
    "cpu_forward": ("n = 1\n", "bfloat16 packed", "n = 4\n"),
    "gpu_day": ("copy bandwidth", "tiny      eager", "one step: ", "Eagle3 ", "same text"),
    "block_verification": ("token   block", "\n         0.7", "\n         1.0"),
    "dtype_quality": ("perplexity", "\nfloat32 ", "\nbfloat16 "),
    "endpoints": ("bench, plain", "bench, ngram", "tok/s"),
    "hybrid": ("lfm2", "roll-back", "chain of 4", "14 nodes"),
    "large_gguf": ("GB in the file", "at most held", "ms per token"),
    "never_slower": ("rounds; plain", "ngram", "predicted"),
    "methods_vs_transformers": ("plain / generate:", "NGram / plain:", "Draft_Target / assistant:"),
    "runs_page": ("median ms", "\nfirst page ", "\ngroups: prompt_id "),
    "soak": ("memory MiB", "open files", "errors: 0"),
    "startup": ("python app.py to the first page", "load the model"),
    "streaming_cost": ("bare loop", "4 panels and run log", "cost: "),
    "structured": ("accepted", "\nplain ", "\nsuffix "),
    "sweep_on_ray": ("settings", "max_draft_len 2", "of 2 agree"),
    "time_split": ("verify", "\nAutoregressive ", "\nMedusa "),
    "tree_prediction": ("published tree", "measured / predicted"),
    "vs_llama_cpp": ("No llama-server is given", "  plain ", "  ngram ", "× plain"),
}
"""What is in each one's table."""
LLAMA_SERVER = """#!{python}
import http.server, json, sys

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given.get("--spec-type", "ngram-simple") != "ngram-simple":
    sys.exit("error: unknown value for --spec-type")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        count = json.loads(self.rfile.read(int(self.headers["content-length"])))["n_predict"]
        self.answer({{"timings": {{"predicted_n": count, "predicted_ms": 10.0 * count}}}})

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""
"""Listens as llama-server does, in a build that knows one way to speculate."""


def _table(name: str, *arguments: str) -> str:
    """What a benchmark prints."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", *arguments]
    ran = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_benchmark_has_a_table() -> None:
    files = (ROOT / "benchmarks").glob("*.py")
    runnable = {f.stem for f in files if 'if __name__ == "__main__":' in f.read_text("utf-8")}
    assert runnable == set(TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_benchmark_prints_its_table(name: str) -> None:
    printed = _table(name)
    assert [part for part in TABLES[name] if part not in printed] == [], printed


@pytest.mark.slow
def test_llama_server_is_measured_in_the_ways_that_its_build_knows(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o700)
    printed = _table("vs_llama_cpp", str(program), "--gguf", str(tmp_path / "any.gguf"))
    assert "llama.cpp ngram-cache is left out" in printed
    assert "llama.cpp none                100.0 tok/s   1.00 (1.00 … 1.00)" in printed
    assert printed.count("× llama.cpp ngram-simple") == 4
