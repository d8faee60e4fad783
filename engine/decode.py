"""The decode loop: draft → verify → accept → commit, until the text ends.

    prefill the prompt                       commits the first root
    repeat
        proposal = session.propose()         a draft tree; node 0 is the root
        constraint.prune(proposal)           under a grammar: without forbidden tokens, and with
                                             those that it leaves no choice about
        output   = target.verify(proposal)   one forward over the whole tree
        accepted = rule(output, proposal)    root → deepest accepted node, and one more token
        cache.commit(accepted)               keep the accepted rows, drop the rest
        log.commit(accepted)                 tokens and features of the accepted rows
        session.observe(accepted)

The loop knows token ids only; its callers decode them to text. It owns the text's log, from which
the drafter's session reads what was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch

from engine.accept import VerifiedTree
from engine.config import Limits, Sampling
from engine.constraint import build_constraint
from engine.drafters.base import Drafter, Start
from engine.errors import ConfigError, PromptError
from engine.feature_log import FeatureLog
from engine.model.clock import PhaseClock, time_s
from engine.model.reading import collection_paused
from engine.model.target import Target
from engine.model.text import StopStrings
from engine.proposal import Budget, Outcome, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Bypass, End, FinishReason, Prefill, Record, Step
from engine.tree import TreeShape

PREFILL_ROWS = 512
"""Prompt tokens per forward; after each, progress is reported and the text can be cancelled."""


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    prefilled: Callable[[int], None] = lambda num_tokens: None,
    prefix_caching: bool = False,
) -> Generator[Record, None, None]:
    """Generate from a prompt and yield one record per step.

    Args:
        cancelled: called before every step, and while a long prompt is read; True ends the text
            with `cancelled`.
        prefilled: called with the number of prompt tokens in the cache so far.
        prefix_caching: reuse the longest cached prefix of the prompt, and cache this text; not for
            measurements, whose first run would be slower than the others.

    Yields:
        One `Prefill`, any number of `Step`, one `End`; only the `End` if cancelled during the
        prompt. Closing the iterator early frees the cache.

    Raises:
        PromptError: the prompt is empty, has unknown ids or leaves no room in the context.
        ConfigError, TargetError: the grammar is not supported with this target.
    """
    sampling, limits = sampling or Sampling(), limits or Limits()
    check_prompt(target, prompt_ids)
    if limits.stop and target.tokenizer is None:
        raise ConfigError(f"stop needs text, but {target.name} has no tokenizer. Leave it empty.")
    if sampling.constrained and limits.ignore_eos:  # the grammar ends the text
        limits = limits.replace(ignore_eos=False)
    generation = _Generation(target, drafter, prompt_ids, sampling, limits, prefix_caching)
    try:
        with collection_paused():
            output = generation.read_prompt(cancelled, prefilled)
            if output is not None:
                yield generation.prefill(output)
                del output
            while generation.text.finish_reason is None:
                if cancelled():
                    generation.text.finish_reason = "cancelled"
                    break
                yield generation.step()
            yield generation.end()
        generation.keep_prefix()
    finally:
        generation.free()


def check_prompt(target: Target, prompt_ids: Sequence[int]) -> None:
    """Raises PromptError: the prompt is empty, too long, or has ids beyond the vocabulary."""
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
    """The state of one run of the loop: cache, text so far, random draws."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        prefix_caching: bool,
    ) -> None:
        self.constraint = build_constraint(target, sampling)
        self.began_s = time_s()
        self.target, self.drafter = target, drafter
        self.prompt_ids, self.sampling, self.limits = list(prompt_ids), sampling, limits
        self.draws = SeededDraws(sampling.seed)
        self.text = _OutputText(target, limits, target.context_len - len(prompt_ids))
        text_len = len(prompt_ids) + limits.max_new_tokens
        expected = min(limits.max_new_tokens, 2048) + len(prompt_ids) + 64
        self.cache = target.new_cache(min(expected, target.context_len + 64), text_len=text_len)
        self.num_steps = 0
        self.prefixes = target.prefixes if prefix_caching else None
        try:
            self.open_session()
        except BaseException:
            self.cache.free()
            raise

    @torch.inference_mode()
    def open_session(self) -> None:
        """The text's log, with what a prefix cache has of the prompt, and the drafting session."""
        prefixes, needs, num_cached = self.prefixes, self.drafter.needs, None
        restored: TargetOutput | None = None
        if prefixes is not None:
            restored = prefixes.restore(self.prompt_ids, self.cache, needs)
            num_cached = self.cache.length
        self.log = FeatureLog(
            self.prompt_ids,
            needs,
            self.target.device,
            num_cached=num_cached,
            keeps_all=prefixes is not None,
        )
        if restored is not None:
            self.log.read_prompt(restored)
        self.session = self.drafter.open(Start(self.log, self.sampling, self.draws, self.limits))
        self.rule = self.session.rule()

    @torch.inference_mode()
    def read_prompt(
        self, cancelled: Callable[[], bool], prefilled: Callable[[int], None]
    ) -> TargetOutput | None:
        """Fill the cache with the prompt; None if cancelled on the way."""
        first = self.cache.length
        for start in range(first, len(self.prompt_ids), PREFILL_ROWS):
            if start > first and cancelled():
                self.text.finish_reason = "cancelled"
                return None
            chunk = self.prompt_ids[start : start + PREFILL_ROWS]
            output = self.target.prefill(chunk, self.cache, self.drafter.needs)
            self.log.read_prompt(output)
            prefilled(start + len(chunk))
        return output

    @torch.inference_mode()
    def prefill(self, output: TargetOutput) -> Prefill:
        """The first token, from the target's output for the prompt."""
        logits = self.constraint.mask(replace(output, logits=output.logits[-1:])).logits
        last_token = VerifiedTree(self.prompt_ids[-1:], TreeShape.chain(0), logits)
        root = self.rule(last_token, self.draws).next_token
        self.rule.read([*self.prompt_ids, root])
        self.constraint.commit([root])
        self.text.append([root])
        self.log.begin(root)
        ttft_s = time_s() - self.began_s
        return Prefill(root, len(self.prompt_ids), ttft_s, self.log.num_cached or 0)

    @torch.inference_mode()
    def step(self) -> Step:
        clock = PhaseClock(self.target.device)
        context_len = self.cache.length
        max_depth = self.target.context_len - 1 - context_len
        drafted = self.session.propose(Budget(max_depth)).cut(max_depth)
        clock.mark()
        drafts = self.drafter.traits.drafts
        proposal = self.constraint.prune(drafted, max_depth if drafts else 0)
        output = self.target.verify(proposal, self.cache, self.drafter.needs)
        clock.mark()
        masked = self.constraint.mask(output)
        verified = VerifiedTree.of(proposal, masked, self.rule, self.draws)
        accepted = self.rule(verified, self.draws)
        clock.mark()
        committed = (*(verified.tokens[node] for node in accepted.path), accepted.next_token)
        num_committed = self.text.append(committed)
        path = (0, *accepted.path)[: 1 + num_committed]  # nothing after the end of the text
        self.cache.commit(path)
        # Read before log and session follow: they would keep the device busy.
        target_probs = verified.token_probs()
        draft_probs = verified.draft_probs or proposal.token_probs()
        self.rule.read(committed)
        self.constraint.commit(committed)
        best = verified.best if masked is output else None
        outcome = Outcome(proposal, output, (0, *accepted.path), committed, verified.tokens, best)
        self.log.commit(outcome)
        self.session.observe(outcome)
        draft_s, verify_s, accept_s, total_s = clock.phases_s()
        rollback_s = self.cache.rollback_s
        self.num_steps += 1
        return Step(
            index=self.num_steps - 1,
            context_len=context_len,
            tokens=tuple(verified.tokens),
            parents=proposal.shape.parents,
            ranks=proposal.sibling_ranks(),
            draft_probs=(None, *draft_probs[1:]),
            target_probs=(None, *target_probs[1:]),
            accepted=accepted.path,
            bonus=accepted.next_token,
            num_committed=num_committed,
            num_extra_rows=proposal.num_rows - len(proposal.shape),
            num_cut=len(drafted.shape) - len(proposal.shape) + proposal.num_forced,
            num_forced=proposal.num_forced,
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
            other_s=max(rollback_s, total_s - draft_s - verify_s - accept_s),
            at_s=time_s() - self.began_s,
            decision=proposal.decision,
            expected=proposal.expected,
            bypass=self._bypass(drafted, proposal),
            rollback_s=rollback_s,
        )

    def _bypass(self, drafted: Proposal, verified: Proposal) -> Bypass | None:
        """Why nothing was drafted; None where something was, or the method never drafts."""
        if len(verified.shape) > 1 or not self.drafter.traits.drafts:
            return None
        return "grammar" if len(drafted.shape) > 1 else drafted.bypass or "no_match"

    def end(self) -> End:
        assert self.text.finish_reason is not None
        return End(tuple(self.text.token_ids), self.text.finish_reason, self.num_steps)

    def keep_prefix(self) -> None:
        """Under prefix caching, store the text for later ones whose prompts begin with it."""
        if self.prefixes is None or not self.text.token_ids:  # the prompt was not read
            return
        needs, tokens = self.drafter.needs, [*self.prompt_ids, *self.text.token_ids]
        features = self.log.rows() if needs.has_features else None
        self.prefixes.keep(tokens, self.cache, needs, features)

    def free(self) -> None:
        """Release the cache and the drafter's state of this text."""
        self.cache.free()
        self.session.close()


class _OutputText:
    """The committed tokens, up to the end of the text.

    Attributes:
        finish_reason: why it ended; None while it goes on.
    """

    def __init__(self, target: Target, limits: Limits, context_room: int) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._eos_ids = frozenset() if limits.ignore_eos else target.eos_ids
        self._stop = StopStrings(target.tokenizer, limits)
        self._stop_ids = frozenset(limits.stop_token_ids)
        self._max_new_tokens, self._context_room = limits.max_new_tokens, context_room

    def append(self, committed: Sequence[int]) -> int:
        """Append committed tokens up to the end of the text; returns how many."""
        eos, stop_token = (
            next((count for count, token in enumerate(committed, start=1) if token in ids), None)
            for ids in (self._eos_ids, self._stop_ids)
        )
        before = len(self.token_ids)
        ends: list[tuple[int | None, FinishReason]] = [
            (eos, "eos"),
            (stop_token, "stop"),
            (self._stop.push(committed), "stop"),
            (self._max_new_tokens - before, "length"),
            (self._context_room - before, "context"),
        ]
        num_kept = len(committed)
        # The earliest end counts; of several at the same token, the first of this list.
        for at, reason in reversed(ends):
            if at is not None and at <= num_kept:
                num_kept, self.finish_reason = at, reason
        self.token_ids.extend(committed[:num_kept])
        return num_kept
