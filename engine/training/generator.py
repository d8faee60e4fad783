"""Writes many dialogues at once: every row of the batch is at its own place in its own dialogue.

A row that ends is given the next plan at once, so the batch never waits for its longest text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.target import Target
from engine.training.dialogue import Answer, Gap, Plan, Say
from engine.training.rows import rows_of

TOP_K, TOP_P = 64, 0.95
"""Sampling is limited to likely tokens; greedy rows take the first."""
_SENTENCE_ENDS = (".", "!", "?")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A finished dialogue.

    Attributes:
        spans: `[start, end)` of tokens that the target wrote, answers only.
        complete: False where it met the length limit before its plan was done.
    """

    number: int
    category: str
    seed: int
    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    complete: bool


class BatchGenerator:
    """Turns plans into dialogues, many at a time."""

    def __init__(self, target: Target, *, rows: int, max_len: int) -> None:
        """Prepare for `rows` dialogues of up to `max_len` tokens at a time.

        Raises:
            ConfigError: `max_len` exceeds the target's context.
        """
        if max_len > target.context_len:
            raise ConfigError(
                f"max_len must be at most {target.context_len}, the context of {target.name}, "
                f"got {max_len}."
            )
        self._target = target
        self._num_rows = rows
        self._max_len = max_len
        self._words = _Words(target)
        self._rows = rows_of(target, rows, max_len)
        device = target.device
        self._uniforms = torch.zeros(rows, max_len, device=device)

    @torch.inference_mode()
    def run(self, plans: Iterator[Plan]) -> Iterator[Dialogue]:
        """Yield dialogues as they finish, until `plans` are used up."""
        writers: list[_Writer | None] = [None] * self._num_rows
        done = False
        while True:
            free = [i for i, writer in enumerate(writers) if writer is None]
            if free and not done and (len(free) >= self._refill or len(free) == self._num_rows):
                done = self._admit(free, plans, writers)
            if any(writer is not None for writer in writers):
                self._step(writers)
            elif done:
                return
            for i, writer in enumerate(writers):
                if writer is not None and writer.finished:
                    writers[i] = None
                    yield writer.dialogue()

    @property
    def _refill(self) -> int:
        """Rows admitted together: their beginnings are read in one forward."""
        return max(1, min(64, self._num_rows // 8))

    def _admit(self, free: list[int], plans: Iterator[Plan], writers: list[_Writer | None]) -> bool:
        """Give free rows the next plans and read their beginnings; True when plans ran out."""
        fresh: list[tuple[int, _Writer]] = []
        ended = False
        for i in free:
            plan = next(plans, None)
            if plan is None:
                ended = True
                break
            writer = _Writer(plan, self._words, self._max_len)
            generator = torch.Generator().manual_seed(plan.seed)
            self._uniforms[i] = torch.rand(self._max_len, generator=generator)
            writers[i] = writer
            if not writer.finished:
                fresh.append((i, writer))
        heads = [(i, w.tokens[:-1]) for i, w in fresh if len(w.tokens) > 1]
        if heads:
            self._rows.begin(heads)
        for _, writer in fresh:
            writer.fed = len(writer.tokens) - 1
        return ended

    def _step(self, writers: list[_Writer | None]) -> None:
        """One token for every row that is being written."""
        device = self._target.device
        busy = [(i, w) for i, w in enumerate(writers) if w is not None and not w.finished]
        if not busy:
            return
        fed = [(i, w.tokens[w.fed], w.fed) for i, w in busy]
        logits = self._rows.step(fed)
        early = [k for k, (_, w) in enumerate(busy) if w.too_early]
        if early and self._words.eos_ids:
            rows = torch.tensor(early, device=device)[:, None]
            logits[rows, torch.tensor(sorted(self._words.eos_ids), device=device)] = -torch.inf
        temperatures = torch.tensor([w.temperature for _, w in busy], device=device)
        places = torch.tensor([(i, position) for i, _, position in fed], device=device)
        drawn = self._uniforms[places[:, 0], places[:, 1]]
        chosen = _choose(logits, temperatures[:, None], drawn[:, None]).tolist()
        for (_, writer), token in zip(busy, chosen, strict=True):
            writer.push(token)


def _choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """A token per row `(rows,)`: the first where the temperature is 0, else drawn."""
    best, tokens = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    probs = (best.float() / temperatures.clamp_min(1e-3)).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= TOP_P, 0.0)
    reached = probs.cumsum(dim=-1)
    rank = (reached < uniforms * reached[:, -1:]).sum(dim=-1, keepdim=True)
    rank = rank.clamp_max(best.shape[-1] - 1) * (temperatures > 0)
    return tokens.gather(1, rank)[:, 0]


class _Words:
    """What a writer must know of the tokenizer: how texts end."""

    def __init__(self, target: Target) -> None:
        tokenizer = target.tokenizer
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self.eos_ids = target.eos_ids
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.line_ends = frozenset(i for i, piece in enumerate(pieces) if "\n" in piece)
        self.question_ends = frozenset(
            i for i, piece in enumerate(pieces) if piece.rstrip().endswith("?")
        )
        self.sentence_ends = frozenset(
            i for i, piece in enumerate(pieces) if piece.rstrip().endswith(_SENTENCE_ENDS)
        )
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[text] = list(self._tokenizer.encode(text, add_special_tokens=False))
        return self._known[text]


@dataclass(slots=True)
class _Writer:
    """One dialogue in the making.

    Attributes:
        tokens: all that is decided; the first `fed` are in the cache.
    """

    plan: Plan
    words: _Words
    max_len: int
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    fed: int = 0
    finished: bool = False
    complete: bool = False
    _at: int = 0
    _began: int = 0

    def __post_init__(self) -> None:
        self._say()
        if not self.tokens:
            self.tokens = [min(self.words.eos_ids, default=0)]
            self._began = 1
        self.finished = len(self.tokens) >= self.max_len

    @property
    def temperature(self) -> float:
        segment = self.plan.segments[self._at] if self._at < len(self.plan.segments) else None
        return segment.temperature if isinstance(segment, Gap | Answer) else 0.0

    @property
    def too_early(self) -> bool:
        """Whether the text must not end yet: articles are to be long."""
        segment = self.plan.segments[self._at]
        written = len(self.tokens) - self._began
        return isinstance(segment, Gap) and written < segment.min_tokens

    def push(self, token: int) -> None:
        """The last fed token was continued by this one; taken only where the target writes."""
        self.fed += 1
        if self.fed < len(self.tokens):
            return
        segment = self.plan.segments[self._at]
        if isinstance(segment, Gap):
            self._gap(segment, token)
        elif isinstance(segment, Answer):
            self._answer(segment, token)
        self.finished = self.finished or len(self.tokens) >= self.max_len

    def _gap(self, gap: Gap, token: int) -> None:
        words, written = self.words, len(self.tokens) - self._began
        ends = token in words.eos_ids
        one_line = gap.kind not in ("turn", "article") and written >= gap.min_tokens
        ends = ends or (one_line and token in words.line_ends)
        if not ends:
            self.tokens.append(token)
            ends = gap.kind == "question" and token in words.question_ends
            if not ends and written + 1 >= gap.max_tokens:
                self._trim()
                ends = True
        if ends:
            self._next()

    def _trim(self) -> None:
        """Cut the gap after its last sentence, if that leaves half of it."""
        least = self._began + (len(self.tokens) - self._began) // 2
        for end in range(len(self.tokens), least, -1):
            if self.tokens[end - 1] in self.words.sentence_ends:
                del self.tokens[end:]
                return

    def _answer(self, answer: Answer, token: int) -> None:
        self.tokens.append(token)
        eos = token in self.words.eos_ids
        if eos or len(self.tokens) - self._began >= answer.max_tokens:
            self.spans.append((self._began, len(self.tokens)))
            last = self._at == len(self.plan.segments) - 1
            if last or not eos:
                self.finished, self.complete = True, True
                return
            self._next()

    def _next(self) -> None:
        """On to the next segment that the target writes; it needs the last token's logits."""
        self._at += 1
        self._say()
        self.fed = min(self.fed, len(self.tokens) - 1)

    def _say(self) -> None:
        text = ""
        while self._at < len(self.plan.segments):
            segment = self.plan.segments[self._at]
            if not isinstance(segment, Say):
                break
            text += segment.text
            self._at += 1
        ids = self.words.encode(text) if text else []
        # The answer's own end-of-text token is the first of what the template puts behind it.
        if ids and self.tokens and self.tokens[-1] == ids[0] and ids[0] in self.words.eos_ids:
            ids = ids[1:]
        self.tokens.extend(ids)
        self._began = len(self.tokens)

    def dialogue(self) -> Dialogue:
        plan, tokens = self.plan, self.tokens[: self.max_len]
        spans = self.spans
        if not self.complete and isinstance(plan.segments[self._at], Answer):
            spans = [*spans, (self._began, len(tokens))]
        kept = tuple((a, min(b, len(tokens))) for a, b in spans if a < len(tokens))
        return Dialogue(plan.number, plan.category, plan.seed, tuple(tokens), kept, self.complete)
