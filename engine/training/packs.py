"""Training texts laid end to end: a pack of dialogues, and what the target shows of it.

A pack has no padding: dialogues follow each other in one row, each starts at position 0 and sees
only itself.

    token     a b c d | e f g
    position  0 1 2 3 | 0 1 2
    segment   0 0 0 0 | 1 1 1
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.corpus import Corpus, Entry
from engine.errors import ConfigError
from engine.features import FeatureTap
from engine.masks import MaskBuilder
from engine.proposal import Needs
from engine.target import Target
from engine.training.dialogue import seed_of

HELD_OUT_EVERY = 32
"""One dialogue in so many is never trained on."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Dialogues of n tokens in all, and the target's features of them.

    Attributes:
        tokens: `(n,)` int64.
        positions: `(n,)` int64, from 0 in every dialogue.
        segments: `(n,)` int64 number of the dialogue.
        wanted: `(n,)` bool, whether a drafter is to learn to predict this token.
        hidden: `(n, hidden)` float32, the target's last hidden state after its final norm.
        layers: `(n, layers * hidden)` float32, inputs of the layers asked for; None if none were.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    wanted: Tensor
    hidden: Tensor
    layers: Tensor | None

    @property
    def visible(self) -> Tensor:
        """Who sees whom, `(n, n)` bool: what came before in the same dialogue, and itself."""
        same = self.segments[:, None] == self.segments[None]
        return same & (self.positions[:, None] >= self.positions[None])

    def ahead(self, offset: int) -> Tensor:
        """Rows `(m,)` whose token `offset` places ahead is of the same dialogue and wanted."""
        n = len(self.tokens)
        if offset >= n:
            return self.tokens.new_empty(0)
        same = self.segments[: n - offset] == self.segments[offset:]
        return (same & self.wanted[offset:]).nonzero()[:, 0]


def split(corpus: Corpus, num_dialogues: int) -> tuple[list[Entry], list[Entry]]:
    """Dialogues to train on, and held-out ones, of the first `num_dialogues`.

    Raises:
        ConfigError: too few to hold any out.
    """
    entries = corpus.entries[:num_dialogues]
    held = [e for e in entries if seed_of("held out", e.number) % HELD_OUT_EVERY == 0]
    if not held and len(entries) > 1:
        held = [entries[-1]]
    taken = {e.number for e in held}
    train = [e for e in entries if e.number not in taken]
    if not train or not held:
        raise ConfigError(
            f"The corpus in {corpus.folder} has {len(entries)} dialogues; training needs at least "
            "2. Make it larger."
        )
    return train, held


def arrange(
    corpus: Corpus, entries: Sequence[Entry], pack_tokens: int, seed: int
) -> list[tuple[Entry, ...]]:
    """Packs of up to `pack_tokens` tokens (or one longer dialogue), the same for the same seed."""
    shuffled = sorted(entries, key=lambda entry: entry.number)
    random.Random(seed).shuffle(shuffled)
    packs: list[tuple[Entry, ...]] = []
    pack: list[Entry] = []
    size = 0
    for entry in shuffled:
        if pack and size + entry.length > pack_tokens:
            packs.append(tuple(pack))
            pack, size = [], 0
        pack.append(entry)
        size += entry.length
    return [*packs, tuple(pack)] if pack else packs


class FeatureStore:
    """Features of packs on disk, in the target's dtype, up to a number of bytes.

    Packs are the same for every method with the same seed and size, so methods share them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def find(self, entries: Sequence[Entry], needs: Needs) -> tuple[Tensor, Tensor | None] | None:
        """`hidden` and `layers` of a pack, if all that is needed was kept."""
        file = self._file(entries, needs)
        if not file.is_file() and not needs.layers:
            # Whoever kept layers kept the last hidden state beside them.
            file = next(self._folder.glob(f"{file.stem}-*.safetensors"), file)
        if not file.is_file():
            return None
        with safe_open(file, framework="pt") as stored:
            layers = stored.get_tensor("layers") if needs.layers else None
            return stored.get_tensor("hidden"), layers

    def keep(
        self, entries: Sequence[Entry], needs: Needs, features: tuple[Tensor, Tensor | None]
    ) -> None:
        """Write a pack's features if there is room for them."""
        named = dict(zip(("hidden", "layers"), features, strict=True))
        tensors = {k: v.detach().cpu().contiguous() for k, v in named.items() if v is not None}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes + size > self._max_bytes:
            return
        file = self._file(entries, needs)
        partial = file.with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, file)
        self._bytes += size

    def _file(self, entries: Sequence[Entry], needs: Needs) -> Path:
        key = f"{seed_of('features', *(entry.number for entry in entries)):016x}"
        name = "-".join([key, *map(str, needs.layers)])
        return self._folder / f"{name}.safetensors"


class Teacher:
    """Reads packs through the target."""

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        needs: Needs,
        *,
        answers_only: bool,
        store: FeatureStore | None = None,
    ) -> None:
        corpus.check_made_by(target)
        self._store = store
        self.target = target
        self._corpus = corpus
        self._needs = Needs(hidden=True, layers=needs.layers)
        self._answers_only = answers_only
        self._masks = MaskBuilder(target.model)
        self._tap = FeatureTap(target.model)

    @torch.no_grad()
    def read(self, entries: Sequence[Entry]) -> Pack:
        """The pack of these dialogues on the target's device."""
        device = self.target.device
        ids = [torch.from_numpy(self._corpus.tokens(e).astype("int64")) for e in entries]
        tokens = torch.cat(ids).to(device)
        positions = torch.cat([torch.arange(len(i)) for i in ids]).to(device)
        numbers = torch.arange(len(ids)).repeat_interleave(torch.tensor([len(i) for i in ids]))
        wanted = torch.cat([self._wanted(e) for e in entries]).to(device)
        blank = Pack(tokens, positions, numbers.to(device), wanted, torch.empty(0), None)
        found = self._store.find(entries, self._needs) if self._store else None
        if found is None:
            found = self._features(blank, single=len(ids) == 1)
            if self._store:
                self._store.keep(entries, self._needs, found)
        hidden, layers = (None if part is None else part.to(device).float() for part in found)
        assert hidden is not None
        return Pack(tokens, positions, blank.segments, wanted, hidden, layers)

    def _wanted(self, entry: Entry) -> Tensor:
        wanted = torch.full((entry.length,), not self._answers_only)
        for start, end in entry.spans:
            wanted[start:end] = True
        return wanted

    def _features(self, pack: Pack, *, single: bool) -> tuple[Tensor, Tensor | None]:
        self._tap.watch(self._needs)
        visible = None if single else pack.visible
        mask = self._masks.build(pack.positions, visible, 0, self.target.dtype)
        # The decoder alone: logits of all rows would be far larger than everything else.
        self.target.model.get_decoder()(
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None],
            attention_mask=mask,
            use_cache=False,
        )
        hidden, layers = self._tap.take()
        assert hidden is not None
        return hidden, layers

    @torch.no_grad()
    def logits(self, hidden: Tensor, vocabulary: Tensor | None) -> Tensor:
        """The target's logits `(rows, vocabulary)` float32 for hidden states `(rows, hidden)`."""
        return project(self.target, hidden, vocabulary).float()

    def close(self) -> None:
        """Remove the hooks."""
        self._tap.close()


def project(target: Target, hidden: Tensor, vocabulary: Tensor | None) -> Tensor:
    """`lm_head` of hidden states, for these token ids only if some are given; differentiable."""
    head = target.lm_head
    hidden = hidden.to(target.dtype)
    if vocabulary is None:
        logits: Tensor = head(hidden)
        return logits
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    logits = torch.nn.functional.linear(
        hidden, weight[vocabulary], None if bias is None else bias[vocabulary]
    )
    softcap = getattr(target.config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def frequent_tokens(
    corpus: Corpus, entries: Sequence[Entry], count: int, vocab_size: int
) -> Tensor:
    """The `count` token ids that the target uses most, ascending int64.

    Answers count; prompts only decide among tokens that answers use equally often.
    """
    answers = torch.zeros(vocab_size, dtype=torch.float64)
    everything = torch.zeros(vocab_size, dtype=torch.float64)
    for entry in entries:
        ids = torch.from_numpy(corpus.tokens(entry).astype("int64"))
        everything += torch.bincount(ids, minlength=vocab_size)
        for start, end in entry.spans:
            answers += torch.bincount(ids[start:end], minlength=vocab_size)
    score = answers + everything / (everything.sum() + 1)
    best = torch.argsort(score, descending=True, stable=True)[: min(count, vocab_size)]
    return best.sort().values
