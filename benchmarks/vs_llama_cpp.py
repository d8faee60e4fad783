"""Methods here against llama-server on the same GGUF file, with each of its ways to speculate.

    python -m benchmarks.vs_llama_cpp LLAMA_SERVER [--draft DRAFT.gguf] [--methods plain,…]
                                        [--ways ngram-simple,…] [--reading TOKENS]

LLAMA_SERVER is the program as its project builds it (`cmake --build … --target llama-server`); it
reads `--gguf`, the embedded model's file by default. DRAFT.gguf is a shipped draft model, converted
by its `convert_hf_to_gguf.py`. Each of its ways to speculate runs in a server of its own (none with
`--ways ''`); a way that this build does not know is left out. All contestants take turns prompt by
prompt: same prompts, same number of threads, greedy, exactly so many tokens. tok/s are of decoding,
first token to last, without the prompt; llama-server's are those that it reports.
Prints medians of the rounds' tok/s, and ratios; with `--reading`, also of reading a prompt of so
many tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack

import presets
from benchmarks import TARGET, ratios, read_options
from benchmarks.models import drafter_of, embedded_file, first_turns, load
from benchmarks.servers import LlamaServer, llama_server
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.metrics import measure
from engine.model.target import Target
from engine.proposal import Needs
from playground.experiments.prompts import read_suite_file

PEER = "llama.cpp"
PLAIN = f"{PEER} none"
SPEC_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Its kinds of speculation that need no weights."""
DRAFT_TYPE = "draft-simple"
WARM_UP_TOKENS = 32


def seconds_here(target: Target, drafter: Drafter, ids: list[int], num_tokens: int) -> float:
    """Of decoding, first token to last."""
    limits = Limits(max_new_tokens=num_tokens, ignore_eos=True)
    rate = measure(decode(target, drafter, ids, limits=limits)).tok_s
    assert rate is not None
    return (num_tokens - 1) / rate


def reading_seconds_here(target: Target, ids: list[int]) -> float:
    """Of reading a prompt, to its first token."""
    cache = target.new_cache(len(ids))
    began = time.perf_counter()
    target.prefill(ids, cache, Needs()).logits.argmax().item()
    seconds = time.perf_counter() - began
    cache.free()
    return seconds


def servers_of(options: argparse.Namespace, stack: ExitStack) -> dict[str, LlamaServer]:
    """A server for each way that this build of llama-server knows."""
    if options.server is None:
        print("No llama-server is given: the table is of the methods here.")
        return {}
    ways: dict[str, list[str]]
    kinds = filter(None, options.ways.split(","))
    ways = {PLAIN: []} | {f"{PEER} {way}": ["--spec-type", way] for way in kinds}
    if options.draft:
        draft = ["--spec-type", DRAFT_TYPE, "--model-draft", str(options.draft)]
        ways[f"{PEER} {DRAFT_TYPE}"] = draft
    file, servers = options.gguf or embedded_file(), dict[str, LlamaServer]()
    for name, settings in ways.items():
        try:
            servers[name] = stack.enter_context(llama_server(options.server, file, settings))
        except RuntimeError as error:
            print(f"{name} is left out: {error}.")
    return servers


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        programs=("server",),
        smoke={"rounds": 1, "tokens": 8, "methods": "plain,ngram"},
        target=TARGET,
        gguf=None,
        draft=None,
        methods="plain,suffix-smollm2-135m",
        ways=",".join(SPEC_TYPES),
        dtype="auto",
        prompts=None,
        rounds=3,
        tokens=96,
        per_category=1,
        reading=0,
    )
    target = load(options.target, options.dtype)
    suite = read_suite_file(options.prompts) if options.prompts else presets.suites()["tasks"]
    prompts = first_turns(target, suite, options.per_category)[: 1 if options.smoke else None]
    drafters = {name: drafter_of(target, name) for name in options.methods.split(",")}
    rates: dict[str, list[float]] = {}
    read: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = servers_of(options, stack)
        for server in servers.values():
            server.seconds(prompts[0], WARM_UP_TOKENS)
        for drafter in drafters.values():
            seconds_here(target, drafter, prompts[0], WARM_UP_TOKENS)
        for _ in range(options.rounds):
            elapsed = dict.fromkeys([*servers, *drafters], 0.0)
            for ids in prompts:
                for name, server in servers.items():
                    elapsed[name] += server.seconds(ids, options.tokens)
                for name, drafter in drafters.items():
                    elapsed[name] += seconds_here(target, drafter, ids, options.tokens)
            for name, seconds in elapsed.items():
                rates.setdefault(name, []).append(len(prompts) * (options.tokens - 1) / seconds)
            if options.reading and PLAIN in servers:
                ids = (prompts[0] * options.reading)[: options.reading]
                times = reading_seconds_here(target, ids), servers[PLAIN].reading_seconds(ids)
                for name, seconds in zip(("here", PEER), times, strict=True):
                    read.setdefault(name, []).append(len(ids) / seconds)
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens for "
        f"each of {len(prompts)} prompts, {options.rounds} rounds, interleaved"
    )
    show(rates)
    if read:
        middle = [statistics.median(read[name]) for name in ("here", PEER)]
        print(
            f"  a prompt of {options.reading} tokens: {middle[0]:.0f} and {middle[1]:.0f} tok/s, "
            f"{ratios(read['here'], read[PEER])} × {PEER}"
        )


def show(rates: Mapping[str, list[float]]) -> None:
    """tok/s of everyone; ratios to llama.cpp's plain decoding and to its best way to speculate.

    Without llama.cpp: ratios to the first method.
    """
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ways = [name for name in rates if name.startswith(PEER) and name != PLAIN]
    others = [
        name for name in (PLAIN, max(ways, key=middle.__getitem__, default="")) if name in rates
    ]
    for name, values in rates.items():
        line = f"  {name:28} {middle[name]:6.1f} tok/s"
        for other in others or [next(iter(rates))]:
            line += f"   {ratios(values, rates[other])} × {other}"
        print(line)


if __name__ == "__main__":
    main()
