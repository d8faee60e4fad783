"""Sequence packing: dialogues in one row, and the target's features of them.

Dialogues are concatenated without padding; each starts at position 0 and attends only to itself.

    token     a b c d | e f g
    position  0 1 2 3 | 0 1 2
    segment   0 0 0 0 | 1 1 1
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from engine.drafters.heads.vocabulary import Vocabulary
from engine.errors import ConfigError
from engine.model.corpus import Corpus, Entry
from engine.model.files import read_tensors
from engine.model.sources import atomic_write
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.corpus.dialogues import seed_of
from engine.training.losses import CHUNK, LMHead, TopProbs

HELD_OUT_EVERY = 32
"""One in this many dialogues is held out."""
OPEN_PACKS = 8
"""Packs filled in parallel, to minimise the padding at their ends."""
TOP_PROBS = 16
"""Tokens kept of the target's distribution per row."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Dialogues of n tokens in all, and the target's features of them.

    Attributes:
        tokens, positions, segments: `(n,)` int64.
        loss_mask: `(n,)` bool, whether the loss covers this token: one of an answer.
        hidden: `(n, hidden)` float32, the target's last hidden state after its final norm.
        layers: `(n, layers * hidden)` float32, inputs of the required layers, or None.
        teacher: the target's distributions of the token after each row.
        length: number of real rows; the others are padding.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    loss_mask: Tensor
    hidden: Tensor
    layers: Tensor | None
    teacher: TopProbs
    length: int

    def padded(self, length: int) -> Pack:
        """The pack padded to at least `length` by another text outside the loss."""
        padding = length - len(self.tokens)
        if padding <= 0:
            return self
        zeros, teacher, below = self.tokens.new_zeros(padding), self.teacher, (0, 0, 0, padding)
        return Pack(
            torch.cat([self.tokens, zeros]),
            torch.cat([self.positions, torch.arange(padding, device=zeros.device)]),
            torch.cat([self.segments, zeros + self.segments[-1] + 1]),
            torch.cat([self.loss_mask, zeros.bool()]),
            pad(self.hidden, below),
            None if self.layers is None else pad(self.layers, below),
            TopProbs(pad(teacher.indices, below), pad(teacher.probs, below)),
            self.length,
        )

    def rows_before(self, offset: int) -> Tensor:
        """Rows `(m,)` whose token `offset` ahead is in the same dialogue and in the loss."""
        n = len(self.tokens)
        if offset >= n:
            return self.tokens.new_empty(0)
        same = self.segments[: n - offset] == self.segments[offset:]
        return (same & self.loss_mask[offset:]).nonzero()[:, 0]


def split_held_out(corpus: Corpus, num_dialogues: int) -> tuple[list[Entry], list[Entry]]:
    """Training and held-out dialogues among the first `num_dialogues`.

    Raises ConfigError: too few to hold any out.
    """
    entries = corpus.entries[:num_dialogues]
    held_out = [e for e in entries if seed_of("held out", e.number) % HELD_OUT_EVERY == 0]
    held_out = held_out or entries[1:][-1:]
    numbers = {e.number for e in held_out}
    train = [e for e in entries if e.number not in numbers]
    if not train or not held_out:
        raise ConfigError(
            f"The corpus in {corpus.folder} has {len(entries)} dialogues; training needs at least "
            "2. Make it larger."
        )
    return train, held_out


def make_packs(entries: Sequence[Entry], pack_tokens: int, seed: int) -> list[tuple[Entry, ...]]:
    """Packs of up to `pack_tokens` tokens, or one longer dialogue, determined by the seed."""
    shuffled = sorted(entries, key=lambda entry: entry.number)
    random.Random(seed).shuffle(shuffled)
    packs: list[tuple[Entry, ...]] = []
    filling: list[tuple[int, tuple[Entry, ...]]] = [(0, ())] * OPEN_PACKS  # tokens, dialogues
    for entry in shuffled:
        # Into the fullest pack that has room; else the fullest is closed and replaced.
        fitting = [f for f in filling if f[0] + entry.length <= pack_tokens]
        size, pack = best = max(fitting or filling, key=lambda f: f[0])
        filling.remove(best)
        if not fitting and pack:
            packs.append(pack)
            size, pack = 0, ()
        filling.append((size + entry.length, (*pack, entry)))
    return [*packs, *(pack for _, pack in filling if pack)]


class FeatureStore:
    """Caches features of packs on disk, in the target's dtype, up to a number of bytes.

    Packs with the same seed and size are the same for every method, so methods share them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def get(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """A pack's tensors, stored under a name or computed; they are stored if there is room.

        Raises SourceError: the stored file is damaged.
        """
        file = self._folder / f"{name}.safetensors"
        if file.is_file():
            return read_tensors(file)
        tensors = compute()
        stored = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        size = sum(tensor.nbytes for tensor in stored.values())
        if self._bytes + size <= self._max_bytes:
            with atomic_write(file) as partial:
                save_file(stored, partial)
            self._bytes += size
        return tensors


class Teacher:
    """Computes packs: the target's features and distributions of dialogues."""

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        layers: tuple[int, ...],
        vocabulary: Vocabulary,
        *,
        store: FeatureStore | None = None,
    ) -> None:
        """`layers`: whose inputs packs have; `vocabulary`: of the target's distributions."""
        corpus.check_made_by(target)
        self._store = store
        self.target = target
        facts = (target.provenance.get(fact) for fact in ("weights", "revision"))
        self._weights = (*facts, target.dtype_name)
        self._needs = Needs(hidden=True, layers=layers)
        self._vocabulary = vocabulary
        self._lm_head = LMHead.of(target, vocabulary)
        self._layers = "-".join(["layers", *map(str, layers)])

    @torch.no_grad()
    def read(self, entries: Sequence[Entry], *, length: int = 0) -> Pack:
        """The pack of these dialogues on the target's device.

        Args:
            length: shorter packs are padded to it (`Pack.padded`).
        """
        device = self.target.device
        ids = [torch.from_numpy(e.token_ids).long() for e in entries]
        tokens = torch.cat(ids).to(device)
        positions = torch.cat([torch.arange(e.length) for e in entries]).to(device)
        segments = torch.cat([torch.full_like(text, i) for i, text in enumerate(ids)]).to(device)
        loss_mask = torch.cat([_answer_mask(e) for e in entries]).to(device)
        texts = (tokens, positions, segments)
        forward = functools.cache(lambda: self.target.read_texts(*texts, self._needs))

        def feature(name: str, kind: str) -> Tensor:
            return self._cached(entries, kind, lambda: {name: getattr(forward(), name)})[name]

        hidden = feature("hidden", "hidden")
        layers = feature("layers", self._layers).float() if self._needs.layers else None
        likely = f"likely-{self._vocabulary.key}"
        best = self._cached(entries, likely, lambda: self._top_probs(hidden))
        teacher = TopProbs(best["places"].long(), best["probs"].float())
        row = (tokens, positions, segments, loss_mask, hidden.float(), layers, teacher)
        return Pack(*row, len(tokens)).padded(length)

    def _cached(
        self, entries: Sequence[Entry], kind: str, compute: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """Tensors of this kind on the target's device, through the store if there is one."""
        if self._store is None:
            return compute()
        name = f"{seed_of(*self._weights, *(e.token_ids.tolist() for e in entries)):016x}-{kind}"
        tensors = self._store.get(name, compute)
        return {name: tensor.to(self.target.device) for name, tensor in tensors.items()}

    def _top_probs(self, hidden: Tensor) -> dict[str, Tensor]:
        """The most probable tokens after each row, and their probabilities, normalised to 1."""
        parts = []
        count = len(hidden)
        for rows in pad(hidden, (0, 0, 0, -count % CHUNK)).split(CHUNK):
            logits = self._lm_head(rows).float()
            best = logits.topk(min(TOP_PROBS, logits.shape[-1]))
            small = torch.int16 if logits.shape[-1] <= 1 << 15 else torch.int32
            parts.append((best.indices.to(small), best.values.softmax(dim=-1).half()))
        indices, probs = (torch.cat(column)[:count] for column in zip(*parts, strict=True))
        return {"places": indices, "probs": probs}


def _answer_mask(entry: Entry) -> Tensor:
    """Whether a token is of one of the target's answers: `(n,)` bool."""
    mask = torch.zeros(entry.length, dtype=torch.bool)
    for start, end in entry.spans:
        mask[start:end] = True
    return mask


def frequent_tokens(entries: Sequence[Entry], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent token ids of answers, int64; ties are decided by all texts."""
    answers = torch.zeros(vocab_size, dtype=torch.float64)
    everything = torch.zeros(vocab_size, dtype=torch.float64)
    for entry in entries:
        ids = torch.from_numpy(entry.token_ids).long()
        everything += torch.bincount(ids, minlength=vocab_size)
        for start, end in entry.spans:
            answers += torch.bincount(ids[start:end], minlength=vocab_size)
    score = answers + everything / (everything.sum() + 1)
    return torch.argsort(score, descending=True, stable=True)[: min(count, vocab_size)]
