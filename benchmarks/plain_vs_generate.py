"""Plain decoding through our loop against `transformers.generate`, and NGram against plain.

    python -m benchmarks.plain_vs_generate [--dtype float32] [--rounds 7] [--tokens 96] [--compiled]

One process, same weights and threads; the contestants take turns within each round, so drift of the
machine hits all alike. Prints medians, spread, and the ratio round by round. `generate` runs a copy
of the model under transformers' own modules and attention, in the target's dtype (in bfloat16 for
q4, which transformers does not have); `--compiled` adds its static-cache mode under torch.compile,
which takes minutes to warm up on a processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

import presets
from benchmarks import TARGET, ratios, read_options, spread
from benchmarks.models import build_context, load, transformers_model
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.metrics import measure
from engine.model.target import Target

Contestant = tuple[PreTrainedModel, dict[str, Any]]
"""A model of transformers and settings of its `generate`."""


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"rounds": 1, "tokens": 8, "dtype": "float32"},
        target=TARGET,
        dtype="auto",
        rounds=7,
        tokens=96,
        compiled=False,
    )
    target = load(options.target, options.dtype)
    prompts = {p.category: p for p in presets.suites()["starter"].prompts if not p.raw}
    chat, summary = prompts["chat"].turns[0], prompts["summarisation"].turns[0]
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    bench = build_context(target)
    plain = parse_method({"decoding_type": "Autoregressive"}).build(bench)
    # A pool of each run's own: it must not remember the answer from the round before.
    ngram = presets.methods()["ngram"].config.replace(is_public_pool=False).build(bench)
    reference = transformers_model(target)
    peers: dict[str, Contestant] = {"generate": (reference, {})}
    if options.compiled:
        everywhere = CompileConfig()
        vars(everywhere)["_compile_all_devices"] = True
        static = {"cache_implementation": "static", "compile_config": everywhere}
        peers["generate, compiled"] = (reference, static)
    print(f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens")
    parts: tuple[tuple[str, str, dict[str, Drafter | Contestant]], ...] = (
        ("chat", chat, {"ours": plain, **peers}),
        ("summarise this text", summary, {"NGram": ngram, "plain": plain, **peers}),
    )
    for title, prompt, contestants in parts:
        ids = target.encode_chat([{"role": "user", "content": prompt}])
        runs = {
            name: _timer(target, contestant, ids, limits)
            for name, contestant in contestants.items()
        }
        _compare(title, runs, options.rounds)


def _timer(
    target: Target, contestant: Drafter | Contestant, ids: list[int], limits: Limits
) -> Callable[[], float]:
    """A function that generates once and returns tok/s without prefill."""
    if isinstance(contestant, Drafter):

        def ours() -> float:
            metrics = measure(decode(target, contestant, ids, limits=limits))
            assert metrics.tok_s is not None
            return metrics.tok_s

        return ours
    prompt = torch.tensor([ids], device=target.device)
    model: Any = contestant[0]
    settings = contestant[1]

    def generate() -> float:
        times: list[float] = []
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=limits.max_new_tokens,
            min_new_tokens=limits.max_new_tokens,
            streamer=_Clock(times),
            **settings,
        )
        return (len(times) - 2) / (times[-1] - times[1])

    return generate


class _Clock:
    """A streamer that notes when each token arrives (the first call is the prompt)."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, value: object) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        return None


def _compare(title: str, runs: dict[str, Callable[[], float]], rounds: int) -> None:
    for run in runs.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            rates[name].append(run())
    print(f"\n{title} ({rounds} rounds, interleaved)")
    for name, values in rates.items():
        print(f"  {name:18} {spread(values, 1)} tok/s")
    first, *others = rates
    for other in others:
        print(f"  {first} / {other}: {ratios(rates[first], rates[other])}")


if __name__ == "__main__":
    main()
