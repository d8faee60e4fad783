"""llama.cpp: `llama-server` flags.

The names changed in April and May 2026 (ggml-org/llama.cpp#22397, #22964), and builds since then
refuse the old ones: --draft-max became --spec-draft-n-max, and every type that drafts with a model
is called draft-…. Build 9235 has all new names. p_min is always written out: its default went from
0.75 to 0, and with long drafts that decides acceptance (#25908).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from engine.errors import ConfigError
from engine.interop import fields
from engine.interop.conversion import Reader, Writer
from engine.interop.fields import NO_MODEL, Engine, Field, Loss, Method, Refusal, Values, const
from engine.interop.handoff import File, ReadYaml, Version, command, read_flags

NEW = (9235,)
"""Build from which on all names are the new ones."""
TYPE = "--spec-type"
MODEL = ("-md", "--spec-draft-model", "--model-draft", "--spec-draft-hf", "-hfd", "-hfrd",
         "--hf-repo-draft")  # fmt: skip
LENGTH = ("--spec-draft-n-max", ("--draft-max", "--draft", "--draft-n"))
OLD = (*LENGTH[1], "--draft-min")
KNOWN = frozenset(
    "--spec-draft-p-split --draft-p-split --spec-draft-ngl -ngld --gpu-layers-draft "
    "--n-gpu-layers-draft --spec-draft-device -devd --device-draft --spec-draft-type-k -ctkd "
    "--cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft --spec-draft-threads -td "
    "--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --ctx-size-draft -cd "
    "--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-cpu-moe -cmoed "
    "--cpu-moe-draft --spec-draft-n-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-conf-min "
    "--spec-synth-rates --spec-synth-len --spec-default --spec-ngram-check-rate "
    "--spec-ngram-mod-n-match --spec-ngram-mod-n-min --spec-ngram-mod-n-max --lookup-cache-static "
    "-lcs --lookup-cache-dynamic -lcd".split()
)
REFUSES = {
    "--spec-draft-n-min": Refusal("drafts that are shorter are thrown away", ("0",)),
    "--draft-min": Refusal("drafts that are shorter are thrown away", ("0",)),
    "--draft-n-min": Refusal("drafts that are shorter are thrown away", ("0",)),
    "--spec-synth-rates": Refusal("acceptance is made up, for testing a server"),
    "--spec-synth-len": Refusal("acceptance is made up, for testing a server"),
    "--spec-default": Refusal("it stands for ngram-mod, which looks up hashed n-grams"),
    "--spec-ngram-check-rate": Refusal("lookups are left out", ("1",)),
    "--spec-draft-conf-min": Refusal("a draft ends where its head is in doubt", ("0", "0.0")),
}
LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
RULES = (
    "ngram-simple copies what followed the last occurrence in the request's own text: the pool "
    f"rules (lookup, {', '.join(fields.POOL_RULES.split())}) are dropped."
)
GGUF = (
    "llama.cpp loads GGUF files: convert a folder of weights with "
    "python convert_hf_to_gguf.py FOLDER --outfile NAME.gguf; heads also need --target-model-dir."
)


def _gguf(model: str) -> str:
    """File name that a model's conversion would have; a GGUF file as it is."""
    return model if model.endswith(".gguf") else f"{PurePath(model).name}.gguf"


def _kinds(reader: Reader) -> list[str]:
    """The types in the order in which they draft; a draft model alone is one, too."""
    kinds = [kind for part in str(reader.values.get(TYPE, "")).split(",") if (kind := part.strip())]
    return kinds or (["draft-simple"] if reader.find(*MODEL) else [])


def _write_combined(writer: Writer, values: Values) -> None:
    """Types in one list: lookup comes first wherever it finds something, as here."""
    first, second = writer.take("retrieval"), writer.take("model")
    drafting = [method.ours for method in DRAFTING]
    fits = first.decoding_type == "NGram" and second.decoding_type in drafting
    if not writer.at_least(*NEW) or not fits:
        raise fields.NotTakenError(
            f"llama.cpp cannot combine {first.decoding_type} with {second.decoding_type}.",
            f"From build {NEW[0]} on it combines NGram with {', '.join(drafting)}.",
        )
    values[TYPE] = ""
    for config in (first, second):
        part = writer.part(config)
        made = part.values()
        kind = made.pop(TYPE)
        values |= {TYPE: f"{values[TYPE]},{kind}".lstrip(","), **made}
        part.finish(f"{config.decoding_type}: ")


def _of_kind(reader: Reader, kind: str) -> Method:
    """The method of a type; next-token layers in a file of their own are an assistant."""
    if kind == ASSISTANT.theirs and reader.find(*MODEL):
        return ASSISTANT
    return fields.require_named(METHODS, TYPE, kind)


def _read_combined(reader: Reader) -> None:
    first, second = (_of_kind(reader, kind) for kind in _kinds(reader))
    reader.settings = {"retrieval": reader.read(first), "model": reader.read(second)}


def _renamed(field: Field, old: str) -> tuple[Field, Field]:
    """A row under its name from `NEW` on, and under the old one."""
    note = "" if field.ours else field.note
    before = dataclasses.replace(field, theirs=old, also=(), absent=None, note=note, until=NEW)
    return dataclasses.replace(field, since=NEW), before


def _weights(model: str) -> str | None:
    return None if model == f"{NO_MODEL}.gguf" else model


WEIGHTS = Field(
    "speculative_model",
    MODEL[0],
    MODEL[1:],
    write=lambda writer: _gguf(writer.model()),
    back=_weights,
)
LEAST = _renamed(const("--spec-draft-n-min", 0), "--draft-min")
P_MIN = _renamed(
    const("--spec-draft-p-min", 0.0, kind=float, note="the full length is drafted here."),
    "--draft-p-min",
)


def _length(write: Callable[[Writer], Any] | None = None) -> tuple[Field, Field]:
    note = "No draft length is given: 3, the default of builds since April 2026, is used."
    needed = (
        "Set max_draft_len; more than the trained block is cut to it. llama.cpp drafts 3 tokens "
        "unless told otherwise."
    )
    field = Field("max_draft_len", *LENGTH, write=write, needed=needed, absent=3, note=note)
    return _renamed(field, "--draft-max")


def _ngram(name: str, field: Field) -> tuple[Field, Field]:
    """A row under the names that it has in each n-gram type, and under the old one."""
    theirs, *also = (f"--spec-{kind}-{name}" for kind in LOOKUPS)
    old = f"--spec-ngram-{name}"
    return _renamed(dataclasses.replace(field, theirs=theirs, also=(*also, old)), old)


def _new(
    ours: str, kind: str, *rows: Field | Loss, since: Version = NEW, notes: tuple[str, ...] = ()
) -> Method:
    """A type that builds have under this name from `NEW` on, or later."""
    return Method(ours, kind, (*rows, *LEAST, *P_MIN), since=since, notes=notes)


ASSISTANT = _new(
    "MTP_Assistant",
    "draft-mtp",
    WEIGHTS,
    *_length(),
    notes=(
        "Builds since June 2026 load Gemma 4's assistants (llama.cpp#23398); at first not those of "
        "E2B and E4B. Not tried here: look for the assistant in the server's log.",
    ),
)
DRAFTING = (
    Method(
        "Draft_Target",
        "draft-simple",
        (
            WEIGHTS,
            *_length(),
            *LEAST,
            *_renamed(
                Field(
                    "confidence_threshold",
                    "--spec-draft-p-min",
                    ("--draft-p-min",),
                    absent=0.0,
                    note="No p_min is given: 0 is used; builds before April 2026 had 0.75.",
                ),
                "--draft-p-min",
            ),
            fields.drops_draft_probs(
                ": llama.cpp keeps a drafted token only where the target draws the same one; when "
                "sampling, acceptance falls."
            ),
        ),
        also=("draft",),
        fixed={"use_draft_probs": False},
    ),
    _new(
        "Eagle3",
        "draft-eagle3",
        WEIGHTS,
        *_length(lambda writer: writer.chain_of_levels("llama-server drafts")),
    ),
    _new("MTP", "draft-mtp", *_length()),
    ASSISTANT,
    *(
        _new(
            ours,
            f"draft-{ours.lower()}",
            WEIGHTS,
            *_length(),
            fields.drops_block_tree("llama.cpp"),
            since=since,
        )
        for ours, since in (("DFlash", NEW), ("DSpark", (10507,)))
    ),
)
METHODS = (
    Method(
        "NGram",
        "ngram-simple",
        (
            *_ngram("size-n", Field("max_matching_ngram_size", "", absent=12)),
            *_ngram("size-m", Field("max_draft_len", "", absent=48)),
            *_ngram("min-hits", const("", 1, note="here one occurrence is enough.")),
            Field("max_draft_len", "--draft-max", LENGTH[1], until=NEW),
            Loss(
                "",
                "ngram-simple looks up exactly {c.max_matching_ngram_size} tokens: the shorter "
                "matches tried here after them are dropped.",
                lambda config: config.max_matching_ngram_size > 1,
            ),
            Loss(
                f"lookup {fields.POOL_RULES}",
                RULES,
                lambda c: (
                    (c.lookup, c.is_keep_all, c.is_use_oldest, c.is_public_pool)
                    != ("pool", True, False, False)
                ),
            ),
        ),
        also=LOOKUPS[1:],
        fixed={"is_use_oldest": False, "is_public_pool": False},
        notes=(
            "ngram-mod shares a pool between requests, but wants patterns of 16 tokens or more.",
        ),
        read_notes=("Here shorter matches are tried, too, where the longest finds nothing.",),
    ),
    *DRAFTING,
    Method("Combined", "", write=_write_combined, read=_read_combined),
)


def _files(writer: Writer, values: Values) -> tuple[File, ...]:
    target = writer.target
    if not all(model.endswith(".gguf") for model in (target, *writer.models)):
        writer.notes.append(GGUF)
    if values.get(TYPE) == "draft-simple" and not writer.at_least(*NEW):
        del values[TYPE]
    text = command(f"llama-server -m {shlex.quote(_gguf(target))}", *values.items())
    return (File("serve.sh", text, "bash"),)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    flags = read_flags(text)
    prefixes, names = ("--spec", "--draft"), {*MODEL, *KNOWN}
    values = {
        key: value
        for key, value in flags.options.items()
        if key in names or key.startswith(prefixes)
    }
    return values, flags.first("-m", "--model", "-hf", "--hf-repo")


def _pick(reader: Reader) -> Method:
    kinds = _kinds(reader)
    if (key := "--spec-default") in reader.values:
        REFUSES[key].check("llama.cpp", key, "")
    if not kinds or kinds == ["none"]:
        raise ConfigError(f"The command names neither {TYPE} nor a draft model (-md).")
    if reader.find(*OLD):
        reader.notes.append("Builds since April 2026 refuse the old names such as --draft-max.")
    if kinds[0] in LOOKUPS[1:]:
        reader.notes.append(f"{kinds[0]} counts occurrences; here the newest one is copied.")
    if len(kinds) == 2 and kinds[0] in LOOKUPS and fields.named(DRAFTING, kinds[1]):
        return METHODS[-1]
    if len(kinds) > 1:
        raise ConfigError(
            f"{TYPE} {','.join(kinds)} has no counterpart here; an n-gram type followed by a "
            "draft type has."
        )
    return _of_kind(reader, kinds[0])


ENGINE = Engine(
    name="llamacpp",
    title="llama.cpp",
    versions=(
        ("b10507", "the newest known here; old names are refused"),
        (f"b{NEW[0]}", "May 2026, the first with all new names"),
        ("b8000", "before April 2026: --draft-max and others"),
    ),
    trees="chains only",
    key=TYPE,
    plain="--spec-type and a draft model",
    drafters="Drafters there are C++ and part of the build.",
    methods=METHODS,
    refused={
        "Lookahead": (
            "llama-server has no lookahead; it is an example program only.",
            "N-gram lookup: without weights, too.",
        )
    },
    files=_files,
    parse=_parse,
    pick=_pick,
    known=KNOWN.union(*(method.keys for method in METHODS)),
    refuses=REFUSES,
    reasons={
        "eagle3_layers_to_capture": "The conversion to GGUF fixes the layers.",
        "mask_token_id": "The conversion to GGUF fixes it.",
        "min_match_len": "llama.cpp looks up first wherever its n-gram occurs.",
        "target_layer_ids": "The conversion to GGUF fixes it.",
    },
    hybrid=(
        Loss(
            "",
            "Builds before late April 2026 do not draft on targets with recurrent layers "
            "(llama.cpp#19493).",
            until=NEW,
        ),
        Loss(
            "",
            "Where a build cannot roll this target's recurrent state back, it saves all of it at "
            "every step, which has made drafting several times slower than plain decoding "
            "(llama.cpp#28120). Measure with and without drafts.",
            since=NEW,
        ),
    ),
)
