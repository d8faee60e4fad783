"""How long a person waits: imports, the first page, the model; and memory over what must be held.

    python -m benchmarks.startup [--rounds 5]

Each figure is taken in fresh processes, as a person starts them, with compiled kernels and the
tokenizers of GGUF files in the cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from benchmarks import ROOT, TARGET, read_options, spread
from benchmarks.servers import free_port

WAIT_S = 120.0
LOAD = """
import json, sys, time
began = time.perf_counter()
import presets
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import BuildContext
from engine.metrics import measure
from engine.model.loading import load_target
from playground.host import paths
import transformers
transformers.PreTrainedModel
imported = time.perf_counter()

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

before = resident("VmRSS")
target = load_target(presets.resolve(sys.argv[1]), cache_dir=paths.cache_dir())
loaded = time.perf_counter()
weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
drafter = parse_method({"decoding_type": "Autoregressive"}).build(BuildContext(target, None, None))
limits = Limits(max_new_tokens=int(sys.argv[2]), ignore_eos=True)
records = list(decode(target, drafter, [1, 2, 3, 4], limits=limits))
print(json.dumps({
    "import": imported - began, "load": loaded - imported, "dtype": target.dtype_name,
    "forward": target.environment()["forward"], "before": before, "held": resident("VmRSS"),
    "peak": resident("VmHWM"), "parameters": weights, "token_ms": 1000 / measure(records).tok_s,
}))
"""


def main() -> None:
    """Measure and print."""
    options = read_options(__doc__, smoke={"rounds": 1}, target=TARGET, rounds=5)
    gradio = [_imports("gradio") for _ in range(options.rounds)]
    app = [_imports("playground.cli.main") for _ in range(options.rounds)]
    pages = [_first_page(options.target) for _ in range(options.rounds)]
    loads = [load(options.target, 128) for _ in range(options.rounds)]
    _print("import gradio", gradio)
    _print("import the command line", app)
    _print("python app.py to the first page", pages)
    _print("import the engine", [one["import"] for one in loads])
    _print(
        f"load the model ({loads[0]['dtype']}, {loads[0]['forward']})", [o["load"] for o in loads]
    )
    mib = {key: loads[0][key] / 2**20 for key in ("parameters", "before", "held", "peak")}
    print(
        f"memory after 128 tokens: {mib['held'] - mib['before']:.0f} MiB more than before loading, "
        f"at most {mib['peak'] - mib['before']:.0f} MiB while loading; plain parameters still held "
        f"{mib['parameters']:.0f} MiB"
    )


def _print(title: str, seconds: list[float]) -> None:
    print(f"{title:48} {spread(seconds)} s")


def _imports(module: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, cwd=ROOT)
    return time.perf_counter() - began


def load(target: str, tokens: int) -> dict[str, Any]:
    """What a fresh process that loads a model and writes some tokens tells of itself."""
    line = [sys.executable, "-c", LOAD, target, str(tokens)]
    done = subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _first_page(target: str) -> float:
    """From the command to the first answer of the server."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "app.py", "serve", "--port", str(port)]
        command += ["--db", f"{folder}/runs.sqlite3", "--no-token", "--target", target]
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                while time.perf_counter() - began < WAIT_S:
                    try:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S):
                            return time.perf_counter() - began
                    except OSError:
                        time.sleep(0.02)
            finally:
                server.terminate()
    raise TimeoutError(f"no page within {WAIT_S:.0f} s")


if __name__ == "__main__":
    main()
