"""llama.cpp: `llama-server` flags.

The names changed in April and May 2026 (ggml-org/llama.cpp#22397, #22964), and builds since then
refuse the old ones: --draft-max became --spec-draft-n-max, and every type that drafts with a model
is called draft-…. Build 9235 has all new names. p_min is always written out: its default went from
0.75 to 0, and with long drafts that decides acceptance (#25908).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.combined import CombinedConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.interop.handoff import (
    Engine,
    File,
    NotTakenError,
    Sheet,
    Writer,
    chain_of_levels,
)
from engine.interop.llamacpp_read import read_llamacpp
from engine.interop.plain import command

Files = tuple[File, ...]
Options = list[tuple[str, object]]
NEW = 9235
"""Build from which on all names are the new ones."""
GGUF = (
    "llama.cpp loads GGUF files: convert a folder of weights with "
    "python convert_hf_to_gguf.py FOLDER --outfile NAME.gguf; heads also need --target-model-dir."
)


def _gguf(model: str) -> str:
    """File name that a model's conversion would have; a GGUF file as it is."""
    return model if model.endswith(".gguf") else f"{PurePath(model).name}.gguf"


def _serve(sheet: Sheet, options: Options) -> Files:
    target = sheet.context.target
    if any(not str(model).endswith(".gguf") for model in (target, *sheet.models)):
        sheet.note(GGUF)
    text = command(f"llama-server -m {shlex.quote(_gguf(target))}", *options)
    return (File("serve.sh", text, "bash"),)


def _flags(options_of: Callable[[Any, Sheet], Options]) -> Writer:
    """A writer from what makes the options."""
    return lambda config, sheet: _serve(sheet, options_of(config, sheet))


def _plain(config: AutoregressiveConfig, sheet: Sheet) -> Options:
    sheet.note("Without --spec-type and a draft model, llama.cpp decodes plainly.")
    return []


def _is_new(sheet: Sheet) -> bool:
    return sheet.at_least(NEW)


def _drafting(sheet: Sheet, kind: str, length: object, p_min: float = 0.0) -> Options:
    """Options of a type that drafts with a model of its own; MTP layers are in the target."""
    if not _is_new(sheet) and kind != "draft-simple":
        raise NotTakenError(
            f"llama.cpp has {kind} under this name from build {NEW} on.",
            f"Use a newer build: --engine-version {NEW}.",
        )
    model: Options = [] if kind == "draft-mtp" else [("-md", _gguf(sheet.model()))]
    if not _is_new(sheet):
        return [*model, ("--draft-max", length), ("--draft-min", 0), ("--draft-p-min", p_min)]
    return [
        ("--spec-type", kind),
        *model,
        ("--spec-draft-n-max", length),
        ("--spec-draft-n-min", 0),
        ("--spec-draft-p-min", p_min),
    ]


def _draft_target(config: DraftTargetConfig, sheet: Sheet) -> Options:
    if sheet.take("use_draft_probs"):
        sheet.warn(
            "use_draft_probs is dropped: llama.cpp keeps a drafted token only where the target "
            "draws the same one; when sampling, acceptance falls."
        )
    p_min = sheet.take("confidence_threshold")
    return _drafting(sheet, "draft-simple", sheet.take("max_draft_len"), p_min)


def _ngram(config: NGramConfig, sheet: Sheet) -> Options:
    size, length = sheet.take("max_matching_ngram_size"), sheet.take("max_draft_len")
    pool = ("lookup", "is_keep_all", "is_use_oldest", "is_public_pool")
    if size > 1:
        sheet.warn(
            f"ngram-simple looks up exactly {size} tokens: the shorter matches tried here after "
            "them are dropped."
        )
    if config.lookup != "pool" or config.is_use_oldest or config.is_public_pool:
        sheet.warn(
            "ngram-simple copies what followed the last occurrence in the request's own text: the "
            f"pool rules ({', '.join(pool)}) are dropped.",
            *pool,
        )
    sheet.used.update(("lookup", "is_use_oldest", "is_public_pool"))
    sheet.note("ngram-mod shares a pool between requests, but wants patterns of 16 tokens or more.")
    prefix = "--spec-ngram-simple" if _is_new(sheet) else "--spec-ngram"
    return [
        ("--spec-type", "ngram-simple"),
        (f"{prefix}-size-n", size),
        (f"{prefix}-size-m", length),
        (f"{prefix}-min-hits", 1),
        *([] if _is_new(sheet) else [("--draft-max", length)]),
    ]


def _eagle3(config: Eagle3Config, sheet: Sheet) -> Options:
    sheet.explain("eagle3_layers_to_capture", "The conversion to GGUF fixes the layers.")
    dynamic = sheet.take("use_dynamic_tree")
    length = (
        chain_of_levels(sheet, "llama-server drafts") if dynamic else sheet.take("max_draft_len")
    )
    return _drafting(sheet, "draft-eagle3", length)


def _mtp(config: MTPConfig, sheet: Sheet) -> Options:
    sheet.explain("use_relaxed_acceptance_for_thinking", "llama.cpp verifies exactly.")
    return _drafting(sheet, "draft-mtp", sheet.take("max_draft_len"))


def _dflash(config: DFlashConfig, sheet: Sheet) -> Options:
    for name in ("mask_token_id", "target_layer_ids"):
        sheet.explain(name, "The conversion to GGUF fixes it.")
    length = sheet.take("max_draft_len")
    if length is None:
        raise NotTakenError(
            "llama.cpp drafts 3 tokens unless told otherwise, and max_draft_len is not set.",
            "Set max_draft_len; more than the trained block is cut to it.",
        )
    return _drafting(sheet, "draft-dflash", length)


_MODELS: dict[str, Callable[[Any, Sheet], Options]] = {
    "Draft_Target": _draft_target,
    "Eagle3": _eagle3,
    "MTP": _mtp,
    "DFlash": _dflash,
}


def _combined(config: CombinedConfig, sheet: Sheet) -> Options:
    """Types in one list: look-up comes first wherever it finds something, as here."""
    first, second = sheet.take("retrieval"), sheet.take("model")
    write = _MODELS.get(second.decoding_type)
    if not _is_new(sheet) or first.decoding_type != "NGram" or write is None:
        raise NotTakenError(
            f"llama.cpp cannot combine {first.decoding_type} with {second.decoding_type}.",
            f"From build {NEW} on it combines NGram with {', '.join(_MODELS)}.",
        )
    sheet.explain("min_match_len", "llama.cpp looks up first wherever its n-gram occurs.")
    options: dict[str, object] = {}
    kinds: list[object] = []
    for inner, writer in ((first, _ngram), (second, write)):
        part = sheet.inner(inner)
        made = dict(writer(inner, part))
        kinds.append(made.pop("--spec-type"))
        options |= made
        part.finish(f"{inner.decoding_type}: ")
    return [("--spec-type", ",".join(map(str, kinds))), *options.items()]


NEAREST = "NGram (ngram-simple): it needs no weights either."
ENGINE = Engine(
    name="llamacpp",
    title="llama.cpp",
    versions=(
        ("b10507", "the newest known here; old names are refused"),
        (f"b{NEW}", "May 2026, the first with all new names"),
        ("b8000", "before April 2026: --draft-max and others"),
    ),
    trees="chains only",
    writers={
        "Autoregressive": _flags(_plain),
        "Draft_Target": _flags(_draft_target),
        "NGram": _flags(_ngram),
        "Eagle3": _flags(_eagle3),
        "MTP": _flags(_mtp),
        "DFlash": _flags(_dflash),
        "Combined": _flags(_combined),
    },
    refused={
        "Medusa": ("llama.cpp has no Medusa.", "A draft model, or EAGLE-3 heads for the target."),
        "Eagle": ("llama.cpp has no EAGLE-1 or EAGLE-2.", "EAGLE-3 heads for the same target."),
        "Lookahead": ("llama-server has no lookahead; it is an example program only.", NEAREST),
        "ReDrafter": ("llama.cpp has no ReDrafter.", "A draft model, or EAGLE-3 heads."),
        "Suffix": ("llama.cpp has no suffix decoding.", NEAREST),
        "Token_Recycling": ("llama.cpp has no token recycling.", NEAREST),
        "User_Provided": (
            "A drafter written for this playground does not run in llama.cpp.",
            "Drafters there are C++ and part of the build.",
        ),
    },
    read=read_llamacpp,
)
