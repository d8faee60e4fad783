"""Generates dialogues by continuous batching: every row has its own dialogue and position.

A row whose dialogue ends starts the next one, so the batch never waits for its longest text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError, TargetError
from engine.kernels.cpu.operators import topk
from engine.model.batch import RowTokens, TextBatch
from engine.model.corpus import Entry
from engine.model.target import Target
from engine.model.tokenizer import decode, encode
from engine.proposal import TargetOutput
from engine.sampling import NOT_FINITE
from engine.training.corpus.dialogues import Completion, DialogueSpec

CHUNK = 1024
"""Maximum tokens of prompts and fixed texts that are read in a step."""
TOP_K, TOP_P = 64, 0.95
"""Limits of sampling; greedy rows take the most probable token."""


class BatchGenerator:
    def __init__(self, target: Target, *, rows: int, max_len: int) -> None:
        """Raises ConfigError: `max_len` exceeds the target's context."""
        if max_len > target.context_len:
            raise ConfigError(
                f"max_len must be at most {target.context_len}, the context of {target.name}, "
                f"got {max_len}."
            )
        self._device = target.device
        self._max_len = max_len
        self._endings = _EndingTokens(target)
        self._batch = TextBatch(target, rows, max_len)
        self._rows: list[_Sequence | None] = [None] * rows
        self._uniforms = torch.zeros(rows, max_len, device=target.device)

    @torch.inference_mode()
    def run(self, specs: Iterator[DialogueSpec]) -> Iterator[Entry | None]:
        """Yield dialogues as they finish, and None after every step, until `specs` is exhausted."""
        rows = self._rows = [None] * len(self._rows)
        # Where prompts need a separate forward, several rows are refilled together.
        refill = 1 if self._batch.is_ragged else max(1, min(64, len(rows) // 8))
        more = True
        while True:
            free = [i for i, row in enumerate(rows) if row is None]
            if more and (len(free) >= refill or len(free) == len(rows)):
                more = self._start_dialogues(free, specs)
            active = [(i, row) for i, row in enumerate(rows) if row is not None]
            if not active and not more:
                return
            self._step([(i, row) for i, row in active if not row.finished])
            for i, row in active:
                if row.finished:
                    rows[i] = None
                    yield row.entry()
            yield None

    def _start_dialogues(self, free: list[int], specs: Iterator[DialogueSpec]) -> bool:
        """Start the next dialogues in free rows; False when none is left."""
        for i in free:
            spec = next(specs, None)
            if spec is None:
                return False
            self._rows[i] = _Sequence(spec, self._endings, self._max_len)
            generator = torch.Generator().manual_seed(spec.seed)
            self._uniforms[i] = torch.rand(self._max_len, generator=generator)
        return True

    def _step(self, active: list[tuple[int, _Sequence]]) -> None:
        """Read every text's unread tokens, prompts and fixed texts included, and sample a token."""
        if not active:
            return
        texts: list[RowTokens] = []
        room = CHUNK if self._batch.is_ragged else self._max_len * len(active)
        for i, row in active:
            is_single = row.num_read and not self._batch.is_ragged
            count = 1 + (0 if is_single else room)
            new = row.tokens[row.num_read : row.num_read + count]
            room -= len(new) - 1
            texts.append((i, row.num_read, new))
        sampled = self._sample(self._batch.advance(texts), texts, [row for _, row in active])
        for (_, row), (_, _, read), token in zip(active, texts, sampled, strict=True):
            row.push(token, len(read))

    def _sample(
        self, output: TargetOutput, texts: list[RowTokens], rows: list[_Sequence]
    ) -> list[int]:
        """The target's next token of every text, greedy or sampled.

        Raises TargetError: logits are not finite.
        """
        best, device = output.argmax(), output.logits.device
        places = torch.tensor(best, device=device)[:, None]
        if not output.logits.gather(1, places).isfinite().all():
            raise TargetError(NOT_FINITE)
        drawn = [k for k, row in enumerate(rows) if row.temperature > 0 or row.is_below_minimum]
        if not drawn:
            return best
        logits = output.logits[torch.tensor(drawn, device=device)]
        early = [k for k, at in enumerate(drawn) if rows[at].is_below_minimum]
        if early and self._endings.eos_ids:
            eos = torch.tensor(sorted(self._endings.eos_ids), device=device)
            logits[torch.tensor(early, device=device)[:, None], eos] = -torch.inf
        temperatures = torch.tensor([rows[k].temperature for k in drawn], device=device)
        at = [(row, begin + len(new) - 1) for row, begin, new in (texts[k] for k in drawn)]
        uniforms = self._uniforms[tuple(torch.tensor(at, device=device).T)]
        tokens = _draw(logits, temperatures[:, None], uniforms[:, None]).tolist()
        for k, token in zip(drawn, tokens, strict=True):
            best[k] = token
        return best


def _draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """A token per row `(rows,)`: the most probable where the temperature is 0, else sampled."""
    best = topk(logits, min(TOP_K, logits.shape[-1]), with_logsumexp=False)
    probs = (best.logits / temperatures.clamp_min(1e-3)).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= TOP_P, 0.0)
    cumulative = probs.cumsum(dim=-1)
    rank = (cumulative < uniforms * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    rank = rank.clamp_max(best.ids.shape[-1] - 1) * (temperatures > 0)
    return best.ids.gather(1, rank)[:, 0]


class _EndingTokens:
    def __init__(self, target: Target) -> None:
        tokenizer = target.tokenizer
        assert tokenizer is not None
        self._tokenizer = tokenizer
        pieces = [decode(tokenizer, [i]) for i in range(len(tokenizer))]

        def ending(*marks: str) -> frozenset[int]:
            return frozenset(i for i, piece in enumerate(pieces) if piece.rstrip().endswith(marks))

        self.eos_ids = target.eos_ids
        self.line = frozenset(i for i, piece in enumerate(pieces) if "\n" in piece)
        self.question, self.sentence = ending("?"), ending(".", "!", "?")

    def encode(self, text: str) -> list[int]:
        """Token ids of fixed text."""
        return encode(self._tokenizer, text) if text else []


@dataclass(slots=True)
class _Sequence:
    """An unfinished dialogue; its first `num_read` tokens are in the cache."""

    spec: DialogueSpec
    endings: _EndingTokens
    max_len: int
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    num_read: int = 0
    finished: bool = False
    _next_segment: int = 0
    _completion: Completion | None = None
    _start: int = 0

    def __post_init__(self) -> None:
        self._advance()
        if not self.tokens:
            self.tokens = [min(self.endings.eos_ids, default=0)]
            self._start, self.num_read = 1, 0
        self.finished = len(self.tokens) >= self.max_len

    @property
    def temperature(self) -> float:
        return self._completion.temperature if self._completion else 0.0

    @property
    def _num_generated(self) -> int:
        return len(self.tokens) - self._start

    @property
    def is_below_minimum(self) -> bool:
        """Whether the completion is below its minimum length."""
        return self._completion is not None and self._num_generated < self._completion.min_tokens

    def push(self, token: int, num_read: int) -> None:
        """Take the target's token after reading `num_read` more; ignored within fixed text."""
        self.num_read += num_read
        if self.num_read < len(self.tokens):
            return
        assert self._completion is not None  # a dialogue ends with an answer
        if self._completion.kind == "answer":
            self._answer(self._completion, token)
        else:
            self._infill(self._completion, token)
        self.finished = self.finished or len(self.tokens) >= self.max_len

    def _infill(self, part: Completion, token: int) -> None:
        endings, count = self.endings, self._num_generated
        one_line = part.kind not in ("turn", "article") and count >= part.min_tokens
        if token in endings.eos_ids or (one_line and token in endings.line):
            self._advance()
            return
        self.tokens.append(token)
        if part.kind == "question" and token in endings.question:
            self._advance()
        elif count + 1 >= part.max_tokens:
            self._cut_at_sentence()
            self._advance()

    def _cut_at_sentence(self) -> None:
        """Cut the text after its last sentence, if at least half of it remains."""
        min_end = self._start + self._num_generated // 2
        for end in range(len(self.tokens), min_end, -1):
            if self.tokens[end - 1] in self.endings.sentence:
                del self.tokens[end:]
                return

    def _answer(self, part: Completion, token: int) -> None:
        self.tokens.append(token)
        eos = token in self.endings.eos_ids
        if not eos and self._num_generated < part.max_tokens:
            return
        self.spans.append((self._start, len(self.tokens)))
        if eos and self._next_segment < len(self.spec.segments):
            self._advance()
        else:
            self.finished, self._completion = True, None

    def _advance(self) -> None:
        """Append the fixed text up to the next completion, which needs the last token's logits."""
        segments, text = self.spec.segments, ""
        self._completion = None
        while self._completion is None and self._next_segment < len(segments):
            segment = segments[self._next_segment]
            self._next_segment += 1
            if isinstance(segment, Completion):
                self._completion = segment
            else:
                text += segment
        # Tokens that were cut off are still cached; fixed text overwrites them.
        self.num_read = min(self.num_read, len(self.tokens))
        ids = self.endings.encode(text)
        # The template repeats the end-of-text token that ends the answer.
        if ids and self.tokens and self.tokens[-1] == ids[0] and ids[0] in self.endings.eos_ids:
            ids = ids[1:]
        self.tokens.extend(ids)
        self._start = len(self.tokens)
        self.num_read = min(self.num_read, len(self.tokens) - 1)

    def entry(self) -> Entry:
        """The finished dialogue; an answer that `max_len` cut off counts."""
        tokens, spans = self.tokens[: self.max_len], self.spans
        if self._completion and self._completion.kind == "answer":
            spans = [*spans, (self._start, len(tokens))]
        spans = [(a, min(b, len(tokens))) for a, b in spans if a < len(tokens)]
        ids = np.array(tokens, np.int32)
        return Entry(self.spec.number, self.spec.category, ids, tuple(spans))
