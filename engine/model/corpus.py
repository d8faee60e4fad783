"""A corpus: dialogues that a target generated, in append-only files.

    corpus.json        manifest: target, vocabulary, settings, versions
    dialogues.jsonl    a line per dialogue: number, category, token ids, and spans of its answers

A killed process leaves at most one partial line, which is dropped when the corpus is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from engine.config import Settings
from engine.errors import ConfigError, first_line
from engine.model.files import check_file, read_settings
from engine.model.target import Target

MANIFEST = "corpus.json"
"""Its presence makes a folder a corpus."""
DIALOGUES = "dialogues.jsonl"
TokenIds = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A stored dialogue.

    Attributes:
        token_ids: `(length,)` int32.
        spans: `[start, end)` of its answers, in tokens.
    """

    number: int
    category: str
    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return len(self.token_ids)


class _Manifest(Settings):
    model_config = ConfigDict(extra="allow", title=MANIFEST)

    target: str
    weights: str | None = None
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int
    num_layers: int


_TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]


class _Line(Settings):
    model_config = ConfigDict(extra="ignore")

    n: int
    category: str
    answers: tuple[tuple[_TokenId, _TokenId], ...]
    tokens: tuple[_TokenId, ...]

    def entry(self, vocab_size: int) -> Entry:
        """Raises ValueError: an answer or a token id is out of range."""
        if max(self.tokens, default=0) >= vocab_size:
            raise ValueError(f"token {max(self.tokens)} is beyond the vocabulary of {vocab_size}")
        if any(not start <= end <= len(self.tokens) for start, end in self.answers):
            raise ValueError("an answer is outside the dialogue")
        return Entry(self.n, self.category, np.array(self.tokens, np.int32), self.answers)


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Dialogues in memory: 4 bytes a token."""

    folder: Path
    manifest: dict[str, Any]
    entries: list[Entry]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """An existing corpus.

        Raises ConfigError, SourceError: there is none, or its files are damaged.
        """
        if not (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} is not a corpus: it has no {MANIFEST}.")
        manifest = read_settings(folder / MANIFEST)
        vocab_size = _Manifest.parse(manifest, where=str(folder / MANIFEST)).vocab_size
        file, entries = folder / DIALOGUES, list[Entry]()
        if file.exists():
            check_file(file)
            # The last line is partial if no newline ends it.
            for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
                try:
                    entries.append(_Line.model_validate_json(line).entry(vocab_size))
                except (ValidationError, ValueError) as error:
                    raise ConfigError(
                        f"{file}, line {number} is not a dialogue: {first_line(error)}. "
                        "Copy it again."
                    ) from error
        return cls(folder, manifest, entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    def is_made_by(self, target: Target) -> bool:
        """Whether these weights generated the corpus, as far as is known."""
        sizes = ("vocab_size", "hidden_size", "num_layers")
        same = all(self.manifest[size] == getattr(target, size) for size in sizes)
        weights, ours = self.manifest.get("weights"), target.provenance.get("weights")
        return same and not (weights and ours and weights != ours)

    def check_made_by(self, target: Target) -> None:
        """Raises ConfigError: another model generated the corpus."""
        if not self.is_made_by(target):
            raise ConfigError(
                f"The corpus in {self.folder} was written by {self.manifest['target']}, but the "
                f"target is {target.name}. Give another folder."
            )
