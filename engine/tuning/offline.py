"""Drafts along finished texts, without running the target for every step.

What a drafter learns from the target is known of a finished text: which of its tokens are right,
and the features along the true path. So the target reads the text once, and then the real drafter
is fed these: its steps are the steps of a real greedy run (in float32).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Sampling
from engine.drafters.base import Drafter, Start
from engine.drafters.texts import TargetTrace, Text
from engine.errors import ConfigError, PromptError
from engine.model.target import Target
from engine.proposal import Budget, Needs, Outcome, Proposal, TargetOutput, joined
from engine.sampling import SeededDraws

_CHUNK = 1024
"""Rows of a text that go through the target at a time."""


def with_steps(texts: Iterable[Text]) -> list[Text]:
    """The texts that have a step.

    Raises ConfigError: none has.
    """
    usable = [text for text in texts if text.num_roots]
    if not usable:
        raise ConfigError("No text has two new tokens or more. Choose longer runs.")
    return usable


@torch.inference_mode()
def read(target: Target, text: Text, needs: Needs, *, tail: int) -> TargetTrace:
    """One forward over the whole text, and `tail` greedy tokens more (fewer at the context's end).

    Raises PromptError: longer than the target's context, empty, or of another vocabulary.
    """
    ids = [*text.prompt_ids, *text.output_ids]
    _check(target, text, ids)
    cache = target.new_cache(len(ids) + tail)
    features: list[list[Tensor | None]] = []
    try:
        for chunk in torch.tensor(ids).split(_CHUNK):
            output = target.prefill(chunk, cache, needs)
            parts = (output.hidden, output.layers)
            features.append([None if part is None else part.cpu() for part in parts])
        for _ in range(tail):
            ids.append(int(output.logits[-1].argmax()))
            if cache.length >= target.context_len:
                break
            output = target.prefill(ids[-1:], cache, Needs())
    finally:
        cache.free()
    hidden, layers = (joined(parts) for parts in zip(*features, strict=True))
    return TargetTrace(text, torch.tensor(ids), target.context_len, hidden, layers)


def _check(target: Target, text: Text, ids: list[int]) -> None:
    where = f" of {text.source}" if text.source else ""
    if not text.prompt_ids or not text.output_ids:
        raise PromptError(f"The text{where} must have a prompt and an output. Choose another run.")
    if len(ids) > target.context_len:
        raise PromptError(
            f"The text{where} has {len(ids)} tokens, but {target.name}'s context holds "
            f"{target.context_len}. Choose runs of this target."
        )
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < target.vocab_size:
        raise PromptError(
            f"The text{where} has token {worst}, but {target.name} has {target.vocab_size} tokens. "
            "Choose runs of this target."
        )


@dataclass(frozen=True, slots=True, eq=False)
class OfflineStep:
    """One step made offline.

    Attributes:
        root: which output of the text is the root.
        path: accepted nodes in path order, root excluded.
    """

    root: int
    proposal: Proposal
    path: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Draft tokens accepted and proposed."""
        return len(self.path), len(self.proposal.shape) - 1


@torch.inference_mode()
def run_offline(
    drafter: Drafter, trace: TargetTrace, device: torch.device
) -> Iterator[OfflineStep]:
    """The steps that the drafter makes on this text.

    Raises ConfigError: a draft went on where the text is not known; read it with a longer tail.
    """
    tokens, first = trace.tokens.tolist(), trace.first
    prompt_ids, limits = trace.text.prompt_ids, trace.text.limits
    output = _output(trace, 0, range(1, first), device)
    drafter.start(Start(prompt_ids, tokens[first], output, Sampling(), SeededDraws(0), limits))
    try:
        root = 0
        while root < trace.text.num_roots:
            at = first + root
            max_depth = trace.context_len - 1 - at
            proposal = drafter.propose(Budget(max_depth)).cut(max_depth)
            path = follow(proposal, tokens[at + 1 :])
            committed = tuple(tokens[at + 1 : at + len(path) + 2])
            if len(committed) <= len(path):
                raise ConfigError(
                    f"A draft is {proposal.shape.max_depth} tokens deep, further than the text is "
                    "known beyond its end. Read the text with a longer tail."
                )
            yield OfflineStep(root, proposal, path)
            output = _output(trace, at, path, device)
            drafter.observe(Outcome(proposal, output, (0, *path), committed))
            root += len(path) + 1
    finally:
        drafter.finish()


def follow(proposal: Proposal, true_tokens: Sequence[int]) -> tuple[int, ...]:
    """The accepted path: from the root, the child that carries the next true token."""
    tokens = proposal.tokens.tolist()
    at, path = 0, list[int]()
    for token in true_tokens:
        match = [c for c in proposal.shape.children[at] if tokens[c] == token]
        if not match:
            break
        at = match[0]
        path.append(at)
    return tuple(path)


def _output(trace: TargetTrace, at: int, path: Sequence[int], device: torch.device) -> TargetOutput:
    """Features of the text from `at` on where a forward has the root and the path; no others."""
    nodes = [0, *path]

    def spread(features: Tensor | None) -> Tensor | None:
        if features is None:
            return None
        rows_on_path = features[at : at + len(nodes)].to(device)
        rows = rows_on_path.new_zeros(max(nodes) + 1, rows_on_path.shape[1])
        rows[nodes[: len(rows_on_path)]] = rows_on_path
        return rows

    none = torch.empty(0, 0, device=device)
    return TargetOutput(none, spread(trace.hidden), spread(trace.layers))
