"""The decode loop: draft → verify → accept → commit, until the text ends.

    prefill the prompt                     commits the first root
    repeat
        proposal = drafter.propose()       a draft tree; node 0 is the root
        shown    = target.verify(proposal) one forward over the whole tree
        path     = rule(shown, proposal)   root → deepest accepted node, and one more token
        cache.commit(path)                 keep the accepted rows, drop the rest
        drafter.observe(outcome)

The loop knows token ids only; text is made from its records by whoever reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.accept import Verified
from engine.config import Limits, Sampling
from engine.drafters.base import Drafter, Start
from engine.errors import ConfigError, PromptError
from engine.kernels.cuda.settle import Settled, Settler
from engine.model.clock import PhaseClock
from engine.model.target import Target
from engine.model.text import StopStrings
from engine.proposal import Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import End, FinishReason, Prefill, Record, Step
from engine.tree import TreeShape


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Record]:
    """Generate from a prompt and yield one record per step.

    Args:
        cancelled: asked before every step; True ends the text with `cancelled`.

    Yields:
        One `Prefill`, any number of `Step`, one `End`. Closing the iterator early frees the cache.

    Raises:
        PromptError: the prompt is empty, has unknown ids or leaves no room in the context.
    """
    sampling, limits = sampling or Sampling(), limits or Limits()
    check_prompt(target, prompt_ids)
    if limits.stop and target.tokenizer is None:
        raise ConfigError(f"stop needs text, but {target.name} has no tokenizer. Leave it empty.")
    generation = _Generation(target, drafter, prompt_ids, sampling, limits)
    try:
        yield generation.prefill()
        while generation.finish_reason is None:
            if cancelled():
                generation.finish_reason = "cancelled"
                break
            yield generation.step()
        yield generation.end()
    finally:
        generation.free()


def check_prompt(target: Target, prompt_ids: Sequence[int]) -> None:
    """Refuse a prompt that the target cannot take.

    Raises:
        PromptError: naming the number that is wrong.
    """
    if not prompt_ids:
        raise PromptError("The prompt must have at least one token, got none. Write something.")
    if len(prompt_ids) >= target.context_len:
        raise PromptError(
            f"The prompt has {len(prompt_ids)} tokens, but {target.name}'s context holds "
            f"{target.context_len} tokens in all. Shorten it."
        )
    worst = max(prompt_ids) if min(prompt_ids) >= 0 else min(prompt_ids)
    if not 0 <= worst < target.vocab_size:
        raise PromptError(
            f"Prompt token ids must be in [0, {target.vocab_size - 1}], got {worst}. "
            "Was it tokenized for another model?"
        )


class _Generation:
    """State of one run: the cache, what was committed, and the clocks."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.prompt_ids = list(prompt_ids)
        self.sampling = sampling
        self.limits = limits
        self.began_s = time.perf_counter()
        self.draws = SeededDraws(sampling.seed)
        self.rule = drafter.rule(sampling)
        # Where forwards are recorded, what follows them stays on the device too.
        self.settler = None if target.recorder is None else Settler.of(self.rule)
        self.stop = StopStrings(target.tokenizer, limits.stop)
        self.eos_ids = frozenset() if limits.ignore_eos else target.eos_ids
        expected = min(limits.max_new_tokens, 2048) + len(prompt_ids) + 64
        self.cache = target.new_cache(min(expected, target.context_len + 64))
        self.clock = PhaseClock(target.device)
        self.output: list[int] = []
        self.num_steps = 0
        self.finish_reason: FinishReason | None = None
        self._start: Start | None = None

    @torch.inference_mode()
    def prefill(self) -> Prefill:
        shown = self.target.prefill(self.prompt_ids, self.cache, self.drafter.needs)
        last = Verified(self.prompt_ids[-1:], TreeShape.chain(0), shown.logits[-1:])
        root = self.rule(last, self.draws).next_token
        self._append([root])
        ttft_s = time.perf_counter() - self.began_s
        self._start = Start(self.prompt_ids, root, shown, self.sampling, self.draws, self.limits)
        return Prefill(root, len(self.prompt_ids), ttft_s)

    @torch.inference_mode()
    def step(self) -> Step:
        self.clock.begin()
        context_len = self.cache.length
        proposal = self._propose(self.target.context_len - 1 - context_len)
        self.clock.mark()
        shown = self.target.verify(proposal, self.cache, self.drafter.needs)
        self.clock.mark()
        n = len(proposal.shape)
        logits = shown.logits[:n]
        settled = None
        if self.settler is not None:
            settled = self.settler(proposal, logits, self.draws, self.cache)
        if settled is None:
            tokens = proposal.tokens.tolist()
            best = None if shown.best is None else shown.best[:n]
            verified = Verified(tokens, proposal.shape, logits, proposal.dists, best)
            accepted = self.rule(verified, self.draws)
        else:
            tokens, accepted = settled.tokens, settled.accepted
        self.clock.mark()
        rows = (0, *accepted.path)
        if settled is None:
            self.cache.commit(rows)
        else:
            self.cache.advance(len(rows))
        committed = (*(tokens[node] for node in accepted.path), accepted.next_token)
        self.drafter.observe(Outcome(proposal, shown, rows, committed))
        kept = self._append(committed)
        record = self._per_node(proposal, tokens, shown, settled)
        (draft_s, verify_s, accept_s), total_s = self.clock.phases_s()
        self.num_steps += 1
        return Step(
            index=self.num_steps - 1,
            context_len=context_len,
            accepted=accepted.path,
            bonus=accepted.next_token,
            num_committed=kept,
            num_extra_rows=proposal.num_rows - n,
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
            other_s=max(0.0, total_s - draft_s - verify_s - accept_s),
            at_s=time.perf_counter() - self.began_s,
            decision=proposal.decision,
            **record,
        )

    def _propose(self, max_depth: int) -> Proposal:
        if self._start is not None:
            self.drafter.start(self._start)
            self._start = None
        return self.drafter.propose(max_depth).cut(max_depth)

    def _append(self, committed: Sequence[int]) -> int:
        """Add committed tokens to the output up to its end; return how many were added."""
        kept, reason = self._cut(committed)
        self.output.extend(committed[:kept])
        self.finish_reason = reason
        return kept

    def _cut(self, committed: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Where the text ends within newly committed tokens: the earliest reason wins."""
        room = self.limits.max_new_tokens - len(self.output)
        space = self.target.context_len - len(self.prompt_ids) - len(self.output)
        ends: list[tuple[int, FinishReason]] = []
        for count, token in enumerate(committed, start=1):
            if token in self.eos_ids:
                ends.append((count, "eos"))
                break
        stop_at = self.stop.push(committed)
        if stop_at is not None:
            ends.append((stop_at, "stop"))
        if len(committed) >= room:
            ends.append((room, "length"))
        if len(committed) >= space:
            ends.append((space, "context"))
        return min(ends, key=lambda end: end[0]) if ends else (len(committed), None)

    @staticmethod
    def _per_node(
        proposal: Proposal, tokens: list[int], shown: TargetOutput, settled: Settled | None
    ) -> dict[str, Any]:
        """Per-node fields of the step record."""
        shape = proposal.shape
        ranks = proposal.ranks
        if ranks is None:
            ranks = [0] * len(shape)
            for siblings in shape.children:
                for rank, node in enumerate(siblings):
                    ranks[node] = rank
        draft_probs: list[float | None] = [None] * len(shape)
        if settled is not None and settled.draft_probs is not None:
            draft_probs = [None, *settled.draft_probs[1:]]
        elif proposal.draft_probs is not None:
            draft_probs = [None, *proposal.draft_probs.tolist()[1:]]
        target_probs = (
            _node_probs(shown, tokens, shape.parents) if settled is None else settled.target_probs
        )
        return {
            "tokens": tuple(tokens),
            "parents": shape.parents,
            "ranks": tuple(ranks),
            "draft_probs": tuple(draft_probs),
            "target_probs": (None, *target_probs),
        }

    def end(self) -> End:
        assert self.finish_reason is not None
        return End(tuple(self.output), self.finish_reason, self.num_steps)

    def free(self) -> None:
        """Release the cache and whatever the drafter held for this run."""
        self._start = None
        self.cache.free()
        self.drafter.finish()


def _node_probs(shown: TargetOutput, tokens: list[int], parents: Sequence[int]) -> list[float]:
    """Target's softmax probability of every drafted node's token at its parent."""
    if len(tokens) == 1:
        return []
    device = shown.logits.device
    ids = torch.tensor(tokens[1:], device=device)
    if shown.log_totals is not None:
        rows = torch.tensor(parents[1:], device=device)
        return (shown.logits[rows, ids].float() - shown.log_totals[rows]).exp().tolist()
    inner = sorted(set(parents[1:]))
    row_of = {node: row for row, node in enumerate(inner)}
    logits = shown.logits[inner].float()
    at = torch.tensor([row_of[p] for p in parents[1:]], device=device)
    return (logits[at, ids] - logits.logsumexp(dim=-1)[at]).exp().tolist()
