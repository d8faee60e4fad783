"""Finished texts: read once by the target, and looked up in without it.

A drafter that looks up learns nothing from the target but which tokens are right, and that is known
of a finished text: the steps of the real drafter there are the steps of a real greedy run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


@torch.inference_mode()
def look_up(drafter: Drafter, trace: TargetTrace) -> Iterator[tuple[int, int, int]]:
    """The steps of a drafter that looks up: which output is the root, tokens accepted, drafted.

    Raises ConfigError: a draft went on where the text is not known; read it with a longer tail.
    """
    tokens, first, output = trace.tokens.tolist(), trace.first, TargetOutput(torch.empty(0, 0))
    text, root = trace.text, 0
    limits, draws = text.limits, SeededDraws(0)
    drafter.start(Start(text.prompt_ids, tokens[first], output, Sampling(), draws, limits))
    try:
        while root < text.num_roots:
            at = first + root
            max_depth = trace.context_len - 1 - at
            proposal = drafter.propose(Budget(max_depth)).cut(max_depth)
            path = _follow(proposal, tokens[at + 1 :])
            committed = tuple(tokens[at + 1 : at + len(path) + 2])
            if len(committed) <= len(path):
                raise ConfigError(
                    f"A draft is {proposal.shape.max_depth} tokens deep, further than the text is "
                    "known beyond its end. Read the text with a longer tail."
                )
            yield root, len(path), len(proposal.shape) - 1
            drafter.observe(Outcome(proposal, output, (0, *path), committed))
            root += len(path) + 1
    finally:
        drafter.finish()


def _follow(proposal: Proposal, true_tokens: Sequence[int]) -> tuple[int, ...]:
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
