"""Extends a corpus: the target generates dialogues until there are enough tokens."""

from __future__ import annotations

import json
import os
import platform
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from engine.errors import ConfigError
from engine.model.corpus import DIALOGUES, MANIFEST, Corpus, Entry
from engine.model.placement import free_bytes
from engine.model.sources import atomic_write, writing
from engine.model.target import Target
from engine.model.tokenizer import encode
from engine.training.corpus.dialogues import (
    ChatFormat,
    CorpusSettings,
    DialogueSpec,
    DialogueTemplates,
    GivenPrompt,
    dialogue_specs,
)
from engine.training.corpus.generation import BatchGenerator


class CorpusWriter:
    """Appends dialogues to a corpus, which it creates if necessary."""

    def __init__(self, folder: Path, target: Target, settings: CorpusSettings) -> None:
        """Open for appending, dropping a partial last line.

        Raises ConfigError: it is another target's, has other settings, or is open elsewhere.
        """
        with writing(folder), ExitStack() as stack:
            folder.mkdir(parents=True, exist_ok=True)
            # The system releases the lock when the process dies.
            lock = FileLock(folder / "writing.lock", thread_local=False)
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except Timeout as error:
                raise ConfigError(
                    f"The corpus in {folder} is being written by another process. Wait for it, or "
                    "give another folder."
                ) from error
            self.corpus = _open_or_create(folder, target, settings)
            self._file = (folder / DIALOGUES).open("ab")
            whole = (folder / DIALOGUES).read_bytes().rpartition(b"\n")
            self._file.truncate(len(whole[0]) + len(whole[1]))
            self._closing = stack.pop_all()

    def append(self, entry: Entry) -> None:
        """Write one dialogue; it is passed to the system when this returns."""
        line = {"n": entry.number, "category": entry.category, "answers": entry.spans}
        line["tokens"] = entry.token_ids.tolist()
        with writing(self.corpus.folder):
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        self.corpus.entries.append(entry)

    def close(self) -> None:
        """Flush the file to disk and release the lock."""
        with self._closing, writing(self.corpus.folder), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def _open_or_create(folder: Path, target: Target, settings: CorpusSettings) -> Corpus:
    """The corpus in a folder, created if necessary; raises as `CorpusWriter`."""
    ours = settings.model_dump(mode="json")
    if not (folder / MANIFEST).is_file():
        manifest = {
            "target": target.name,
            "weights": target.provenance.get("weights"),
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "num_layers": target.num_layers,
            "dtype": target.dtype_name,
            "settings": ours,
            "versions": versions(),
        }
        with atomic_write(folder / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    corpus = Corpus.open(folder)
    corpus.check_made_by(target)
    theirs = corpus.manifest["settings"]
    if theirs != ours:
        raise ConfigError(
            f"The corpus in {folder} was made with {theirs}, but the settings are {ours}. Give the "
            "same, or another folder."
        )
    return corpus


def versions() -> dict[str, str]:
    """Versions of Python, torch and transformers."""
    libraries = {module.__name__: module.__version__ for module in (torch, transformers)}
    return {"python": platform.python_version(), **libraries}


def corpus_settings(folder: Path, target: Target, *, seed: int = 0) -> CorpusSettings:
    """The settings of an existing corpus, or new ones that fit the target."""
    if (folder / MANIFEST).is_file():
        return CorpusSettings.parse(Corpus.open(folder).manifest["settings"], where=str(folder))
    new = CorpusSettings(seed=seed)
    return new.replace(max_len=min(new.max_len, target.context_len))


def extend_corpus(
    target: Target,
    folder: Path,
    settings: CorpusSettings,
    templates: DialogueTemplates,
    *,
    num_tokens: int,
    rows: int | None = None,
    prompts: Sequence[GivenPrompt] = (),
) -> Generator[Corpus, None, None]:
    """Extend a corpus to `num_tokens`; yields it at the start, after every dialogue and every step.

    Dialogues are determined by the settings' seed and their number, and stored in order, so an
    interrupted and resumed corpus is the same. Closing the iterator drops unfinished dialogues and
    finished ones that come after them.

    Args:
        rows: dialogues generated at a time; None = as memory allows.

    Raises ConfigError, PromptError: the corpus is another target's, no prompt fits into a dialogue,
    or the target cannot chat.
    """
    if (folder / MANIFEST).is_file():
        # A corpus that is large enough is only read, since another process may be writing it.
        corpus = Corpus.open(folder)
        corpus.check_made_by(target)
        yield corpus
        if corpus.num_tokens >= num_tokens:
            return
    chat = ChatFormat.of(target)
    prompts = _fitting(target, chat, prompts, settings.max_len)
    with closing(CorpusWriter(folder, target, settings)) as writer:
        stored = writer.corpus.num_tokens
        done = frozenset(entry.number for entry in writer.corpus.entries)
        rows = rows or _default_rows(target, settings.max_len)
        generator = BatchGenerator(target, rows=rows, max_len=settings.max_len)
        specs = dialogue_specs(chat, settings, templates, prompts, done)
        for dialogue in _in_order(generator, specs):
            if dialogue is not None and dialogue.spans:
                writer.append(dialogue)
                stored += dialogue.length
            yield writer.corpus
            if stored >= num_tokens:
                return


def _fitting(
    target: Target, chat: ChatFormat, prompts: Sequence[GivenPrompt], max_len: int
) -> list[GivenPrompt]:
    """The prompts that leave room for an answer; ConfigError if there are none."""
    assert target.tokenizer is not None  # or it has no chat format
    tokenizer, empty = target.tokenizer, GivenPrompt("", ("",))  # the least that a template gives
    fitting = [
        prompt
        for prompt in prompts or [empty]
        if len(encode(tokenizer, chat.head + prompt.turns[0] + chat.to_answer)) < max_len
    ]
    if not fitting:
        raise ConfigError(
            f"Prompts must be shorter than {max_len} tokens with the chat template around them, "
            "got longer ones only. Give shorter prompts."
        )
    return [prompt for prompt in fitting if prompt is not empty]


def _in_order(generator: BatchGenerator, specs: Iterator[DialogueSpec]) -> Iterator[Entry | None]:
    """Finished dialogues, reordered as in `specs`; None after every step."""
    numbers: deque[int] = deque()
    finished: dict[int, Entry] = {}

    def numbered() -> Iterator[DialogueSpec]:
        for spec in specs:
            numbers.append(spec.number)
            yield spec

    for dialogue in generator.run(numbered()):
        if dialogue is None:
            yield None
            continue
        finished[dialogue.number] = dialogue
        while numbers and numbers[0] in finished:
            yield finished.pop(numbers.popleft())


def _default_rows(target: Target, max_len: int) -> int:
    """Dialogues to generate at a time: many on an accelerator, using up to half of its free memory.

    Beyond 32 rows a CPU's throughput no longer grows, and dialogues only finish later.
    """
    limit = 32 if target.device.type == "cpu" else 512
    room = free_bytes(target.device) // 2
    return max(1, min(limit, room // (max(1, target.kv_bytes) * max_len)))
