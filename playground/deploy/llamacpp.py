"""llama.cpp: `llama-server` flags, LLAMA_ARG_… variables, or a section of an INI preset.

The names changed in April and May 2026 (ggml-org/llama.cpp#22397, #22964), and builds since then
refuse the old ones: --draft-max became --spec-draft-n-max, and every type that drafts with a model
is called draft-…. Build 9235 has all new names. p_min is always written out: its default went from
0.75 to 0, and with long drafts that decides acceptance (#25908). Build 11368 has
--spec-draft-sampling (#27694). Source: tools/server/README.md.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.deploy import table
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import Flags, ReadYaml, gguf_name, read_flags
from playground.deploy.table import Codec, DroppedSetting, Field, Values, const, load_engine, method

TYPE = "--spec-type"
LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
SAMPLING_BUILD = (11368,)
"""First build in which a draft model and MTP layers can sample their drafts."""
VARIABLE = "LLAMA_ARG_"
VARIABLE_LINE = re.compile(rf"^\s*-?\s*({VARIABLE}\w+)\s*[:=]\s*", re.MULTILINE)
PRESET = re.compile(r"^[ \t]*\[([^\]\n]+)\][ \t]*$", re.MULTILINE)
ENTRY = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
TARGETS = ("-m", "--model", "-hf", "--hf-repo", "--m", "--hf")
# ---- rows


WEIGHTS = Field(
    "speculative_model",
    "-md",
    (
        *("--spec-draft-model", "--model-draft", "--spec-draft-hf", "-hfd", "-hfrd"),
        *("--hf-repo-draft", "--spec-draft-hf-repo"),
    ),
    build=lambda writer: gguf_name(writer.model()),
    decode=lambda model: None if model == f"{table.PLACEHOLDER}.gguf" else model,
)
OLD_LENGTHS = ("--draft-max", "--draft", "--draft-n")
LENGTH = Field(
    "max_draft_len",
    "--spec-draft-n-max",
    OLD_LENGTHS,
    requirement="Set max_draft_len; more than the trained block is cut to it. llama.cpp drafts 3 "
    "tokens unless told otherwise.",
    default=3,
    note="No draft length is given: 3, the default of builds since April 2026, is used.",
)
MIN_LENGTH = const("--spec-draft-n-min", 0, aliases=("--draft-min",))
P_MIN: Any = {"key": "--spec-draft-p-min", "aliases": ("--draft-p-min",)}
FULL_LENGTH = const(value=0.0, kind=float, note="the full length is drafted here.", **P_MIN)
THRESHOLD = Field(
    "confidence_threshold",
    default=0.0,
    note="No p_min is given: 0 is used; builds before April 2026 used 0.75.",
    **P_MIN,
)


def _ngram(name: str, field: Field) -> Field:
    """A row with its key in each n-gram type, and the old key."""
    key, *aliases = (f"--spec-{kind}-{name}" for kind in (*LOOKUPS, "ngram"))
    return dataclasses.replace(field, key=key, aliases=tuple(aliases))


# ---- lookup, then a draft model


def _write_combined(writer: Writer, values: Values) -> None:
    """The types as one list: lookup drafts first wherever it finds a match, as here."""
    first, second = writer.take("retrieval"), writer.take("model")
    drafting = [method.decoding_type for method in DRAFTING]
    if first.decoding_type != "NGram" or second.decoding_type not in drafting:
        raise table.UnsupportedError(
            f"llama.cpp cannot combine {first.decoding_type} with {second.decoding_type}.",
            f"It combines NGram with {', '.join(drafting)}.",
        )
    values[TYPE] = ""
    for config in (first, second):
        nested = writer.nested(config)
        inner = nested.values()
        values |= {**inner, TYPE: f"{values[TYPE]},{inner[TYPE]}".lstrip(",")}
        nested.finish(f"{config.decoding_type}: ")


def _read_combined(reader: Reader) -> None:
    first, second = (_method_of_type(reader, kind) for kind in _type_names(reader))
    reader.settings = {"retrieval": reader.read(first), "model": reader.read(second)}


def _type_names(reader: Reader) -> list[str]:
    """The types in drafting order; a draft model alone implies one."""
    kinds = [kind for part in str(reader.values.get(TYPE, "")).split(",") if (kind := part.strip())]
    return kinds or (["draft-simple"] if reader.find(*WEIGHTS.keys) else [])


def _method_of_type(reader: Reader, kind: str) -> table.Method:
    """The method of a type; MTP layers in a file of their own are an assistant."""
    if kind == ASSISTANT.name and reader.find(*WEIGHTS.keys):
        return ASSISTANT
    return table.method_named(METHODS, TYPE, kind)


# ---- the table


GEMMA_NOTE = (
    "Builds since June 2026 load Gemma 4's assistants (llama.cpp#23398); at first not those of E2B "
    "and E4B. Not tried here: look for the assistant in the server's log."
)
DEFAULTS = (MIN_LENGTH, FULL_LENGTH)
SAME_TOKEN = table.drops_draft_probs(
    ": this build keeps a drafted token only where the target draws the same one; when sampling, "
    "acceptance falls.",
    until=SAMPLING_BUILD,
)
SAMPLING = table.sampled("--spec-draft-sampling", "probabilistic", since=SAMPLING_BUILD)
DRAFT_MODEL = (WEIGHTS, LENGTH, MIN_LENGTH, THRESHOLD, SAMPLING, SAME_TOKEN)
ASSISTANT = method("MTP_Assistant", "draft-mtp", WEIGHTS, LENGTH, *DEFAULTS, notes=(GEMMA_NOTE,))
DRAFTING = (
    method("Draft_Target", "draft-simple", *DRAFT_MODEL, aliases=("draft",)),
    method("Eagle3", "draft-eagle3", WEIGHTS, LENGTH, *DEFAULTS),
    method("MTP", "draft-mtp", LENGTH, *DEFAULTS),
    ASSISTANT,
    method("DFlash", "draft-dflash", WEIGHTS, LENGTH, *DEFAULTS),
    method("DSpark", "draft-dspark", WEIGHTS, LENGTH, *DEFAULTS, since=(10507,)),
)
SIMPLE_RULES = ("pool", True, False, False)
NGRAM = (
    _ngram("size-n", Field("max_matching_ngram_size", "", default=12)),
    _ngram("size-m", Field("max_draft_len", "", default=48)),
    _ngram("min-hits", const("", 1, note="here one occurrence is enough.")),
    table.read_only("max_draft_len", OLD_LENGTHS[0], aliases=OLD_LENGTHS[1:]),
    DroppedSetting(
        "",
        "ngram-simple looks up exactly {c.max_matching_ngram_size} tokens: the shorter matches "
        "tried here after them are dropped.",
        lambda config: config.max_matching_ngram_size > 1,
    ),
    table.drops_pool(
        "ngram-simple copies what followed the last occurrence in the request's own text",
        lambda c: (c.lookup, c.is_keep_all, c.is_use_oldest, c.is_public_pool) != SIMPLE_RULES,
    ),
)
COMBINED = method("Combined", "", Codec((), _write_combined, _read_combined))
MOD_NOTE = "ngram-mod shares a pool between requests, but wants patterns of 16 tokens or more."
SHORTER_NOTE = "Here shorter matches are tried, too, where the longest finds nothing."
METHODS = (
    method(
        "NGram",
        LOOKUPS[0],
        *NGRAM,
        aliases=LOOKUPS[1:],
        implied={"is_use_oldest": False, "is_public_pool": False},
        notes=(MOD_NOTE,),
        read_notes=(SHORTER_NOTE,),
    ),
    *DRAFTING,
    COMBINED,
)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    flags = _read_options(text)
    drafting = {key: value for key, value in flags.options.items() if _is_drafting(key)}
    return drafting, flags.first(*TARGETS)


def _is_drafting(flag: str) -> bool:
    return flag in ENGINE.keys or flag.startswith(("--spec", "--draft"))


def _read_options(text: str) -> Flags:
    """The options of a command and its variables, which flags override, or of an INI preset.

    Raises:
        ConfigError: it cannot be parsed, or the preset has several models.
    """
    if sections := PRESET.findall(text):
        if len(models := [name for name in sections if name != "*"]) > 1:
            raise ConfigError(f"The preset has several models, {', '.join(models):.200}. Keep one.")
        return Flags({_flag(key): value for key, value in ENTRY.findall(text)}, (), {})
    flags = read_flags(VARIABLE_LINE.sub(r"\1=", text))
    variables = {_flag(k): v for k, v in flags.environment.items() if k.startswith(VARIABLE)}
    return flags._replace(options={**variables, **flags.options})


def _flag(name: str) -> str:
    """The flag for a variable or a preset's key."""
    name = name.removeprefix(VARIABLE).lower() if name.startswith(VARIABLE) else name
    return f"-{name}" if f"-{name}" in ENGINE.keys else f"--{name}".replace("_", "-")


def _find_method(reader: Reader) -> table.Method:
    kinds = _type_names(reader)
    if not kinds or kinds == ["none"]:
        raise ConfigError(f"The command names neither {TYPE} nor a draft model (-md).")
    if reader.find(*OLD_LENGTHS, "--draft-min"):
        reader.notes.append("Builds since April 2026 refuse the old names such as --draft-max.")
    if kinds[0] in LOOKUPS[1:]:
        reader.notes.append(f"{kinds[0]} counts occurrences; here the newest one is copied.")
    drafting = {name for method in DRAFTING for name in (method.name, *method.aliases)}
    if len(kinds) == 2 and kinds[0] in LOOKUPS and kinds[1] in drafting:
        return COMBINED
    if len(kinds) > 1:
        raise ConfigError(
            f"{TYPE} {','.join(kinds)} has no counterpart here; an n-gram type followed by a "
            "draft type has."
        )
    return _method_of_type(reader, kinds[0])


ENGINE = load_engine(
    "llamacpp",
    methods=METHODS,
    parse=_parse,
    find_method=_find_method,
)
