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
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

import presets
from benchmarks import TARGET, read_options, spread
from benchmarks.models import embedded_file
from benchmarks.servers import llama_server, own_server
from playground.experiments.prompts import read_suite_file

FIGURES = ("time_to_first_token", "inter_token_latency", "output_token_throughput")
CORES = os.sched_getaffinity(0)


def aiperf_figures(
    aiperf: Path, url: str, model: str, questions: Path, count: int, tokens: int
) -> dict[str, float]:
    """AIPerf's mean of every figure over these questions."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"""
            profile --model {model} --url {url} --endpoint-type chat --streaming --concurrency 1
            --tokenizer {presets.FOLDER / "drafters" / "draft-smollm2-135m"}
            --input-file {questions} --custom-dataset-type single_turn --request-count {count}
            --warmup-request-count 2 --extra-inputs temperature:0
            --extra-inputs max_tokens:{tokens} --extra-inputs ignore_eos:true
            --extra-inputs cache_prompt:false --use-server-token-count --ui none --workers-max 1
            --record-processors 1 --no-gpu-telemetry --no-server-metrics
            --output-artifact-dir {folder}"""
        apart = partial(os.sched_setaffinity, 0, CORES - os.sched_getaffinity(0) or CORES)
        command = [str(aiperf), *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=apart)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        results = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    return {name: results[name]["avg"] for name in FIGURES}


def bench_figures(options: argparse.Namespace, questions: Path) -> dict[str, dict[str, float]]:
    """The same figures as `bench` writes them of every method over these questions."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"""
            app.py bench --target {options.target} --suite {questions}
            --methods {options.methods} --no-save --max-new-tokens {options.tokens}
            --ignore-eos --output {folder}"""
        subprocess.run([sys.executable, *line.split()], capture_output=True, check=True)
        results = {
            file.parent.name: json.loads(file.read_text())
            for file in Path(folder).glob("genai-perf/*/*.json")
        }
    return {
        f"bench, {who}": {name: figures[name]["avg"] for name in FIGURES}
        for who, figures in results.items()
    }


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        programs=("server", "aiperf"),
        smoke={"rounds": 1, "tokens": 4, "methods": "plain,ngram"},
        target=TARGET,
        methods="plain,suffix-smollm2-135m",
        prompts=None,
        rounds=2,
        tokens=96,
        apart=False,
    )
    if options.apart:
        os.sched_setaffinity(0, {min(CORES)})
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    suite = read_suite_file(options.prompts) if options.prompts else presets.suites()["tasks"]
    first = {prompt.category: prompt.turns[0] for prompt in reversed(suite.prompts)}
    if options.smoke:
        first = dict([*first.items()][:1])
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        questions = Path(name) / "questions.jsonl"
        questions.write_text("\n".join(json.dumps({"text": text}) for text in first.values()))
        contestants = clients(options, questions, len(first), stack)
        for _ in range(options.rounds):
            results = {who: measure() for who, measure in contestants.items()}
            for who, one in (results | bench_figures(options, questions)).items():
                figures.setdefault(who, []).append(one)
    print(
        f"{len(first)} requests of {options.tokens} tokens, {options.rounds} rounds, one at a time"
    )
    for who, rounds in figures.items():
        line = f"  {who:28}"
        for name, unit in zip(FIGURES, ("TTFT {} ms", "ITL {} ms", "{} tok/s"), strict=True):
            line += f"   {unit.format(spread([one[name] for one in rounds], 1)):26}"
        print(line.rstrip())


def clients(
    options: argparse.Namespace, questions: Path, count: int, stack: ExitStack
) -> dict[str, Callable[[], dict[str, float]]]:
    """What AIPerf measures of both servers, by contestant."""
    if options.server is None or options.aiperf is None:
        print("No llama-server and AIPerf are given: the table is of `bench`.")
        return {}
    by_aiperf = partial(
        aiperf_figures, options.aiperf, questions=questions, count=count, tokens=options.tokens
    )
    peer = stack.enter_context(llama_server(options.server, embedded_file(), ()))
    own = own_server(questions.parent, options.target, "--no-token")
    url = stack.enter_context(own)[1].rstrip("/")
    methods = {
        f"here, {method}": partial(by_aiperf, url, f"{options.target}:{method}")
        for method in options.methods.split(",")
    }
    return {"llama-server, plain": partial(by_aiperf, peer.url, TARGET), **methods}


if __name__ == "__main__":
    main()
