"""The answer to one request, a run that is queued like the page's runs, and its figures."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

from engine.config import Limits, Sampling
from engine.errors import PlaygroundError
from engine.metrics import Tally, ratio, tpot_ms
from playground.api.models import Model
from playground.host.live import API_OWNER, LiveRun, Message
from playground.host.request import GenerateRequest
from playground.host.runner import EngineHost

Disconnected = Callable[[], Awaitable[bool]]
POLL_S = 0.005
"""Polling interval until the first token."""
TEXT_POLL_S = 0.02
"""Polling interval after it: text arrives every 50 ms, and polling costs the engine time."""


class RunFailedError(PlaygroundError):
    """The run could not start, failed, or was stopped before its text was complete."""

    def __init__(self, run: LiveRun) -> None:
        super().__init__(run.error or "The run was stopped.")
        has_broken = run.state == "failed" and not run.unavailable
        self.status = 400 if run.refused else 500 if has_broken else 503
        """HTTP status: the request is at fault, the server is, or it may succeed later."""


class Answer:
    """A run and its text, with a possible beginning of a stop string held back."""

    def __init__(
        self,
        host: EngineHost,
        model: Model,
        *,
        prompt: str = "",
        prompt_ids: tuple[int, ...] = (),
        messages: Sequence[Message] = (),
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        """Queue the run of a chat's `messages`, or of a raw `prompt` to continue.

        Raises QueueFullError, ClosingError: the queue is full, or the server is stopping.
        """
        request = GenerateRequest(
            target=model.target,
            dtype="auto",
            title=model.method.title,
            config=model.method.config,
            sampling=sampling,
            limits=limits,
            mode="chat" if messages else "raw",
            prompt=prompt,
            prompt_ids=prompt_ids,
            messages=tuple(messages),
        )
        self._host, self._stop = host, limits.stop
        self.run = host.generate(request, owner=f"{API_OWNER}{secrets.token_urlsafe(9)}")

    async def texts(self, disconnected: Disconnected | None = None) -> AsyncGenerator[str, None]:
        """The text, piece by piece; closing the generator cancels the run.

        Args:
            disconnected: whether the client has left, which ends the text.

        Raises RunFailedError: the run failed, or was stopped.
        """
        text, num_events, num_sent = "", 0, 0
        try:
            while not self.run.over.is_set():
                if disconnected is not None and await disconnected():
                    return
                pieces = self.run.pieces(num_events)
                num_events += len(pieces)
                text += "".join(pieces)
                if num_sent < (num_safe := _num_safe(text, self._stop)):
                    yield text[num_sent:num_safe]
                    num_sent = num_safe
                await asyncio.sleep(POLL_S if self.run.first is None else TEXT_POLL_S)
            self._check()
            if self.run.finish is not None and self.run.finish.text[num_sent:]:
                yield self.run.finish.text[num_sent:]
        finally:
            self.run.cancel()

    async def text(self, disconnected: Disconnected | None = None) -> str:
        """The whole text. Raises RunFailedError: the run failed, or was stopped."""
        async with aclosing(self.texts(disconnected)) as pieces:
            return "".join([piece async for piece in pieces])

    def token_ids(self) -> tuple[int, ...]:
        """The output's token ids from the log, once the run has ended."""
        stored = self._host.log.get(self.run.log_id or "")
        return () if stored is None else tuple(stored.output_ids)

    def _check(self) -> None:
        finish = self.run.finish
        cut = self.run.over.is_set() and (finish is None or finish.reason == "cancelled")
        if cut or self.run.state == "failed":
            raise RunFailedError(self.run)

    @property
    def finish_reason(self) -> str:
        """`length` if a limit ended the text, else `stop`."""
        reason = self.run.finish.reason if self.run.finish else None
        return "length" if reason in ("length", "context") else "stop"


def _num_safe(text: str, stops: Sequence[str]) -> int:
    """Number of characters before a stop string, or before the beginning of one at the end."""
    starts = [index for stop in stops if (index := text.find(stop)) >= 0]
    if starts:
        return min(starts)
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return len(text) - length
    return len(text)


# ---- figures, in the shapes of vLLM, llama-server and OpenAI


def speculative_decoding(run: LiveRun) -> dict[str, Any] | None:
    """Acceptance of one request as vLLM reports it; None before the first step.

    `acceptance_histogram[j]` counts the steps that accepted exactly j draft tokens, before any cut,
    for all j up to `num_spec_tokens`, the longest draft of a step. `bypass_reasons`, not vLLM's,
    counts the steps that drafted nothing by `engine.steps.Bypass`.
    """
    figures = run.metrics
    if figures is None or not figures.num_steps:
        return None
    longest, beyond = run.rows.longest, run.rows.longest + 1 - len(figures.at_least)
    at_least = [figures.num_steps, *figures.at_least, *[0] * beyond]
    return {
        "mean_acceptance_length": figures.mat,
        "draft_acceptance_rate": figures.draft_acceptance or 0.0,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": figures.num_steps,
        "num_accepted_draft_tokens": figures.num_accepted,
        "num_draft_tokens": figures.num_drafted,
        "num_spec_tokens": longest,
        "bypass_reasons": dict(figures.bypasses),
    }


def timings(run: LiveRun) -> dict[str, Any]:
    """Times and acceptance of one request as llama-server reports them; milliseconds."""
    figures = run.metrics
    if figures is None or figures.ttft_s is None:
        return {}
    prompt_ms, prompt_n = 1000 * figures.ttft_s, figures.num_prompt_tokens - figures.num_cached
    predicted_n = figures.num_new_tokens
    return {
        "cache_n": figures.num_cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, prompt_n),
        "prompt_per_second": ratio(prompt_n, figures.ttft_s),
        "predicted_n": predicted_n,
        "predicted_ms": 1000 * figures.decode_s,
        "predicted_per_token_ms": tpot_ms(predicted_n, figures.decode_s),
        "predicted_per_second": figures.tok_s,
        "draft_n": figures.num_drafted,
        "draft_n_accepted": figures.num_accepted,
        "step_ms": figures.time_split.ms if figures.time_split else None,
    }


def usage(run: LiveRun) -> dict[str, Any]:
    """Tokens of the prompt and of the answer, counted after any cut."""
    figures = run.metrics or Tally().metrics
    num_prompt_tokens, num_new_tokens = figures.num_prompt_tokens, figures.num_new_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": figures.num_cached},
    }
