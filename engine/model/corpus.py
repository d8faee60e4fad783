"""A corpus: dialogues that the target wrote, kept in files that are only ever appended to.

    corpus.json        whose text it is: target, vocabulary, settings, versions
    shard-00000.bin    token ids, one dialogue after the other, little endian
    shard-00000.jsonl  a line per dialogue, written after its tokens: where they are, what they are

A run that dies leaves at most half a line or tokens without a line; opening the corpus cuts both
off. Nothing that was finished is ever lost, and the first n dialogues never change.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from engine.errors import ConfigError
from engine.model.target import Target

MANIFEST = "corpus.json"
"""Its presence makes a folder a corpus."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A dialogue as stored.

    Attributes:
        spans: `[start, end)` of its answers, within the dialogue.
    """

    number: int
    category: str
    shard: int
    start: int
    length: int
    spans: tuple[tuple[int, int], ...]


class Corpus:
    """Dialogues on disk, read through memory maps."""

    def __init__(self, folder: Path, manifest: dict[str, Any], entries: list[Entry]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.entries = entries
        self._dtype = np.dtype(manifest["token_dtype"])
        self._maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """An existing corpus.

        Raises:
            ConfigError: there is none, or its files are damaged.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no corpus ({MANIFEST}): {error}.") from error
        entries: list[Entry] = []
        itemsize = np.dtype(manifest["token_dtype"]).itemsize
        for index in sorted(folder.glob("shard-*.jsonl")):
            shard = int(index.stem.removeprefix("shard-"))
            data = index.with_suffix(".bin")
            stored = data.stat().st_size // itemsize if data.exists() else 0
            entries += [e for e in _read_index(index, shard) if e.start + e.length <= stored]
        return cls(folder, manifest, entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    @property
    def num_answer_tokens(self) -> int:
        return sum(b - a for entry in self.entries for a, b in entry.spans)

    def categories(self) -> dict[str, int]:
        """Dialogues per category."""
        return dict(Counter(entry.category for entry in self.entries))

    def tokens(self, entry: Entry) -> np.ndarray:
        """Token ids of a dialogue, `(length,)`; a view into the file."""
        file = self.folder / f"shard-{entry.shard:05}.bin"
        end = entry.start + entry.length
        if entry.shard not in self._maps or len(self._maps[entry.shard]) < end:
            stored = file.stat().st_size // self._dtype.itemsize
            self._maps[entry.shard] = np.memmap(file, self._dtype, mode="r", shape=(stored,))
        return self._maps[entry.shard][entry.start : end]

    def check_made_by(self, target: Target) -> None:
        """ConfigError if another model wrote the corpus."""
        sizes = ("vocab_size", "hidden_size", "num_layers")
        same = all(self.manifest[size] == getattr(target, size) for size in sizes)
        weights, ours = self.manifest.get("weights"), target.provenance.get("weights")
        if not same or (weights and ours and weights != ours):
            raise ConfigError(
                f"The corpus in {self.folder} was written by {self.manifest['target']}, but the "
                f"target is {target.name}. Give another folder."
            )


def _read_index(file: Path, shard: int) -> list[Entry]:
    """Entries of a shard; a last line without its end was never finished."""
    entries = []
    for line in file.read_bytes().split(b"\n")[:-1]:
        value = json.loads(line)
        spans = tuple((a, b) for a, b in value["answers"])
        entries.append(
            Entry(value["n"], value["category"], shard, value["start"], value["length"], spans)
        )
    return entries
