"""Our OpenAI endpoint beside llama-server's on the same GGUF file, both measured by AIPerf.

    python -m benchmarks.endpoints LLAMA_SERVER AIPERF [--rounds 2] [--prompts FILE] [--apart]

AIPERF is the program of a virtual environment with `aiperf`. Streaming chat, one request at a time,
greedy, first turns of each kind of task; llama-server decodes plainly, with as many threads, and
without its prompt cache. Beside ours: what `bench` writes for the same questions, without server
and client. AIPerf's timing service keeps most of a core busy while it measures: with --apart the
engines and `bench` have one core and one thread, AIPerf the other cores. Contestants take turns
round by round. Prints medians of the rounds' means, least and most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import presets
from benchmarks.vs_llama_cpp import serving
from playground.experiments.prompt_files import read_suite_file
from playground.host import paths
from tests.playground.serving import free_port

FIGURES = ("time_to_first_token", "inter_token_latency", "output_token_throughput")
TARGET = "smollm2-135m-instruct"
TOKENS = 96
CORES = os.sched_getaffinity(0)


@contextmanager
def ours(folder: Path) -> Iterator[str]:
    """The address of our server, with a log of its own."""
    port = free_port()
    line = [sys.executable, "app.py", "serve", "--port", str(port), "--db", folder / "runs.sqlite3"]
    with subprocess.Popen([*line, "--no-token"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if "For programs" in line)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def measured(aiperf: Path, url: str, model: str, questions: Path, count: int) -> dict[str, float]:
    """AIPerf's mean of every figure over these questions."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"""
            profile --model {model} --url {url} --endpoint-type chat --streaming --concurrency 1
            --tokenizer {presets.FOLDER / "drafters" / "draft-smollm2-135m"}
            --input-file {questions} --custom-dataset-type single_turn --request-count {count}
            --warmup-request-count 2 --extra-inputs temperature:0
            --extra-inputs max_tokens:{TOKENS} --extra-inputs ignore_eos:true
            --extra-inputs cache_prompt:false --use-server-token-count --ui none --workers-max 1
            --record-processors 1 --no-gpu-telemetry --no-server-metrics
            --output-artifact-dir {folder}"""
        apart = partial(os.sched_setaffinity, 0, CORES - os.sched_getaffinity(0) or CORES)
        command = [aiperf, *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=apart)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    return {name: found[name]["avg"] for name in FIGURES}


def benched(questions: Path, methods: str) -> dict[str, dict[str, float]]:
    """The same figures as `bench` writes them of every method over these questions."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"""
            app.py bench --target {TARGET} --suite {questions} --methods {methods} --no-save
            --max-new-tokens {TOKENS} --ignore-eos --output {folder}"""
        subprocess.run([sys.executable, *line.split()], capture_output=True, check=True)
        found = {
            file.parent.name: json.loads(file.read_text())
            for file in Path(folder).glob("genai-perf/*/*.json")
        }
    return {
        f"bench, {who}": {name: figures[name]["avg"] for name in FIGURES}
        for who, figures in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("server", type=Path, help="the program llama-server")
    parser.add_argument("aiperf", type=Path, help="the program aiperf")
    parser.add_argument("--methods", default="plain,suffix-smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="prompt file; default: suite `tasks`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="one core for engines, one thread")
    options = parser.parse_args()
    if options.apart:
        os.sched_setaffinity(0, {min(CORES)})
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    suite = read_suite_file(options.prompts) if options.prompts else presets.suites()["tasks"]
    first = {prompt.category: prompt.turns[0] for prompt in reversed(suite.prompts)}
    file = next(Path(paths.cache_dir()).rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        questions = Path(name) / "questions.jsonl"
        questions.write_text("\n".join(json.dumps({"text": text}) for text in first.values()))
        with serving(options.server, file, ()) as peer, ours(Path(name)) as url:
            by_aiperf = partial(measured, options.aiperf, questions=questions, count=len(first))
            contestants = {"llama-server, plain": partial(by_aiperf, peer.url, TARGET)}
            for method in options.methods.split(","):
                contestants[f"here, {method}"] = partial(by_aiperf, url, f"{TARGET}:{method}")
            for _ in range(options.rounds):
                found = {who: measure() for who, measure in contestants.items()}
                for who, one in (found | benched(questions, options.methods)).items():
                    figures.setdefault(who, []).append(one)
    print(f"{len(first)} requests of {TOKENS} tokens, {options.rounds} rounds, one at a time")
    for who, rounds in figures.items():
        told = f"  {who:28}"
        for name, unit in zip(FIGURES, ("TTFT {} ms", "ITL {} ms", "{} tok/s"), strict=True):
            values = [one[name] for one in rounds]
            spread = f"{statistics.median(values):.1f} ({min(values):.1f} … {max(values):.1f})"
            told += f"   {unit.format(spread):26}"
        print(told.rstrip())


if __name__ == "__main__":
    main()
