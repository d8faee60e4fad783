"""A GGUF file's tokenizer, from the file's own vocabulary: the ids are llama.cpp's.

It is written in the format of the `tokenizers` library, which reads it in a fraction of the time
that building it takes. Expressions come from our table only, never from the file.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from engine.errors import SourceError, first_line
from engine.model.files import read_settings
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.tokenizer_models import Json, model_parts
from engine.model.gguf.vocabulary import SPECIAL, TokenType, Vocabulary, read_vocabulary
from engine.model.tokenizer import check_tokenizer, is_panic

TEMPLATE = "tokenizer.chat_template"
"""Field of the chat template; `….NAME` holds a named one."""
HONOURED = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        "model pre tokens scores token_type merges precompiled_charsmap add_bos_token "
        "add_eos_token add_space_prefix remove_extra_whitespaces bos_token_id eos_token_id "
        "eot_token_id eom_token_id unknown_token_id padding_token_id fim_pad_token_id "
        "fim_rep_token_id fim_sep_token_id suppress_tokens"
    ).split()
)
"""Fields that make the tokenizer, the ends of a text, or a remark."""
HARMLESS = frozenset(
    {"tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.chat_templates"}
) | frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        "token_type_count seperator_token_id cls_token_id mask_token_id add_sep_token "
        "fim_pre_token_id fim_suf_token_id fim_mid_token_id prefix_token_id suffix_token_id "
        "middle_token_id normalizer.lowercase normalizer.strip_accents"
    ).split()
)
"""Fields that say nothing new, or are used by encoders and by filling in code only."""


def check_fields(file: GGUFFile) -> None:
    """Raises SourceError: a `tokenizer.` field is unknown, so that its effect is, too."""
    known = HONOURED | HARMLESS | {TEMPLATE}
    for name in file.field_names:
        is_ours = name.startswith("tokenizer.")
        if is_ours and name not in known and not name.startswith(f"{TEMPLATE}."):
            raise SourceError(
                f"{file.path} has the field {name}, and nothing here knows what it does to the "
                "tokens. Use a file without it."
            )


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write a file's tokenizer and the ends of its texts, for `read_tokenizer` and `end_ids`.

    Raises SourceError: a field is unknown, damaged or contradicts another, or the kind of
    tokenizer is one that cannot be rebuilt.
    """
    check_fields(file)
    vocabulary = read_vocabulary(file)
    if vocabulary is None:
        return
    tokenizer, settings = _tokenizer_json(file, vocabulary), _settings(file, vocabulary)
    ends = {"eos_token_id": list(vocabulary.end_ids)}
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("generation_config.json", ends),
    ):
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


def read_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase | None:
    """The tokenizer that `write_tokenizer` wrote; None if the file had none.

    Raises SourceError: the library refuses it.
    """
    from transformers import PreTrainedTokenizerFast

    place = folder / "tokenizer.json"
    if not place.is_file():
        return None
    settings = read_settings(folder / "tokenizer_config.json")
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place), **settings)
    except BaseException as error:  # the library's own are plain Exceptions, or panics
        if type(error) is Exception or is_panic(error):
            reason = first_line(error)
            raise SourceError(f"{folder}: its tokenizer could not be read: {reason}.") from error
        raise
    check_tokenizer(tokenizer, str(folder))
    return tokenizer


def end_ids(folder: Path) -> list[int]:
    """The tokens that end a text or a turn, as `write_tokenizer` wrote them."""
    place = folder / "generation_config.json"
    return list(read_settings(place)["eos_token_id"]) if place.is_file() else []


def tokenizer_remark(file: GGUFFile) -> str:
    """What of the file's tokenizer may differ from its model's, in a sentence; "" = nothing."""
    sentences = []
    fields = file.metadata
    if fields.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in fields:
        sentences.append(
            "The file does not say how its tokenizer splits a text (tokenizer.ggml.pre), so the "
            "text may be worse than the model's; a newer conversion says it."
        )
    if num_suppressed := len(file.array("tokenizer.ggml.suppress_tokens")):
        sentences.append(
            f"The file asks that {num_suppressed} tokens are never chosen "
            "(tokenizer.ggml.suppress_tokens); here they can be."
        )
    return " ".join(sentences)


def _tokenizer_json(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """The tokenizer in the format of the `tokenizers` library."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(file, vocabulary)),
        "post_processor": _template(vocabulary),
        **model_parts(file, vocabulary),
    }


def _added_tokens(file: GGUFFile, vocabulary: Vocabulary) -> Iterator[Json]:
    """The tokens that are found in a text before it is split."""
    name = str(file.metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name  # no field says that they swallow spaces
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in SPECIAL or kind == TokenType.USER_DEFINED:
            yield {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": kind in SPECIAL,
            }


def _template(vocabulary: Vocabulary) -> Json:
    """The tokens before and after every text."""
    before = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
    after = [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []

    tokens = vocabulary.tokens
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    first, last = (
        [{"SpecialToken": {"id": tokens[i], "type_id": 0}} for i in ids] for ids in (before, after)
    )
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0], *last],
        "pair": [*first, *texts, *last],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
            for i in (*before, *after)
        },
    }


def _settings(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """What transformers keeps beside the tokenizer: the names of tokens, and chat templates."""
    settings: Json = {"clean_up_tokenization_spaces": False}
    ids = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    for name, token_id in ids.items():
        # A plain token is no special one because a field names it: its text would vanish.
        if token_id is not None and vocabulary.types[token_id] in SPECIAL:
            settings[name] = vocabulary.tokens[token_id]
    if template := chat_templates(file.metadata):
        settings["chat_template"] = template
    return settings


def chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all by name (the first is `default`) where there are named ones."""
    named = {
        name.removeprefix(f"{TEMPLATE}."): text
        for name, text in metadata.items()
        if name.startswith(f"{TEMPLATE}.") and isinstance(text, str) and text
    }
    template = metadata.get(TEMPLATE)
    if not isinstance(template, str) or not template:
        return named or None
    return {"default": template, **named} if named else template
