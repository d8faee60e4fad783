"""How near decoding on a device comes to its memory bandwidth, by CUDA graphs and without.

    python -m benchmarks.cuda_decode [--out cuda_decode.json] [--shapes 8B,1B,32B] [--seconds 420]
    python -m benchmarks.cuda_decode --smoke

Randomly initialised Llama shapes in bfloat16, made on the device: nothing is fetched, no tokenizer.
Per shape and way of running it: a step of plain decoding and one that verifies a static tree of 64
nodes, in turns; what share of the measured copy bandwidth plain decoding reaches; for 8B a step
with an EAGLE head (random weights) that fills that tree. A step is the time from one commit to the
next in the loop that the product uses. Prints medians and quartiles, writes all of it as JSON after
every part, and leaves out what no longer fits into `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import random_heads, random_llama, read_options
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import BuildContext, Drafter, Start
from engine.kernels.cuda.graphs import Capturer, CudaGraphs
from engine.kernels.cuda.runner import GraphRunner
from engine.model.loading import pick_device
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, Proposal
from engine.steps import Prefill, Step
from engine.tuning.controller import build_drafter
from engine.tuning.timing import synchronise

NODES = 64
"""Of the tree, root included."""
WAYS = ("eager", "graphs")
CapturerOf = Callable[[torch.device], Capturer]


@dataclass(frozen=True)
class Spread:
    """Milliseconds: median and quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        return f"{self.median:7.3f} ({self.low:.3f} … {self.high:.3f})"


@dataclass
class Row:
    """One shape, run in one way.

    Attributes:
        share: of the measured copy bandwidth that plain decoding reaches.
        tree_ratio: a step with the fixed tree over a plain one.
        eagle_ratio: a step that also drafts that tree by EAGLE, over a plain one.
        waits: times that the host waits for the device per step, by method.
        error: root mean square difference of the tree's logits from the eager ones, over their
            spread; agreement: share of its rows with the same argmax.
        beside_bytes: most memory in use beside weights and cache.
    """

    shape: str
    way: str
    forward: str
    plain_ms: Spread
    tree_ms: Spread
    share: float
    tree_ratio: float
    eagle_ms: Spread | None = None
    eagle_ratio: float | None = None
    eagle_split_ms: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    agreement: float | None = None
    weight_bytes: int = 0
    cache_bytes: int = 0
    graph_bytes: int = 0
    beside_bytes: int | None = None


class FixedTree(Drafter):
    """Proposes one and the same tree, so that a step is its verification."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        self._shape = random_llama.likely_tree(nodes - 1).shape
        self._rest = torch.arange(1, nodes, device=device)
        self._root = 0

    def start(self, start: Start) -> None:
        self._root = start.root

    def propose(self, budget: Budget) -> Proposal:
        root = self._rest.new_full((1,), self._root)
        return Proposal(torch.cat([root, self._rest]), self._shape)

    def observe(self, outcome: Outcome) -> None:
        self._root = outcome.next_root


class Bench:
    """Measures on one device."""

    def __init__(
        self, device: torch.device, options: argparse.Namespace, capturer: CapturerOf
    ) -> None:
        self.device, self.capturer = device, capturer
        self.captures = device.type == "cuda" or capturer is not CudaGraphs
        self.tokens, self.rounds = options.tokens, options.rounds
        self.context = options.context
        self.bandwidth = Spread.of(list(self._copies(64 << 20 if options.smoke else 2 << 30)))

    def _copies(self, size: int) -> Iterator[float]:
        """Bytes per second of copies on the device, read and written bytes both counted."""
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        for turn in range(24):
            synchronise(self.device)
            began = time.perf_counter()
            for _ in range(4):
                target.copy_(source)
            synchronise(self.device)
            if turn >= 4:
                yield 4 * 2 * size / (time.perf_counter() - began)

    def steps(self, target: Target, drafter: Drafter) -> list[Step]:
        """One text; its steps without the first few, which capture and warm up."""
        prompt = [i % target.vocab_size for i in range(7, 7 + self.context)]
        limits = Limits(max_new_tokens=self.tokens, ignore_eos=True)
        records = list(decode(target, drafter, prompt, limits=limits))
        assert isinstance(records[0], Prefill)
        return [record for record in records if isinstance(record, Step)][4:]

    def latencies(self, target: Target, drafters: dict[str, Drafter]) -> dict[str, list[float]]:
        """Milliseconds from commit to commit; the drafters take turns."""
        found: dict[str, list[float]] = {name: [] for name in drafters}
        for turn in range(self.rounds + 1):
            for name, drafter in drafters.items():
                at = [step.at_s for step in self.steps(target, drafter)]
                if turn:
                    found[name] += [1000 * (b - a) for a, b in zip(at, at[1:], strict=False)]
        return found

    def waits(self, target: Target, drafter: Drafter) -> float | None:
        """How often the host waits for the device in a step."""
        if self.device.type != "cuda":
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                num_steps = len(self.steps(target, drafter)) + 4
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waited = sum("synchronizing" in str(w.message) for w in caught)
        return waited / num_steps

    @torch.inference_mode()
    def tree_logits(self, target: Target) -> torch.Tensor:
        """`(NODES, vocab)` float32 of a tree behind a fixed text."""
        cache = target.new_cache(self.context + NODES)
        try:
            ids = [(31 * i + 5) % target.vocab_size for i in range(self.context)]
            target.prefill(ids, cache, Needs())
            tokens = torch.arange(3, 3 + NODES, device=self.device)
            proposal = Proposal(tokens, random_llama.likely_tree(NODES - 1).shape)
            return target.verify(proposal, cache, Needs()).logits.float()
        finally:
            cache.free()


def main(arguments: list[str] | None = None, capturer: CapturerOf = CudaGraphs) -> list[Row]:
    """Measure, print and write.

    Args:
        capturer: makes what captures graphs on a device.
    """
    options = _options(arguments)
    device = pick_device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    until = time.monotonic() + options.seconds
    bench = Bench(device, options, capturer)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    print(f"{name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}")
    print(f"copy bandwidth {bench.bandwidth.median / 1e12:.3f} TB/s, context {bench.context}")
    rows: list[Row] = []

    def done(row: Row) -> None:
        rows.append(row)
        _print(row)
        _write(options.out, name, bench, rows)

    for shape in options.shapes:
        if time.monotonic() > until:
            print(f"{shape}: left out, no time")
            continue
        model = random_llama.make(shape, device, dtype)
        _measure(shape, model, bench, lambda: time.monotonic() < until, done)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written to {options.out}")
    return rows


def _options(arguments: list[str] | None) -> argparse.Namespace:
    smoke = {"shapes": "tiny", "context": 64, "tokens": 24, "rounds": 1, "out": os.devnull}
    options = read_options(
        __doc__,
        arguments=arguments,
        smoke=smoke,
        device="auto",
        shapes="8B,1B,32B",
        context=512,
        tokens=96,
        rounds=3,
        seconds=420.0,
        out="cuda_decode.json",
    )
    options.shapes, options.out = options.shapes.split(","), Path(options.out)
    return options


def _measure(
    shape: str,
    model: PreTrainedModel,
    bench: Bench,
    has_time: Callable[[], bool],
    done: Callable[[Row], None],
) -> None:
    """Both ways of running one model."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    read = random_llama.read_bytes(model, bench.context + bench.tokens // 2)
    expected = None
    with tempfile.TemporaryDirectory() as temp:
        for way in WAYS:
            if way == "graphs" and not bench.captures:
                print(f"{shape} {way}: left out, no CUDA device")
                continue
            if not has_time():
                print(f"{shape} {way}: left out, no time")
                continue
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(bench.device)
            target = _target(model, way, bench)
            logits = bench.tree_logits(target)
            expected = logits if expected is None else expected
            row = _row(shape, way, target, bench, read, Path(temp))
            row.error = float((logits - expected).pow(2).mean().sqrt() / expected.std())
            row.agreement = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
            row.weight_bytes = weights
            if bench.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(bench.device)
                row.beside_bytes = peak - weights - row.cache_bytes
            done(row)
            del target
            gc.collect()


def _target(model: PreTrainedModel, way: str, bench: Bench) -> Target:
    """The model, run in one way."""
    forward = None if way == "eager" else GraphRunner(model, bench.capturer(bench.device))
    return Target(model, None, name="random", forward=forward)


def _row(shape: str, way: str, target: Target, bench: Bench, read: int, folder: Path) -> Row:
    plain = build_drafter(parse_method({"decoding_type": "Autoregressive"}), _bench(target))
    drafters: dict[str, Drafter] = {"plain": plain, "tree": FixedTree(NODES, bench.device)}
    if shape in ("8B", "tiny"):
        drafters["eagle"] = _eagle(target, folder)
    found = bench.latencies(target, drafters)
    spreads = {name: Spread.of(values) for name, values in found.items()}
    plain_ms, tree_ms, eagle_ms = (spreads.get(name) for name in ("plain", "tree", "eagle"))
    assert plain_ms is not None and tree_ms is not None
    environment = target.environment()
    row = Row(
        shape=shape,
        way=way,
        forward=str(environment["forward"]),
        plain_ms=plain_ms,
        tree_ms=tree_ms,
        share=read / (plain_ms.median / 1000) / bench.bandwidth.median,
        tree_ratio=tree_ms.median / plain_ms.median,
        eagle_ms=eagle_ms,
        eagle_ratio=None if eagle_ms is None else eagle_ms.median / plain_ms.median,
        cache_bytes=int(environment.get("static_cache_bytes", 0)),
        graph_bytes=int(environment.get("graph_bytes", 0)),
    )
    if "eagle" in drafters:
        row.eagle_split_ms = _split(bench.steps(target, drafters["eagle"]))
    for name, drafter in drafters.items():
        waits = bench.waits(target, drafter)
        if waits is not None:
            row.waits[name] = waits
        drafter.close()
    return row


def _bench(target: Target) -> BuildContext:
    def nothing(name: Any) -> Any:
        raise AssertionError(f"{name} is not needed here")

    return BuildContext(target, nothing, nothing)


def _eagle(target: Target, folder: Path) -> Drafter:
    """An EAGLE head with random weights that fills the same tree."""
    head = folder / "eagle"
    if not head.exists():
        random_heads.eagle(target, head)
    tree = random_llama.likely_tree(NODES - 1)
    config = {"decoding_type": "Eagle", "speculative_model": str(head)}
    return build_drafter(parse_method({**config, "eagle_choices": tree.as_lists()}), _bench(target))


def _split(steps: list[Step]) -> dict[str, float]:
    """Median milliseconds of a step's phases, on the device's clock where it has one."""
    names = ("draft_s", "verify_s", "accept_s", "other_s")
    return {
        name.replace("_s", "_ms"): 1000 * statistics.median(getattr(step, name) for step in steps)
        for name in names
    }


def _print(row: Row) -> None:
    print(f"\n{row.shape}, {row.way} ({row.forward})")
    print(f"  plain step   {row.plain_ms} ms   {100 * row.share:.1f} % of the copy bandwidth")
    print(f"  tree of {NODES}   {row.tree_ms} ms   {row.tree_ratio:.3f} × plain")
    if row.eagle_ms is not None:
        split = ", ".join(f"{name} {ms:.2f}" for name, ms in row.eagle_split_ms.items())
        print(f"  EAGLE step   {row.eagle_ms} ms   {row.eagle_ratio:.3f} × plain   {split}")
    waits = ", ".join(f"{name} {count:.2f}" for name, count in row.waits.items())
    print(
        f"  logits differ by {row.error:.2e}, same argmax {100 * (row.agreement or 0):.1f} %",
        end="",
    )
    print(f"; waits per step: {waits}" if waits else "")
    beside = (
        "" if row.beside_bytes is None else f", peak beside both {row.beside_bytes / 2**20:.0f}"
    )
    print(
        f"  MiB: weights {row.weight_bytes / 2**20:.0f}, cache {row.cache_bytes / 2**20:.0f}, "
        f"graphs {row.graph_bytes / 2**20:.0f}{beside}",
        flush=True,
    )


def _write(path: Path, device: str, bench: Bench, rows: list[Row]) -> None:
    values = {
        "device": device,
        "torch": torch.__version__,
        "copy_bytes_per_s": asdict(bench.bandwidth),
        "context": bench.context,
        "nodes": NODES,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
