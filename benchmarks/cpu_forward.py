"""What one forward over n rows costs: plain modules, packed weights, compiled kernels, codes.

    python -m benchmarks.cpu_forward [--context 256] [--rounds 15] [--rows 1,8,16,32,64] [--codes]
        [--avx2]

With `--codes` also in a GGUF file's own quantization, with `--avx2` also as a processor without
AVX-512 runs it. One process, same weights and threads; the contestants take turns within each
round. Prints the median of each with its quartiles, and the median of the ratios round by round.
"""

from __future__ import annotations

import copy
import statistics
import time
from unittest.mock import patch

import torch

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import load
from engine.kernels.cpu import compile as compiling
from engine.model.forward import prepare_attention
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"dtypes": "bfloat16", "context": 32, "rows": "1,4", "rounds": 2},
        target=TARGET,
        dtypes="float32,bfloat16",
        codes=False,
        avx2=False,
        context=256,
        rows="1,2,4,8,12,16,24,32,48,64",
        rounds=15,
    )
    targets: dict[str, Target] = {}
    for dtype in options.dtypes.split(","):
        packed = _load(options.target, dtype, native=False)
        targets[f"{dtype} modules"] = _modules(packed)
        targets[f"{dtype} packed"] = packed
        native = _load(options.target, dtype)
        if native.kernels is not None:
            targets[f"{dtype} native"] = native
    if options.codes:
        targets["codes"] = _load(options.target, "auto")
    if options.avx2:
        targets["codes, AVX2"] = _without_avx512(options.target)
    ours = next(reversed(targets.values()))
    print(f"{ours.name} on {ours.device_name}, {options.context} tokens of context")
    for name, target in targets.items():
        print(f"  {name}: {target.environment()['forward']}")
    _curve(targets, options.context, [int(n) for n in options.rows.split(",")], options.rounds)


def _load(name: str, dtype: str, *, native: bool = True) -> Target:
    spec = presets.resolve(name).model_copy(update={"native_kernels": native})
    return load(spec, dtype, "cpu")


def _without_avx512(name: str) -> Target:
    """A GGUF target as stored as a processor runs it that has AVX2 and nothing newer."""
    compiling.library.cache_clear()
    with patch.object(compiling, "cpu_flags", return_value=compiling.REQUIRED):
        target = _load(name, "auto")
    compiling.library.cache_clear()
    return target


def _modules(target: Target) -> Target:
    """A copy of the target with plain weights."""
    model = copy.deepcopy(target.model)
    prepare_attention(model)
    return Target(model, target.tokenizer, name=target.name)


def _curve(targets: dict[str, Target], context: int, rows: list[int], rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab = next(iter(targets.values())).vocab_size
    prompt = torch.randint(0, vocab, (context,), generator=generator)
    caches = {name: target.new_cache(context + 128) for name, target in targets.items()}
    for name, target in targets.items():
        target.prefill(prompt, caches[name], Needs())
    for n in rows:
        tokens = torch.randint(0, vocab, (n,), generator=generator)
        tree = Proposal(tokens, TreeShape([-1, *((i - 1) // 2 for i in range(1, n))]))
        times: dict[str, list[float]] = {name: [] for name in targets}
        for turn in range(rounds + 2):
            for name, target in targets.items():
                begin = time.perf_counter()
                target.verify(tree, caches[name], Needs())
                if turn >= 2:
                    times[name].append(1000 * (time.perf_counter() - begin))
        _print(n, times)


def _print(n: int, times: dict[str, list[float]]) -> None:
    print(f"n = {n}")
    first = next(iter(times))
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratios = [a / b for a, b in zip(times[first], values, strict=True)]
        print(
            f"  {name:18} {middle:7.2f} ms  ({low:.2f} … {high:.2f})"
            f"  {first} / this {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
