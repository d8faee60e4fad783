"""transformers: keyword arguments of `generate`, in a runnable script; it is never run here.

`assistant_model` and `prompt_lookup_num_tokens` are in every 4.46+; `use_mtp` and DFlash
(`speculation_type`) since 5.15. What the assistant drafts is set on its own generation config.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.deploy import table
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import ReadYaml, read_mapping, read_python
from playground.deploy.table import Codec, DroppedSetting, Field, Values, const, load_engine, method

NEW = (5, 15)
ASSISTANT = "assistant_model"
TOKENIZER = "assistant_tokenizer"
DRAFTING = ("num_assistant_tokens", "assistant_confidence")
"""Prefixes of fields of the assistant's generation config."""
WORDS = ("assist", "lookup", "lookbehind", "matching_ngram", "specul", "mtp", "custom", "do_sample")
"""Arguments of `generate` with none of these in their names do not affect drafting."""
ELSEWHERE = "generation_config."
"""Prefix of such a field where it is not set on the assistant's generation config."""


def _write_draft_model(writer: Writer, values: Values) -> None:
    """With another vocabulary, transformers passes text between the models unless it samples."""
    if writer.config.vocabulary == "text":
        writer.take("vocabulary")
        values[TOKENIZER] = writer.model()
        writer.notes.append("When sampling (do_sample), transformers drafts by shared tokens.")


def _read_draft_model(reader: Reader) -> None:
    if reader.find(TOKENIZER):
        sampled = reader.values.get("do_sample") is True
        reader.settings["vocabulary"] = "intersection" if sampled else "text"
        reader.used.add(TOKENIZER)


ONE_TOKEN = "transformers drafts one token per MTP layer; 1 is used here."
MTP = (
    const("use_mtp", True),
    DroppedSetting(
        "max_draft_len",
        "max_draft_len={c.max_draft_len} is dropped: transformers drafts one token per MTP layer.",
        lambda config: config.max_draft_len > 1,
    ),
)
NGRAM = (
    Field("max_draft_len", "prompt_lookup_num_tokens"),
    *table.same_name("max_matching_ngram_size"),
    table.drops_pool(
        "transformers has lookup rules of its own (lookup=transformers here)",
        lambda config: config.lookup != "transformers",
    ),
)
DRAFT_MODEL = (
    table.weights(ASSISTANT),
    Field(
        "max_draft_len",
        "num_assistant_tokens",
        default=20,
        note="num_assistant_tokens is not set: 20, transformers' default, is used.",
    ),
    const("num_assistant_tokens_schedule", "constant", note="here the length stays constant."),
    Field(
        "confidence_threshold",
        "assistant_confidence_threshold",
        default=0.4,
        note="assistant_confidence_threshold is not set: 0.4, its default, is used.",
    ),
    DroppedSetting(
        "",
        "Where scikit-learn is installed, transformers moves confidence_threshold="
        "{c.confidence_threshold} as it goes.",
        lambda config: config.confidence_threshold > 0,
    ),
    DroppedSetting(
        "use_draft_probs",
        "use_draft_probs=false is dropped: when sampling, transformers samples the drafts and "
        "verifies them with their probabilities.",
        lambda config: not config.use_draft_probs,
    ),
    Codec((TOKENIZER,), _write_draft_model, _read_draft_model),
)
DFLASH = (table.weights(ASSISTANT), const("speculation_type", "dflash"))
METHODS = {
    "model": method("Draft_Target", "", *DRAFT_MODEL),
    "lookup": method("NGram", "", *NGRAM, implied={"lookup": "transformers"}),
    "mtp": method("MTP", "", *MTP, since=NEW, read_notes=(ONE_TOKEN,)),
    "dflash": method("DFlash", "", *DFLASH, since=NEW),
}


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """Keyword arguments of `generate`, from a mapping or a script's calls and assignments."""
    if "(" not in text:
        expected = "Paste a script that calls generate(…), or its keyword arguments"
        return _drafting(read_mapping(text, read_yaml, expected), ELSEWHERE), None
    nodes, value_of = read_python(text)
    assigned, kwargs = dict[tuple[str, str], Any](), dict[str, Any]()
    assistant = target = None
    configs = set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Attribute(attr="generation_config") as place],
                value=ast.Call(keywords=keywords) as call,
            ):
                configs.add(call)
                config = ast.unparse(place)
                assigned |= {(config, w.arg): value_of(w.value) for w in keywords if w.arg}
            case ast.Assign(targets=[ast.Attribute(attr=key, value=place)], value=value):
                if value_of(place) == "generation_config":
                    assigned[ast.unparse(place), key] = value_of(value)
            case ast.Call(func=func, keywords=keywords) if node not in configs:
                if value_of(func) in ("generate", "GenerationConfig"):
                    words = {word.arg: word.value for word in keywords if word.arg}
                    kwargs |= {key: value_of(value) for key, value in words.items()}
                    if ASSISTANT in words:
                        assistant = f"{ast.unparse(words[ASSISTANT])}.generation_config"
                match func:
                    case ast.Attribute(attr="generate", value=ast.Name(id=name) as owner):
                        target = None if value_of(owner) == name else value_of(owner)
    own = {key: value for (config, key), value in assigned.items() if config == assistant}
    rest = {key: value for (config, key), value in assigned.items() if config != assistant}
    return _drafting(own) | _drafting(rest | kwargs, ELSEWHERE), target


def _drafting(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What affects drafting; the prefix is put before what is the assistant's to configure."""
    keys = (key for key in values if any(word in key for word in WORDS))
    return {prefix * key.startswith(DRAFTING) + key: values[key] for key in keys}


def _find_method(reader: Reader) -> table.Method:
    if reader.find("prompt_lookup_num_tokens"):
        return METHODS["lookup"]
    if reader.values.get("use_mtp"):
        return METHODS["mtp"]
    if reader.find(ASSISTANT) is None:
        raise ConfigError(
            "The call drafts nothing: it has none of assistant_model, prompt_lookup_num_tokens and "
            "use_mtp."
        )
    return METHODS["dflash" if reader.values.get("speculation_type") == "dflash" else "model"]


ENGINE = load_engine(
    "transformers",
    methods=tuple(METHODS.values()),
    parse=_parse,
    find_method=_find_method,
)
