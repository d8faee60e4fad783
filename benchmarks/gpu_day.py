"""Everything that is to be known of a GPU, in one command: under nine minutes on one H100.

    python -m benchmarks.gpu_day --out FILE.json [--device cuda] [--shapes embedded,1B,8B]
    python -m benchmarks.gpu_day --smoke [--device pretend]

Nothing is fetched: `embedded` is left out where its file is not in the cache, `1B` and `8B` are
Llama shapes with random weights in bfloat16, made on the device. Prints the tables of
PERFORMANCE.md: per model, one operator at a time and by CUDA graphs, a plain step and its share of
the measured copy bandwidth, forwards of 1 to 64 rows, memory; every method against plain decoding,
whether its text is the same, its speed, and how often a step waits; the GPU tests.
FILE.json holds the same, FILE.trace.json one step for chrome://tracing, FILE.tests.txt what the
tests print. What fails is a line, and what no longer fits into `--seconds` is left out. `pretend`
is the device of the tests.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import presets
from benchmarks import ROOT, TARGET, random_heads, random_llama, read_options
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import BuildContext, Drafter
from engine.kernels.cuda.graphs import CudaGraphs
from engine.kernels.cuda.norms import fuse_norms
from engine.kernels.cuda.runner import GraphRunner, unsupported_reason
from engine.metrics import first_divergence, measure
from engine.model.audit import audit
from engine.model.clock import now, seconds, synchronize
from engine.model.loading import load_target
from engine.model.plan import pick_device
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.steps import End
from engine.tree import TreeShape
from playground.host import paths

ROWS = (1, 2, 4, 8, 16, 32, 64)
METHODS: dict[str, dict[str, Any]] = {
    "Autoregressive": {},
    "NGram": {},
    "Suffix": {"use_tree_spec": True},
    "Lookahead": {},
    "Token_Recycling": {},
    "Draft_Target": {"speculative_model": "itself"},
    "Medusa": {},
    "ReDrafter": {},
    "Eagle": {},
    "Eagle3": {"eagle3_layers_to_capture": [0, 1, 2]},
}
"""Heads have random weights: what they cost is real, what is accepted is not."""


@dataclass
class Report:
    """Lines as they are printed, and figures by name."""

    out: Path
    until_s: float
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        self.out.write_text(json.dumps({"lines": self.lines, **self.figures}, indent=1) + "\n")

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Whatever fails inside is a line: a day with a GPU must not end at the first fault."""
        try:
            if time.monotonic() > self.until_s:
                raise TimeoutError("no time left")
            measure()
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            words = str(error).strip().partition("\n")[0] or type(error).__name__
            self.say(f"{name}: failed: {words} ({Path(at.filename).name}:{at.lineno})")


@dataclass(frozen=True)
class TextRun:
    """One text: its tokens, tokens per second after the first, and waits per step."""

    token_ids: tuple[int, ...]
    tok_s: float
    mat: float
    waits: float | None


class GpuBenchmark:
    """Measures on one device."""

    def __init__(self, device: torch.device, options: argparse.Namespace, report: Report) -> None:
        self.device, self.report = device, report
        self.context, self.tokens, self.rounds = options.context, options.tokens, options.rounds
        self.bytes_s = 0.0

    def measure_copies(self, size: int) -> None:
        """Bytes per second of copies on the device, read and written bytes both counted."""
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target, speeds = torch.empty_like(source), []
        for _ in range(12):
            synchronize(self.device)
            began = time.perf_counter()
            for _ in range(4):
                target.copy_(source)
            synchronize(self.device)
            speeds.append(4 * 2 * size / (time.perf_counter() - began))
        self.bytes_s = statistics.median(speeds[2:])
        self.report.figures["copy_bytes_per_s"] = self.bytes_s
        self.report.say(f"copy bandwidth: {self.bytes_s / 1e12:.3f} TB/s")

    # ---- forwards

    def forwards(self, name: str, target: Target, backend: str) -> torch.Tensor:
        """Steps of 1 to 64 rows behind a text; returns the logits of the widest."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        spent = {rows: self._forward_ms(target, rows) for rows in ROWS}
        read = random_llama.read_bytes(target.model, self.context)
        share = read / (spent[1] / 1000) / self.bytes_s
        table = "".join(f"{ms:9.2f}" for ms in spent.values())
        self.report.say(f"{name:10}{backend:8}{table}  ms, 1 row at {share:.1%} of the bandwidth")
        figures = {"ms": spent, "share": share, "memory_bytes": self._memory(target)}
        self.report.figures.setdefault(name, {})[backend] = figures
        memory = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in self._memory(target))
        self.report.say(f"{'':18}MiB: {memory}")
        return self._logits(target, 64)

    def _memory(self, target: Target) -> list[tuple[str, int]]:
        if self.device.type != "cuda":  # packed matrices are no parameters
            return []
        weights = target.model.get_memory_footprint()
        return [("weights", weights), ("peak", torch.cuda.max_memory_allocated(self.device))]

    def _forward_ms(self, target: Target, rows: int) -> float:
        spans = []
        with self._verifying(target, rows) as verify:
            for _ in range(4 + 4 * self.rounds):
                began = now(self.device)
                verify()
                spans.append((began, now(self.device)))
            return 1000 * statistics.median([seconds(span) for span in spans[4:]])

    def _logits(self, target: Target, rows: int) -> torch.Tensor:
        with self._verifying(target, rows) as verify:
            return verify().float().cpu()

    @contextmanager
    def _verifying(self, target: Target, rows: int) -> Iterator[Callable[[], torch.Tensor]]:
        cache = target.new_cache(self.context + 64)
        tokens = torch.arange(3, 3 + rows, device=self.device)
        shape = TreeShape.chain(0) if rows == 1 else random_llama.likely_tree(rows - 1).shape
        try:
            prompt = [(31 * i + 5) % target.vocab_size for i in range(self.context)]
            target.prefill(prompt, cache, Needs())
            yield lambda: target.verify(Proposal(tokens, shape), cache, Needs()).logits
        finally:
            cache.free()

    # ---- methods

    def methods(self, name: str, target: Target, draft: Target) -> None:
        """Every method against plain decoding on one text; `draft`: the draft model."""
        with tempfile.TemporaryDirectory() as folder:
            heads = random_heads.make_all(target, Path(folder))
            texts: list[TextRun] = []
            for kind, settings in METHODS.items():
                head = {"speculative_model": str(heads[kind])} if kind in heads else {}
                values = {"decoding_type": kind, "drafting": "as set", **settings, **head}
                method = functools.partial(self._method, name, target, draft, values, texts)
                self.report.attempt(f"{name} {kind}", method)

    def _method(
        self,
        name: str,
        target: Target,
        draft: Target,
        values: dict[str, Any],
        texts: list[TextRun],
    ) -> None:
        """A line about one method; adds its text to `texts`, the first of which is plain."""
        drafter = parse_method(values).build(_context(target, draft))
        self._text(target, drafter)  # captures and warms up
        text = self._text(target, drafter, counts=True)
        texts.append(text)
        same = self._compare(target, texts[0], text)
        waits = "" if text.waits is None else f", {text.waits:.2f} waits a step"
        self.report.say(
            f"{name:10}{values['decoding_type']:16}{text.tok_s:9.1f} tok/s  "
            f"{text.tok_s / texts[0].tok_s:5.2f}×  MAT {text.mat:.2f}  {same}{waits}"
        )

    def _compare(self, target: Target, plain: TextRun, text: TextRun) -> str:
        """Whether a text is plain decoding's, up to the first near-tie that rounding decides."""
        found = audit(target, self._prompt(target), plain.token_ids, text.token_ids)
        if found is None:
            return "same text"
        at = first_divergence(plain.token_ids, text.token_ids)
        return f"{'near tie' if found.view.near_tie else 'OTHER TEXT'} at token {at}"

    def _prompt(self, target: Target) -> list[int]:
        return [i % target.vocab_size for i in range(7, 7 + self.context)]

    def _text(self, target: Target, drafter: Drafter, *, counts: bool = False) -> TextRun:
        prompt = self._prompt(target)
        limits = Limits(max_new_tokens=self.tokens, ignore_eos=True)
        with ExitStack() as stack:
            num_waits = stack.enter_context(_waits(self.device)) if counts else lambda: None
            records = list(decode(target, drafter, prompt, limits=limits))
        waits, figures, end = num_waits(), measure(records), records[-1]
        assert isinstance(end, End) and figures.tok_s is not None and figures.mat is not None
        waits_per_step = None if waits is None else waits / figures.num_steps
        return TextRun(end.output_ids, figures.tok_s, figures.mat, waits_per_step)

    # ---- a step's profile

    def profile(self, name: str, target: Target) -> None:
        """Kernels and gaps of one plain step, and its trace in a file."""
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with self._verifying(target, 1) as verify:
            for _ in range(4):
                verify()
            synchronize(self.device)
            with profile(activities=activities) as prof:
                verify().argmax(dim=-1).tolist()
                synchronize(self.device)
        trace, whereto = self.report.out.with_suffix(".trace.json"), ""
        if self.report.out != Path(os.devnull):
            prof.export_chrome_trace(str(trace))
            whereto = f"; trace in {trace}"
        kernels = sorted(
            (event.time_range.start, event.time_range.end)
            for event in prof.events() or ()
            if str(event.device_type) != "DeviceType.CPU"
        )
        busy = sum(end - begin for begin, end in kernels)
        whole = kernels[-1][1] - kernels[0][0] if kernels else 0
        operators = sum(event.count for event in prof.key_averages())
        self.report.say(
            f"{name:10}one step: {operators} operators, {len(kernels)} kernels, "
            f"{busy / 1000:.2f} ms busy of {whole / 1000:.2f} ms{whereto}"
        )


def _context(target: Target, draft: Target) -> BuildContext:
    from engine.model.sources import TargetSpec

    def resolve(name: str) -> TargetSpec:
        here = name == "itself"
        return TargetSpec(name=name, hub="a/b") if here else TargetSpec.of_path_or_hub(name)

    return BuildContext(target, resolve, lambda spec, **_: draft)


@contextmanager
def _waits(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Counts the host's waits for the device inside."""
    if device.type == "cpu":
        yield lambda: None
        return
    from tests.engine.device.runs import logged

    with logged(device) as log:
        yield lambda: len(log.waits)


def run_tests(report: Report) -> None:
    """The tests that are marked gpu, in processes of their own; their output beside the report."""
    options = "-q -p no:benchmark -n 4 --gpu --slow -m gpu tests/engine".split()
    line, wide = [sys.executable, "-m", "pytest", *options], {**os.environ, "COLUMNS": "200"}
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240, env=wide)
    report.out.with_suffix(".tests.txt").write_text(ran.stdout + ran.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", ran.stdout, re.MULTILINE)
    summary = (ran.stdout.strip().splitlines() or ["no output"])[-1]
    for words in (f"GPU tests: {summary}", *failed):
        report.say(words)


def model_of(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model on the device; LookupError where its weights are not here."""
    if shape != "embedded":
        return random_llama.make(shape, device, dtype)
    os.environ["PIP_NO_INDEX"] = os.environ["HF_HUB_OFFLINE"] = "1"
    spec, name = presets.resolve(TARGET), str(dtype).removeprefix("torch.")
    where = "cpu" if device.type == "pretend" else str(device)
    return load_target(spec, dtype=name, device=where, cache_dir=paths.cache_dir()).model.to(device)


def _capturer(device: torch.device) -> CudaGraphs:
    if device.type != "pretend":
        return CudaGraphs(device)
    from tests.engine.cuda.tape import Tape

    return Tape()


def _by_graphs(model: Any, name: str, device: torch.device) -> Target:
    return Target(model, None, name=name, forward=GraphRunner(model, _capturer(device)))


def _measure(shape: str, benchmark: GpuBenchmark) -> None:
    """One model, one operator at a time and by graphs."""
    device, report = benchmark.device, benchmark.report
    model = model_of(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    targets = [Target(model, None, name=shape)]
    logits = benchmark.forwards(shape, targets[0], "eager")

    def measure_graphs() -> None:
        reason = "there is no device" if device.type == "cpu" else unsupported_reason(model)
        if reason is not None:
            report.say(f"{shape:10}graphs  left out: {reason}")
            return
        fuse_norms(model)
        by_graphs = _by_graphs(model, shape, device)
        off = benchmark.forwards(shape, by_graphs, "graphs") - logits
        verdict, share = by_graphs.environment()["cuda_graphs"], float(off.std() / logits.std())
        report.say(f"{'':18}graphs {verdict}, logits off by {share:.1e} of their spread")
        targets[:] = by_graphs, _by_graphs(model, shape, device)

    report.attempt(f"{shape} graphs", measure_graphs)
    target, draft = targets[0], targets[-1]
    report.attempt(f"{shape} profile", lambda: benchmark.profile(shape, target))
    benchmark.methods(shape, target, draft)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    smoke = {"shapes": "tiny", "context": 24, "tokens": 12, "rounds": 1, "out": Path(os.devnull)}
    return read_options(
        __doc__,
        arguments=arguments,
        smoke=smoke,
        device="auto",
        shapes="embedded,1B,8B",
        context=512,
        tokens=96,
        rounds=5,
        seconds=520.0,
        out=Path("gpu_day.json"),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = _options(arguments)
    report = Report(options.out, time.monotonic() + options.seconds)
    with ExitStack() as stack:
        if options.device == "pretend":
            from tests.engine.device.pretend import pretend_device

            device = stack.enter_context(pretend_device())
        else:
            device = pick_device(options.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        report.say(f"{name}, torch {torch.__version__}, context {options.context}")
        benchmark = GpuBenchmark(device, options, report)
        size = 8 << 20 if options.smoke else 2 << 30
        report.attempt("copies", lambda: benchmark.measure_copies(size))
        report.say("model     way     " + "".join(f"{rows:9}" for rows in ROWS) + "  rows")
        for shape in options.shapes.split(","):
            report.attempt(shape, functools.partial(_measure, shape, benchmark))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if device.type == "cuda":
            report.attempt("GPU tests", lambda: run_tests(report))
    report.say(f"done; written to {options.out}")


if __name__ == "__main__":
    main()
