"""Suffix decoding: continue as the text, or an earlier one, went on after the same words.

A suffix automaton over prompt and output, and optionally one over earlier runs, tells how often
each token followed the text's last tokens. The longer the match, the longer the draft.

A datastore, a large corpus of texts such as the target writes, is searched the same way through a
suffix array (REST).

Lossless under sampling: drafts follow from the committed tokens alone.
Source: arXiv:2411.04975, section 3 (tree expansion, Alg. 1). Two differences: an automaton in
place of suffix trees holds the same counts in less space, and a token's probability is its share
of the occurrences *that went on*, so the text's own end does not count against its matches.
The datastore: arXiv:2311.08252, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from pydantic import Field

from engine.config import MethodConfig
from engine.corpus import Corpus
from engine.drafters.base import Drafter, Start, Workbench
from engine.drafters.suffix_array import SuffixArray
from engine.drafters.suffix_automaton import ROOT, Cursor, SuffixAutomaton
from engine.proposal import Outcome, Proposal
from engine.tree import TreeShape


class SuffixConfig(MethodConfig):
    """Settings of suffix decoding, named as in ArcticInference and vLLM."""

    title: ClassVar[str] = "Suffix"
    summary: ClassVar[str] = (
        "Drafts what followed the longest matching context in the prompt, the output and, if "
        "wanted, earlier runs. No weights."
    )
    paper: ClassVar[str | None] = "2411.04975"

    decoding_type: Literal["Suffix"] = "Suffix"
    max_draft_len: int = Field(16, ge=1, le=64, description="deepest draft, in tokens")
    use_tree_spec: bool = Field(False, description="draft a tree of likely continuations")
    max_total_draft_tokens: int = Field(
        32, ge=1, le=256, description="nodes of the tree at most (with use_tree_spec)"
    )
    max_tree_depth: int = Field(
        24, ge=2, le=256, description="longest context plus draft that is counted, in tokens"
    )
    max_spec_factor: float = Field(
        1.0, gt=0.0, le=16.0, description="drafted tokens per matched token"
    )
    min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="least estimated probability of a drafted path"
    )
    use_global_pool: bool = Field(False, description="also match texts of earlier runs")
    global_pool_size: int = Field(
        100_000, ge=1000, le=10_000_000, description="tokens of earlier runs to keep, at most"
    )

    datastore: str | None = Field(
        None,
        description="a corpus that `app.py train` made, to match as well: its folder, or the name "
        "of a shipped one",
    )

    def build(self, bench: Workbench) -> SuffixDrafter:
        """Read the datastore, if there is one.

        Raises:
            ConfigError: it is no corpus, or another target wrote it.
        """
        store = None
        if self.datastore is not None:
            folder = Path(bench.locate(self.datastore))
            Corpus.open(folder).check_made_by(bench.target)
            store = _sorted(folder, _stamp(folder), self.max_tree_depth)
        return SuffixDrafter(bench, self, store)


def _stamp(folder: Path) -> int:
    """Changes when the corpus does."""
    return max((file.stat().st_mtime_ns for file in folder.glob("shard-*")), default=0)


@cache
def _sorted(folder: Path, stamp: int, depth: int) -> SuffixArray:
    """A corpus in order; sorting it takes a second per million tokens, so it is done once."""
    corpus = Corpus.open(folder)
    texts = (corpus.tokens(entry) for entry in corpus.entries)
    return SuffixArray(texts, depth, int(corpus.manifest["vocab_size"]))


State = TypeVar("State")


class Memory(Protocol[State]):
    """Texts in which contexts are found again; a state stands for a context's places."""

    def followers(self, state: State) -> Iterable[tuple[int, State, int]]:
        """Per continuation: token, state with it, occurrences. Oldest first where that is known."""


@dataclass(frozen=True, slots=True)
class Match(Generic[State]):
    """Where the text's last `length` tokens occurred; counts reach `deepest` tokens further."""

    memory: Memory[State]
    state: State
    length: int
    deepest: int


@dataclass(slots=True)
class Continuation:
    """A drafted tree without its root: node i + 1 has `tokens[i]` and `parents[i]`.

    Attributes:
        probs: estimated probability of each token after its parent.
        score: sum of the paths' probabilities = expected number of accepted tokens.
        match_len: tokens of the context that was matched.
    """

    match_len: int = 0
    score: float = 0.0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    def add(self, parent: int, token: int, prob: float, path_prob: float) -> int:
        """Append a node; return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score += path_prob
        return len(self.tokens)


class GlobalPool:
    """Texts of earlier runs, in two automata: when the newer is half the pool, the older goes."""

    def __init__(self, size: int, max_depth: int) -> None:
        self.size = size
        self.max_depth = max_depth
        self.automata = [SuffixAutomaton(max_depth)]

    def add(self, text: Iterable[int]) -> None:
        """Keep a finished text."""
        if self.automata[-1].num_tokens >= self.size // 2:
            self.automata = [self.automata[-1], SuffixAutomaton(self.max_depth)]
        self.automata[-1].extend(text)
        self.automata[-1].end_sequence()


class SuffixDrafter(Drafter):
    """Drafts the continuation with the best score among all matched contexts."""

    def __init__(
        self, bench: Workbench, config: SuffixConfig, store: SuffixArray | None = None
    ) -> None:
        self.config = config
        self._store = store
        self.match_len = 0
        """Tokens of the context that the last proposal matched; 0 = it drafts nothing."""
        self._device = bench.target.device
        self._pool = GlobalPool(config.global_pool_size, config.max_tree_depth)
        self._text: list[int] = []
        self._local = SuffixAutomaton(config.max_tree_depth)
        self._cursors: list[Cursor] = []

    def start(self, start: Start) -> None:
        self._text = []
        self._local = SuffixAutomaton(self.config.max_tree_depth)
        automata = self._pool.automata if self.config.use_global_pool else []
        self._cursors = [Cursor(automaton) for automaton in automata]
        self._extend(start.prompt_ids)
        self._extend([start.root])

    def propose(self, max_depth: int) -> Proposal:
        best = self.best_continuation(max_depth)
        self.match_len = best.match_len
        tokens = torch.tensor([self._text[-1], *best.tokens], device=self._device)
        probs = torch.tensor([1.0, *best.probs], device=self._device)
        n = len(best.tokens)
        if best.parents == list(range(n)):
            return Proposal(tokens, TreeShape.chain(n), draft_probs=probs)
        return Proposal(tokens, TreeShape([-1, *best.parents]), draft_probs=probs)

    def best_continuation(self, max_depth: int) -> Continuation:
        """The highest-scoring draft; the text itself wins ties, then the longer match."""
        best = Continuation()
        for match in self._matches():
            room = min(
                int(match.length * self.config.max_spec_factor + 1e-6),
                self.config.max_total_draft_tokens
                if self.config.use_tree_spec
                else self.config.max_draft_len,
            )
            # No path is likelier than 1, so a shorter match with this room cannot score more.
            if room > best.score:
                found = self._continue(match, room, max_depth)
                if found.score > best.score:
                    found.match_len = match.length
                    best = found
        return best

    def observe(self, outcome: Outcome) -> None:
        self._extend(outcome.committed)

    def finish(self) -> None:
        if self.config.use_global_pool:
            self._pool.add(self._text)
        self._text = []
        self._cursors = []
        self._local = SuffixAutomaton(self.config.max_tree_depth)

    def close(self) -> None:
        self._pool = GlobalPool(self.config.global_pool_size, self.config.max_tree_depth)

    def _extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._local.append(token)
            for cursor in self._cursors:
                cursor.advance(token)

    def _matches(self) -> Iterator[Match[Any]]:
        """Every matched context, per memory longest first."""
        depth = self.config.max_tree_depth
        starts = [(self._local, self._local.suffix, depth)]
        starts += [(cursor.automaton, cursor.state, cursor.length) for cursor in self._cursors]
        for automaton, state, longest in starts:
            while state != ROOT:
                # Continuations of a state are those of its shortest string.
                deepest = depth - automaton.shortest(state)
                yield Match(automaton, state, min(automaton.length[state], longest), deepest)
                state = automaton.link[state]
        if self._store is not None:
            for rows in self._store.matches(self._text[-depth:]):
                yield Match(self._store, rows, rows.length, depth - rows.length)

    def _continue(self, match: Match[State], room: int, max_depth: int) -> Continuation:
        """Expand the likeliest paths first, until `room` tokens are drafted."""
        config = self.config
        max_depth = min(max_depth, config.max_draft_len, match.deepest)
        found = Continuation()
        if max_depth < 1:
            return found
        # (-probability of the path, order, probability, token, state, parent, depth)
        heap: list[tuple[float, int, float, int, State, int, int]] = []
        self._offer(heap, match.memory, match.state, 1.0, parent=0, depth=1)
        while heap and len(found.tokens) < room:
            negated, _, prob, token, state, parent, depth = heapq.heappop(heap)
            node = found.add(parent, token, prob, -negated)
            if not config.use_tree_spec:
                heap.clear()
            if depth < max_depth:
                self._offer(heap, match.memory, state, -negated, parent=node, depth=depth + 1)
        return found

    def _offer(
        self,
        heap: list[tuple[float, int, float, int, State, int, int]],
        memory: Memory[State],
        state: State,
        path_prob: float,
        *,
        parent: int,
        depth: int,
    ) -> None:
        """Put a state's likely enough continuations on the heap, newest first among equals."""
        following = list(memory.followers(state))
        total = sum(count for _, _, count in following)
        order = -parent * (1 << 32)
        for token, after, count in following:
            order -= 1
            prob = count / total
            if path_prob * prob >= self.config.min_token_prob:
                item = (-path_prob * prob, order, prob, token, after, parent, depth)
                heapq.heappush(heap, item)
