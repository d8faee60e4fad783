"""A GGUF file's vocabulary: its tokens, what kind each is, and which begin and end a text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.pre import ADD_BOS, PATTERNS
from engine.safe_text import short

PREFIX = "tokenizer.ggml."
NO_TOKEN = 0xFFFFFFFF
"""How some converters write that there is no such token: -1."""


class TokenType(IntEnum):
    """Of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL: frozenset[int] = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
"""Types of tokens that are no text."""
SPECIAL_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "gemma4": {},
}
"""By `tokenizer.ggml.model`: the ids that a file need not name, if their tokens are special."""
NOT_REBUILT = {
    "bert": "WordPiece, which encoders use",
    "rwkv": "RWKV's search for the longest token",
    "plamo2": "PLaMo 2's search over a table of suffixes",
    "hybriddna": "one for DNA",
    "whitespace": "one of encoders",
    "test": "one of llama.cpp's tests",
}
"""Kinds of tokenizers that are refused, and what they are."""
TURN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens that end a text or a turn in any vocabulary, and are control tokens for that."""
FILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens that end a text that fills a gap, where no field names one."""
FILL_MARKS = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>",
)  # fmt: skip
"""Further tokens that are control tokens, whatever their type."""
NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|call|>", "<|flush|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|calls|>", "<|return|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)
"""Where a vocabulary has all of the first, the second ends a message or is plain, not an end."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A file's tokens.

    Attributes:
        where: the file, for messages.
        model: of `tokenizer.ggml.model`, a key of `SPECIAL_IDS`.
        tokens: as in the file, an empty one by its number.
        types: a `TokenType` per token.
        ids: of each token.
        pre: how byte-pair encodings split a text, a key of `PATTERNS`.
        end_ids: the tokens that end a text or a turn.
        add_space: whether a text begins with a space that is not in it.
    """

    where: str
    model: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    pre: str
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space: bool


def read_vocabulary(file: GGUFFile) -> Vocabulary | None:
    """The file's vocabulary; None where it has none.

    Raises SourceError: a field is damaged or contradicts another, or its tokenizer is of a kind
    that cannot be rebuilt.
    """
    where, model = str(file.path), file.metadata.get(PREFIX + "model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in SPECIAL_IDS:
        kind = NOT_REBUILT.get(model, "unknown here") if isinstance(model, str) else "damaged"
        raise SourceError(
            f"{where}: its tokenizer (tokenizer.ggml.model = {short(model)}) cannot be rebuilt; it "
            f"is {kind}. Load the model from a folder with its tokenizer.json."
        )
    tokens, types = _tokens(file)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise SourceError(f"{where}: its vocabulary has the token {short(twice)} twice.")
    pre = _splitting(file, model)
    special = {
        name: _token_id(file, name, types, SPECIAL_IDS[model].get(name))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", *FILL_ENDS)
    }
    ends = _end_ids(ids, types, special)
    add_bos = _flag(file, "add_bos_token", pre in ADD_BOS or model == "llama")
    return Vocabulary(
        where,
        model,
        tokens,
        types,
        ids,
        pre,
        bos_id=special["bos"],
        eos_id=special["eos"],
        unk_id=special["unknown"],
        pad_id=special["padding"],
        end_ids=ends,
        add_bos=add_bos or pre == "gemma4",
        add_eos=_flag(file, "add_eos_token", model == "t5"),
        add_space=_flag(file, "add_space_prefix", model == "llama"),
    )


def array(file: GGUFFile, field: str, *kinds: type) -> list[Any]:
    """An array of `tokenizer.ggml.`; empty without it.

    Raises SourceError: its items are of no such kind.
    """
    values = file.array(PREFIX + field)
    if values and type(values[0]) not in kinds:
        raise SourceError(f"{file.path}: {PREFIX}{field} must not hold {short(values[0])}.")
    return values


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """The tokens and their types."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(array(file, "tokens", str))]
    if not tokens:
        raise SourceError(f"{file.path}: its vocabulary (tokenizer.ggml.tokens) has no tokens.")
    embedding = file.entries.get("token_embd.weight")
    if embedding is not None and embedding.shape[-1] < len(tokens):
        raise SourceError(
            f"{file.path}: its vocabulary has {len(tokens)} tokens, but its model only "
            f"{embedding.shape[-1]}."
        )
    types = array(file, "token_type", int) or [TokenType.NORMAL] * len(tokens)
    if len(types) < len(tokens):
        raise SourceError(
            f"{file.path}: it has {len(tokens)} tokens, but the types of {len(types)} "
            "(tokenizer.ggml.token_type)."
        )
    return tokens, types[: len(tokens)]


def _splitting(file: GGUFFile, model: str) -> str:
    """The name of the file's splitting; of the oldest files, which name none, the default."""
    if model == "gemma4":
        return model
    name = file.metadata.get(PREFIX + "pre") or "default"
    if model == "gpt2" and name not in PATTERNS:
        raise SourceError(
            f"{file.path} splits texts in a way that is unknown here (tokenizer.ggml.pre = "
            f"{short(name)}), so its model would get other tokens than it was trained on. Load "
            "the model from a folder with its tokenizer.json."
        )
    return str(name) if model == "gpt2" else "default"


def _token_id(file: GGUFFile, name: str, types: list[int], default: int | None) -> int | None:
    """The token that the field `….NAME_token_id` names; None where there is none."""
    field = f"{PREFIX}{name}_token_id"
    value = file.metadata.get(field, NO_TOKEN)
    if value in (NO_TOKEN, -1):
        if default is None or default >= len(types) or types[default] not in SPECIAL:
            return None
        return default
    if not isinstance(value, int) or not 0 <= value < len(types):
        raise SourceError(
            f"{file.path}: {field} is {short(value)}, but its tokens have the ids 0 to "
            f"{len(types) - 1}."
        )
    return value


def _flag(file: GGUFFile, field: str, default: bool) -> bool:
    value: Any = file.metadata.get(PREFIX + field, default)
    if not isinstance(value, bool):
        raise SourceError(
            f"{file.path}: {PREFIX}{field} must be true or false, not {short(value)}."
        )
    return value


def _end_ids(
    ids: dict[str, int], types: list[int], special: dict[str, int | None]
) -> tuple[int, ...]:
    """The tokens that end a text or a turn; marks in `types` which are control tokens."""
    plain = {text for others, text in NO_ENDS if all(other in ids for other in others)}
    ends = {ids[text] for text in TURN_ENDS if text in ids and text not in plain}
    for field, texts in FILL_ENDS.items():
        if special[field] is None:
            ends.update([ids[text] for text in texts if text in ids][:1])
    for token_id in (*ends, *(ids[text] for text in FILL_MARKS if text in ids)):
        types[token_id] = TokenType.CONTROL
    named = (special[field] for field in ("eos", "eot", "eom", *FILL_ENDS))
    return tuple(sorted(ends.union(token_id for token_id in named if token_id is not None)))
