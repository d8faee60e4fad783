"""N-gram lookup: what followed the last few tokens before is proposed again. No weights.

The sequence is prompt and output together. Suffixes are tried from the longest to a single token,
and the first one that occurred before decides:

    sequence  the cat sat on the mat . the cat      suffix (the, cat) occurred at the start
    draft     sat on the mat

There are two sets of rules: TensorRT-LLM's pool and transformers' prompt lookup.
"""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import Literal

import torch

from engine.config import setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start, Traits
from engine.drafters.lookup.bounded import ENTRY_BYTES, BoundedTable, tokens_bytes
from engine.drafters.method import DraftShape, MethodConfig, draft_len
from engine.proposal import Budget, Proposal
from engine.steps import Bypass
from engine.tree import TreeShape, upload

Tokens = tuple[int, ...]


class NGramConfig(MethodConfig):
    """Settings of n-gram lookup; names and defaults are TensorRT-LLM's.

    The pool takes 64 MiB at most (`bounded.POOL_BYTES`); the least recently used entries are
    dropped first.
    """

    title = "N-gram lookup"
    summary = "Proposes what followed the last tokens earlier in the text."
    paper = "prompt-lookup-decoding"
    main_settings = "drafting max_draft_len max_matching_ngram_size"
    looks_up = True

    without_effect = (
        ({"lookup": "transformers"}, "is_keep_all is_use_oldest is_public_pool"),
        ({"lookup": "pool", "is_keep_all": False}, "is_use_oldest"),
    )

    decoding_type: Literal["NGram"] = "NGram"
    max_draft_len: int = draft_len(10)
    max_matching_ngram_size: int = setting(
        2,
        "Longest n-gram",
        "longest suffix that is looked up; shorter ones come after it",
        ge=1,
        le=32,
    )
    lookup: Literal["pool", "pool_as_coded", "transformers"] = setting(
        "pool",
        "Lookup rules",
        "TensorRT-LLM's pool as its guide describes it or as its code has it (they differ "
        "without is_keep_all), or transformers' prompt lookup",
    )
    is_keep_all: bool = setting(
        True, "Keep every continuation", "pool: keep every continuation of a pattern, not only one"
    )
    is_use_oldest: bool = setting(
        True,
        "Oldest continuation first",
        "pool: propose the oldest continuation of a pattern, not the newest",
    )
    is_public_pool: bool = setting(
        True,
        "Share the pool between runs",
        "pool: share it between all runs of this method, not one per run",
    )

    def build(self, context: BuildContext) -> NGramDrafter:
        return NGramDrafter(self, context)

    def draft_shape(self) -> DraftShape:
        return DraftShape(self.max_draft_len, self.max_draft_len)


class NGramSession(DraftSession["NGramDrafter"]):
    def __init__(self, drafter: NGramDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        limits = start.limits
        eos_ids = frozenset[int]() if limits.ignore_eos else drafter.target.eos_ids
        self._end = start.log.num_prompt + limits.max_new_tokens
        self._lookup = lookup_of(drafter.config, self._end, eos_ids, drafter.pool)

    def propose(self, budget: Budget) -> Proposal:
        draft = self._lookup.draft(self.text)[: budget.depth]
        self.match_len = self._lookup.size
        if self.match_len < self.start.min_match_len:
            draft = []
        tokens = upload(torch.tensor([self.root, *draft]), self.drafter.target.device)
        bypass: Bypass | None = "room" if len(self.text) + 1 >= self._end else None
        return Proposal(tokens, TreeShape.chain(len(draft)), bypass=bypass)

    def close(self) -> None:
        if isinstance(self._lookup, PoolLookup) and self.drafter.pool is not None:
            self._lookup.learn(self.text)


class NGramDrafter(Drafter):
    """Attributes:
    pool: of all texts; None = every text has its own.
    """

    session = NGramSession

    def __init__(self, config: NGramConfig, context: BuildContext) -> None:
        self.config, self.target = config, context.target
        shares = config.lookup != "transformers" and config.is_public_pool
        self.pool = Pool() if shares else None
        self.traits = Traits(remembers=shares)


class PoolLookup:
    """TensorRT-LLM's pool of pattern → continuations.

    Every n-gram is a pattern, what follows it (up to `max_draft_len` tokens) a match. Matches keep
    the order in which they were first seen; a longer one drops the shorter ones of its pattern;
    without `is_keep_all`, only the first of the longest is kept; as coded, one longer than the
    oldest replaces all, and others of that length join it. A public pool outlives the text.
    Source: TensorRT-LLM, tensorrt_llm/_torch/speculative/ngram.py.

    Example: max_draft_len 2, sequence `1 2 3 1`: pool `1 → (2, 3)`, `2 → (3, 1)`, `3 → (1)`; the
    suffix `1` gives the draft `2 3`. After one more token 9, `3 → (1, 9)` and `1` also → `(9)`.
    """

    size = 0

    def __init__(self, config: NGramConfig, end: int, pool: Pool) -> None:
        """`end`: tokens of the text at its longest."""
        self._config, self._end, self._pool = config, end, pool
        self._sequence: list[int] = []
        self._learned = self._length = 0

    def draft(self, sequence: list[int]) -> list[int]:
        self.size, room = 0, self._end - 1 - len(sequence)
        if room <= 0:
            return []
        self._sequence, self._length = sequence, len(sequence)
        longest = min(self._config.max_matching_ngram_size, self._length - 1)
        # Patterns with a whole continuation are learnt once; those behind them, which grow with
        # every token, only where they can matter: where the last token is among them.
        whole = self._length - self._config.max_draft_len
        for size in range(1, longest + 1):
            self._learn(size, self._learned, whole)
        self._learned = max(self._learned, whole)
        if sequence[-1] in sequence[max(0, whole) : -1]:
            self._learn_tail()
        for size in range(longest, 0, -1):
            matches = self._pool.get(tuple(sequence[-size:]))
            if matches is not None:
                self.size = size
                return list(matches.pick(oldest=self._config.is_use_oldest))[:room]
        return []

    def learn(self, sequence: list[int]) -> None:
        """Learn a text that ends here, for later ones."""
        self._sequence, self._length = sequence, len(sequence)
        self._learn_tail()

    def _learn_tail(self) -> None:
        longest = min(self._config.max_matching_ngram_size, self._length - 1)
        for size in range(1, longest + 1):
            self._learn(size, self._learned, self._length - 1)

    def _learn(self, size: int, learned: int, end: int) -> None:
        """Add the patterns of this size that end behind `learned` tokens, up to `end` tokens."""
        length, keep_all = self._config.max_draft_len, self._config.is_keep_all
        sequence, keeps_one = self._sequence, not keep_all and self._config.lookup == "pool"
        for at in range(max(0, learned - size + 1), end - size + 1):
            pattern = tuple(sequence[at : at + size])
            match = tuple(sequence[at + size : min(at + size + length, self._length)])
            matches = self._pool.get(pattern)
            replaces = matches is not None and not keep_all and len(match) > len(matches.pick())
            if matches is not None and keeps_one and not replaces:
                continue
            if matches is None or replaces:
                matches = _Matches()
                self._pool.put(pattern, matches, ENTRY_BYTES + tokens_bytes(pattern))
            if num_bytes := matches.add(match, full=len(match) == length):
                self._pool.resize(pattern, num_bytes)


class _Matches:
    """Continuations of one pattern in order of first occurrence; longer ones drop shorter ones."""

    __slots__ = ("_all", "_partial")

    def __init__(self) -> None:
        self._all: dict[Tokens, None] = {}
        self._partial: list[Tokens] = []

    def add(self, match: Tokens, *, full: bool) -> int:
        """Returns the additional bytes.

        Only partial matches can be shorter than a new one, and there are few of them.
        """
        if match in self._all:
            return 0
        num_bytes = tokens_bytes(match)
        for shorter in [m for m in self._partial if len(m) < len(match)]:
            self._partial.remove(shorter)
            del self._all[shorter]
            num_bytes -= tokens_bytes(shorter)
        self._all[match] = None
        if not full:
            self._partial.append(match)
        return num_bytes

    def pick(self, *, oldest: bool = True) -> Tokens:
        return next(iter(self._all) if oldest else reversed(self._all))


class Pool(BoundedTable[Tokens, _Matches]):
    """By pattern."""


class PromptLookup:
    """transformers' prompt lookup: the first occurrence of the longest suffix.

    The draft ends with the sequence or before an end-of-text token.
    Source: transformers 5, PromptLookupCandidateGenerator.
    """

    size = 0

    def __init__(self, config: NGramConfig, end: int, eos_ids: frozenset[int]) -> None:
        """`end`: tokens of the text at its longest."""
        self._config, self._end, self._eos_ids = config, end, eos_ids
        self._text = ""
        """A character per token, because a string is searched fast without an index."""

    def draft(self, sequence: list[int]) -> list[int]:
        # Ids beyond Unicode would only share a character, and the target verifies every draft.
        new = (chr(token % sys.maxunicode) for token in sequence[len(self._text) :])
        self._text += "".join(new)
        self.size, n, config = 0, len(sequence), self._config
        if n + 1 == self._end:
            return []
        for size in range(min(config.max_matching_ngram_size, n), 0, -1):
            begin = self._text.find(self._text[-size:]) + size
            if begin < min(n, self._end):
                self.size = size
                draft = sequence[begin : min(begin + config.max_draft_len, self._end)]
                return list(takewhile(lambda token: token not in self._eos_ids, draft))
        return []


def lookup_of(
    config: NGramConfig, end: int, eos_ids: frozenset[int], pool: Pool | None = None
) -> PromptLookup | PoolLookup:
    """Rules that turn a growing text into a draft."""
    if config.lookup == "transformers":
        return PromptLookup(config, end, eos_ids)
    return PoolLookup(config, end, Pool() if pool is None else pool)
