"""Speedup of texts decoded in lock-step: measured beside what the Tree page predicts.

    python -m benchmarks.lock_step [--batches 1,4,16] [--length 3] [--steps 24] [--rounds 3]

Really decodes several texts at once: the Medusa heads draft a chain for every text in one call, one
verify forward of the compiled kernels reads all drafts, the greedy rule accepts. Plain decoding is
the same loop without drafts; both take turns, and every text must come out the same by both. The
prediction takes MAT from the run, a step's parts from the clock of one text, and how they grow from
`engine.tuning.timing.measure_batch`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import load
from engine.drafters.base import BuildContext
from engine.drafters.heads.medusa import MedusaDrafter, MedusaHeads
from engine.metrics import Balance, StepParts
from engine.model.forward import RaggedBatch
from engine.model.target import Target
from engine.proposal import Needs
from engine.tree import ChoiceTree
from engine.tuning.latency import BatchLatency
from engine.tuning.timing import measure_batch

MAX_LEN = 512
METHOD = "medusa-smollm2-135m"


@dataclass(slots=True)
class Clock:
    """Seconds of every step's parts, and what the steps brought.

    Steps take the least time of their kind: whatever else the machine does only adds to it.
    """

    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0

    @property
    def mat(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def step_s(self) -> float:
        return min(
            sum(parts) for parts in zip(self.draft_s, self.verify_s, self.other_s, strict=True)
        )


class LockStep:
    """Texts that are decoded together; a step is one of all of them."""

    def __init__(self, target: Target, heads: MedusaHeads, prompts: Sequence[list[int]]) -> None:
        batch = target.ragged_batch(len(prompts) * MAX_LEN)
        if batch is None:
            raise SystemExit(f"{target.name} runs without the compiled kernels here: --dtype q4.")
        self._batch: RaggedBatch = batch
        self._heads = heads
        self.texts = [list(prompt) for prompt in prompts]
        self._text_starts = torch.arange(len(prompts)) * MAX_LEN
        hidden = [self._read(i, prompt[:-1]) for i, prompt in enumerate(prompts)]
        self._hidden = torch.stack(hidden)

    def _read(self, text: int, tokens: list[int]) -> Tensor:
        """The hidden state after a prompt."""
        text_starts = self._text_starts[text].repeat(len(tokens))
        positions = torch.arange(len(tokens))
        output = self._batch.read(
            torch.tensor(tokens), positions, text_starts, needs=Needs(hidden=True)
        )
        assert output.hidden is not None
        return output.hidden[-1]

    def step(self, length: int, clock: Clock) -> None:
        """Draft `length` tokens for every text, verify them in one forward, accept."""
        began, count = time.perf_counter(), len(self.texts)
        roots = torch.tensor([[text[-1]] for text in self.texts])
        drafts = roots[:, :0]
        if length:
            ids = self._heads.logits(self._hidden, length).argmax(dim=-1).T
            drafts = self._heads.lm_head.vocabulary.target_ids(ids)
        rows = torch.cat([roots, drafts], dim=1)
        drafted = time.perf_counter()
        ends = torch.tensor([[len(text) - 1] for text in self.texts])
        positions = ends + torch.arange(length + 1)
        output = self._batch.read(
            rows.flatten(),
            positions.flatten(),
            self._text_starts.repeat_interleave(length + 1),
            needs=Needs(hidden=True),
            num_logits=rows.numel(),
        )
        choices = output.logits.argmax(dim=-1).unflatten(0, (count, -1))
        verified = time.perf_counter()
        accepted = (choices[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        assert output.hidden is not None
        self._hidden = output.hidden.unflatten(0, (count, -1))[torch.arange(count), accepted]
        for text, new, num in zip(self.texts, choices.tolist(), accepted.tolist(), strict=True):
            text += new[: num + 1]
            clock.num_tokens += num + 1
        clock.num_steps += count
        clock.draft_s.append(drafted - began)
        clock.verify_s.append(verified - drafted)
        clock.other_s.append(time.perf_counter() - verified)


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"batches": "1,2", "steps": 3, "rounds": 1},
        target=TARGET,
        dtype="auto",
        batches="1,4,16",
        length=3,
        steps=24,
        rounds=3,
    )
    target = load(options.target, options.dtype)
    bench = BuildContext(target, presets.resolve, lambda _: target, locate=presets.locate)
    config = presets.methods()[METHOD].config.with_tree(ChoiceTree.chain(options.length))
    drafter = config.build(bench)
    assert isinstance(drafter, MedusaDrafter)
    batches = tuple(int(part) for part in options.batches.split(","))
    prompts = list(_prompts(target, max(batches)))
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}: {config.title}, chains of "
        f"{options.length}, {options.steps} steps, {options.rounds} rounds, interleaved"
    )
    with torch.inference_mode():
        clocks = {
            size: _decoded(target, drafter.heads, prompts[:size], options) for size in batches
        }
        batched = measure_batch(target, batches=tuple(sorted({1, *batches})))
    _print(clocks, batched, options.length)


def _prompts(target: Target, count: int) -> Iterator[list[int]]:
    """Of the shipped task suite, as many as there are texts."""
    questions = [p.turns[0] for p in presets.suites()["tasks"].prompts]
    for at in range(count):
        question = questions[at % len(questions)]
        yield target.encode_chat([{"role": "user", "content": question}])[-200:]


def _decoded(
    target: Target,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> tuple[Clock, Clock]:
    """Clocks with and without drafts; raises SystemExit where the texts differ."""
    drafting, plain = Clock(), Clock()
    for _ in range(options.rounds):
        with_drafts, without = (LockStep(target, heads, prompts) for _ in range(2))
        for _ in range(options.steps):
            with_drafts.step(options.length, drafting)
            without.step(0, plain)
        for ours, theirs in zip(with_drafts.texts, without.texts, strict=True):
            if ours[: len(theirs)] != theirs:
                raise SystemExit("The texts differ: that must not be.")
    return drafting, plain


def _print(clocks: dict[int, tuple[Clock, Clock]], batched: BatchLatency, length: int) -> None:
    one, plain_one = (
        StepParts(*map(min, (clock.draft_s, clock.verify_s, clock.other_s)))
        for clock in clocks[min(clocks)]
    )

    def grown(parts: StepParts, size: int, rows: int) -> StepParts:
        draft = parts.draft * batched.drafting(size, 1)
        return StepParts(draft, parts.verify * batched.growth(size, rows), parts.other * size)

    print(f"  {'texts':>6}{'MAT':>7}{'plain ms':>10}{'draft+verify+other ms':>24}", end="")
    print(f"{'measured':>10}{'predicted':>11}")
    for size, (own, plain) in clocks.items():
        parts_of = grown(one, size, length + 1), grown(plain_one, size, 1)
        predicted = Balance.of(own.mat, *parts_of).formula
        parts = " + ".join(f"{1000 * min(s):.1f}" for s in (own.draft_s, own.verify_s, own.other_s))
        measured = own.mat * plain.step_s / own.step_s
        print(f"  {size:6}{own.mat:7.2f}{1000 * plain.step_s:10.1f}{parts:>24}", end="")
        print(f"{measured:9.2f}×{predicted:10.2f}×")


if __name__ == "__main__":
    main()
