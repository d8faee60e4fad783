"""A corpus: dialogues that the target wrote, kept in files that are only ever appended to.

    corpus.json        whose text it is: target, vocabulary, settings, versions
    shard-00000.bin    token ids, one dialogue after the other, little endian
    shard-00000.jsonl  a line per dialogue, written after its tokens: where they are, what they are

A run that dies leaves at most half a line or tokens without a line; opening the corpus cuts both
off. Nothing that was finished is ever lost, and the first n dialogues never change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from engine.config import Settings
from engine.errors import ConfigError, SourceError, first_line
from engine.model.files import check_file, read_settings
from engine.model.target import Target

MANIFEST = "corpus.json"
"""Its presence makes a folder a corpus."""
MAX_DIGITS = 9
"""Of a shard's number."""


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


_Place = Annotated[int, Field(ge=0, le=1 << 40)]


class _Manifest(Settings):
    """What a manifest must say."""

    model_config = ConfigDict(extra="allow", title=MANIFEST)

    target: str
    weights: str | None = None
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int
    num_layers: int
    token_dtype: Literal["<u2", "<u4"]


class _Line(Settings):
    """A dialogue as a line of an index has it."""

    model_config = ConfigDict(extra="ignore")

    n: int
    category: str
    start: _Place
    length: _Place
    answers: tuple[tuple[_Place, _Place], ...]

    def entry(self, shard: int) -> Entry:
        return Entry(self.n, self.category, shard, self.start, self.length, self.answers)


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

        Raises ConfigError, SourceError: there is none, or its files are damaged.
        """
        if not (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} is not a corpus: it has no {MANIFEST}.")
        manifest = read_settings(folder / MANIFEST)
        _Manifest.parse(manifest, where=str(folder / MANIFEST))
        entries: list[Entry] = []
        itemsize = np.dtype(manifest["token_dtype"]).itemsize
        for shard in sorted({file.stem for file in folder.glob("shard-*")}):
            data, index = folder / f"{shard}.bin", folder / f"{shard}.jsonl"
            # A new shard's tokens are there before its index.
            found = _read_index(index) if index.exists() else []
            stored = check_file(data) // itemsize
            if stored and not index.exists():
                raise ConfigError(f"{data} has no index beside it. Copy the corpus again.")
            named = max((entry.start + entry.length for entry in found), default=0)
            if named > stored:
                raise ConfigError(
                    f"{data} holds {stored} tokens, but its index names {named}. It is damaged; "
                    "copy it again."
                )
            entries += found
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
        """Token ids of a dialogue, `(length,)`; a view into the file.

        ConfigError if one is beyond the vocabulary.
        """
        file = self.folder / f"shard-{entry.shard:05}.bin"
        end = entry.start + entry.length
        if entry.shard not in self._maps or len(self._maps[entry.shard]) < end:
            stored = file.stat().st_size // self._dtype.itemsize
            self._maps[entry.shard] = np.memmap(file, self._dtype, mode="r", shape=(stored,))
        found = self._maps[entry.shard][entry.start : end]
        if len(found) and int(found.max()) >= self.manifest["vocab_size"]:
            raise ConfigError(
                f"{file} has token {int(found.max())}, but its vocabulary has "
                f"{self.manifest['vocab_size']}. It is damaged; copy it again."
            )
        return found

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


def _read_index(file: Path) -> list[Entry]:
    """Entries of a shard; a last line without its end was never finished."""
    check_file(file)
    number = file.stem.removeprefix("shard-")
    if not (number.isdecimal() and len(number) <= MAX_DIGITS):
        raise SourceError(f"{file} is not a shard of a corpus: shards are numbered. Remove it.")
    entries = []
    for n, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entries.append(_Line.model_validate_json(line).entry(int(number)))
        except ValidationError as error:
            raise ConfigError(
                f"{file}, line {n} is not a dialogue: {first_line(error)}. Copy it again."
            ) from error
    return entries
