"""Suffix decoding: continue as the text, or an earlier one, went on after the same words.

A suffix automaton over prompt and output, and optionally one over earlier runs, counts how often
each token followed the text's last tokens. The longer the match, the longer the draft.

A datastore, a large corpus of texts such as the target writes, is searched the same way through a
suffix array (REST).

Lossless under sampling: drafts follow from the committed tokens and from earlier forwards, so they
are fixed before the step's random draws.
Source: arXiv:2411.04975, section 3 (tree expansion, Alg. 1). Two differences: an automaton in
place of suffix trees holds the same counts in less space, and a token's probability is its share
of the occurrences *with a continuation*, so the text's own end does not count.
The datastore: arXiv:2311.08252, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from engine.config import UnitFloat, setting
from engine.drafters.base import BuildContext, Drafter, DraftSession, Start, Traits
from engine.drafters.lookup.array import SuffixArray, token_type
from engine.drafters.lookup.automaton import ROOT, Cursor, SuffixAutomaton
from engine.drafters.lookup.paths import Continuation, most_probable_paths
from engine.drafters.method import DraftShape, MethodConfig, draft_len, draft_nodes
from engine.errors import ConfigError
from engine.model.corpus import DIALOGUES, Corpus
from engine.proposal import Budget, Proposal

TEXT_BYTES, RUNS_BYTES, STORE_BYTES = 256 << 20, 1 << 30, 2 << 30
"""The most memory of a run's own text, of earlier runs and of a corpus."""


class SuffixConfig(MethodConfig):
    """Settings of suffix decoding, named as in ArcticInference and vLLM.

    Memory is bounded: a text's automaton at `TEXT_BYTES` and that of earlier runs at `RUNS_BYTES`
    (either then begins anew), a corpus's array at `STORE_BYTES` (a larger one is refused) and the
    cache of its continuations at 64 MiB.
    """

    title = "Suffix"
    summary = (
        "Drafts what followed the longest matching context in the prompt, the output and, if "
        "wanted, earlier runs. No weights."
    )
    paper = "2411.04975"
    main_settings = "drafting max_draft_len use_tree_spec"
    looks_up = True

    without_effect = (
        ({"use_tree_spec": False}, "max_total_draft_tokens"),
        ({"use_global_pool": False}, "global_pool_size"),
    )

    decoding_type: Literal["Suffix"] = "Suffix"
    max_draft_len: int = draft_len(16, " on one path")
    use_tree_spec: bool = setting(False, "Draft a tree", "draft a tree of likely continuations")
    max_total_draft_tokens: int = draft_nodes(32, " (with use_tree_spec)", most=256)
    max_tree_depth: int = setting(
        24,
        "Longest context",
        "longest context that is matched, including the draft, in tokens",
        ge=2,
        le=256,
    )
    max_spec_factor: float = setting(
        1.0, "Draft tokens per matched token", "drafted tokens per matched token", gt=0.0, le=16.0
    )
    min_token_prob: UnitFloat = setting(
        0.1, "Least path probability", "least estimated probability of a drafted path"
    )
    use_global_pool: bool = setting(False, "Match earlier runs", "also match texts of earlier runs")
    global_pool_size: int = setting(
        100_000,
        "Tokens of earlier runs",
        "forget all earlier runs once they have so many tokens, or take 1 GiB",
        ge=1000,
        le=10_000_000,
    )

    datastore: str | None = setting(
        None,
        "Corpus",
        "a corpus that `specdec train` made, to match as well: its folder, or the name "
        "of a shipped one",
    )

    def draft_shape(self) -> DraftShape:
        nodes = self.max_total_draft_tokens if self.use_tree_spec else self.max_draft_len
        return DraftShape(self.max_draft_len, nodes)

    def build(self, context: BuildContext) -> SuffixDrafter:
        store = None
        if self.datastore is not None:
            folder = Path(context.locate(self.datastore, "corpora"))
            corpus = Corpus.open(folder)
            corpus.check_made_by(context.target)
            if not corpus.entries:
                raise ConfigError(f"The corpus in {folder} has no dialogues. Give another one.")
            stamp = (folder / DIALOGUES).stat().st_mtime_ns
            store = _corpus_array(folder, stamp, self.max_tree_depth)
        return SuffixDrafter(context, self, store)


@functools.lru_cache(maxsize=1)
def _corpus_array(folder: Path, stamp: int, depth: int) -> SuffixArray:
    """A corpus's suffix array, cached: sorting takes a second per million tokens.

    Args:
        stamp: changes when the corpus does.

    Raises ConfigError: it would take more than `STORE_BYTES`.
    """
    corpus = Corpus.open(folder)
    vocab = int(corpus.manifest["vocab_size"])
    num_bytes = corpus.num_tokens * depth * token_type(vocab).itemsize
    if num_bytes > STORE_BYTES:
        raise ConfigError(
            f"datastore must take at most {STORE_BYTES / 2**30:.0f} GiB in memory, got "
            f"{num_bytes / 2**30:.1f} GiB at max_tree_depth {depth}. Lower max_tree_depth or use a "
            "smaller corpus."
        )
    return SuffixArray((entry.token_ids for entry in corpus.entries), depth, vocab)


class Memory(Protocol):
    """An index of texts; a state stands for all occurrences of a context."""

    def followers(self, state: Any) -> Sequence[tuple[int, Any, int]]:
        """Per continuation: token, next state, occurrences; oldest first if ordered."""


class Context(NamedTuple):
    """The text's last tokens as they occur in a memory.

    Attributes:
        length: number of matching tokens.
        max_depth: its continuations are counted up to this many tokens.
    """

    memory: Memory
    state: Any
    length: int
    max_depth: int


class SuffixSession(DraftSession["SuffixDrafter"]):
    def __init__(self, drafter: SuffixDrafter, start: Start) -> None:
        super().__init__(drafter, start)
        self._local = SuffixAutomaton(drafter.config.max_tree_depth, TEXT_BYTES)
        self._cursor, self._num_read = Cursor(drafter.pool), 0

    def read(self) -> None:
        for token in self.text[self._num_read :]:
            self._local.append(token)
            self._cursor.advance(token)
        self._num_read = len(self.text)

    def propose(self, budget: Budget) -> Proposal:
        self.read()
        best = self.best_continuation(budget)
        self.match_len = best.match_len
        if best.match_len < self.start.min_match_len:
            best = Continuation()
        return best.proposal(self.root, self.drafter.device)

    def best_continuation(self, budget: Budget) -> Continuation:
        """The highest-scoring draft; the text itself wins ties, then the longer match."""
        config, best = self.drafter.config, Continuation()
        most = config.max_total_draft_tokens if config.use_tree_spec else config.max_draft_len
        for match in self._matches():
            room = min(int(match.length * config.max_spec_factor + 1e-6), most)
            # No path is more probable than 1, so a match with this room cannot score more.
            if room <= best.score:
                continue
            draft = most_probable_paths(
                match.state,
                functools.partial(_shares, match.memory),
                room=room,
                max_depth=min(budget.depth, config.max_draft_len, match.max_depth),
                min_prob=max(config.min_token_prob, budget.min_prob),
                chain=not config.use_tree_spec,
                newest_first=True,
            )
            if draft.score > best.score:
                draft.match_len = match.length
                best = draft
        return best

    def close(self) -> None:
        pool, config = self.drafter.pool, self.drafter.config
        if config.use_global_pool:
            if pool.num_tokens >= config.global_pool_size:
                pool.clear()
            for token in self.text:
                pool.append(token)
            pool.end_sequence()

    def _matches(self) -> Iterator[Context]:
        """Every matched context, per memory longest first."""
        depth, store = self.drafter.config.max_tree_depth, self.drafter.store
        starts = [(self._local, self._local.suffix, depth)]
        starts += [(self.drafter.pool, self._cursor.state, self._cursor.length)]
        for automaton, state, longest in starts:
            while state != ROOT:
                # Continuations of a state are those of its shortest string.
                max_depth = depth - automaton.shortest(state)
                length = min(automaton.length[state], longest)
                yield Context(automaton, state, length, max_depth)
                state = automaton.link[state]
        if store is not None:
            for rows in store.matches(self.text[-depth:]):
                yield Context(store, rows, rows.length, depth - rows.length)


class SuffixDrafter(Drafter):
    """Attributes:
    pool: earlier texts.
    store: a corpus.
    """

    session = SuffixSession

    def __init__(
        self, context: BuildContext, config: SuffixConfig, store: SuffixArray | None = None
    ) -> None:
        self.config, self.store, self.device = config, store, context.target.device
        self.pool = SuffixAutomaton(config.max_tree_depth, RUNS_BYTES)
        self.traits = Traits(remembers=config.use_global_pool)


def _shares(memory: Memory, state: Any) -> Iterator[tuple[int, float, Any]]:
    """The continuations of a context, oldest first, with their shares."""
    followers = memory.followers(state)
    total = sum(count for _, _, count in followers)
    for token, after, count in followers:
        yield token, count / total, after
