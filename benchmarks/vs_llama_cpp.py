"""Methods here against llama.cpp's plain decoding of the same GGUF file.

    pip install llama-cpp-python        # builds llama.cpp; minutes
    python -m benchmarks.vs_llama_cpp [--methods plain,suffix-smollm2-135m] [--dtype auto]

llama.cpp runs in a process of its own (two pools of threads in one process would wait for each
other), of any interpreter that has it: `--python PATH`. Contestants take turns prompt by prompt,
same prompts (six kinds of task of the suite `tasks`), same number of threads, greedy. tok/s are
of decoding, first token to last, without the prompt. Prints totals and ratios per round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import torch

import presets
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import BuildContext
from engine.metrics import Tally
from engine.model.loading import load_target
from engine.tuning.adaptive import build_drafter
from playground.host import paths

PEER = """
import json, sys, time
from llama_cpp import Llama
options = json.loads(sys.stdin.readline())
model = Llama(options["file"], n_ctx=2048, n_threads=options["threads"],
              n_threads_batch=options["threads"], verbose=False)
for line in sys.stdin:
    ids, count = json.loads(line)
    model.reset()
    times = []
    for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        times.append(time.perf_counter())
        if len(times) == count:
            break
    print(json.dumps([count - 1, times[-1] - times[0]]), flush=True)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="plain,suffix-smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--python", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--per-category", type=int, default=1)
    options = parser.parse_args()
    target = load_target(
        presets.resolve("smollm2-135m-instruct"), dtype=options.dtype, cache_dir=paths.cache_dir()
    )
    file = next(Path(paths.cache_dir()).rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    bench = BuildContext(target, presets.resolve, lambda spec: target, locate=presets.locate)
    names = options.methods.split(",")
    drafters = {name: build_drafter(presets.methods()[name].config, bench) for name in names}
    kinds: dict[str, list[list[int]]] = {}
    for prompt in presets.suites()["tasks"].prompts:
        ids = target.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        kinds.setdefault(prompt.category, []).append(ids)
    prompts = [ids for of_kind in kinds.values() for ids in of_kind[: options.per_category]]
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in ("llama.cpp", *drafters)}
    with subprocess.Popen(
        [options.python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        _tell(peer.stdin, {"file": str(file), "threads": torch.get_num_threads()})
        for turn in range(options.rounds + 1):
            done = dict.fromkeys(rates, 0)
            took = dict.fromkeys(rates, 0.0)
            for ids in prompts if turn else prompts[:1]:
                _tell(peer.stdin, [ids, options.tokens])
                count, seconds = json.loads(peer.stdout.readline())
                done["llama.cpp"] += count
                took["llama.cpp"] += seconds
                for name, drafter in drafters.items():
                    tally = Tally()
                    for record in decode(target, drafter, ids, limits=limits):
                        tally.add(record)
                    rate = tally.metrics.tok_s
                    assert rate is not None
                    done[name] += options.tokens - 1
                    took[name] += (options.tokens - 1) / rate
            if turn:
                for name, values in rates.items():
                    values.append(done[name] / took[name])
        peer.stdin.close()
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens for "
        f"each of {len(prompts)} prompts, {options.rounds} rounds, interleaved"
    )
    for name, values in rates.items():
        print(f"  {name:24} median {statistics.median(values):6.1f} tok/s")
    for name in drafters:
        ratios = [a / b for a, b in zip(rates[name], rates["llama.cpp"], strict=True)]
        print(
            f"  {name} / llama.cpp: median {statistics.median(ratios):.2f}"
            f"  (min {min(ratios):.2f}, max {max(ratios):.2f})"
        )


def _tell(peer: IO[str], message: Any) -> None:
    peer.write(json.dumps(message) + "\n")
    peer.flush()


if __name__ == "__main__":
    main()
