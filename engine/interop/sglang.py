"""SGLang: `--speculative-*` flags.

What changed between releases, read from the releases' own server_args.py:

    0.5.2   STANDALONE (a draft model)
    0.5.3   NGRAM, with match window and branch length; 0.5.10 has one --…-max-trie-depth instead
    0.5.11  DFLASH, --speculative-adaptive
    0.5.14  --speculative-use-rejection-sampling (EAGLE family, topk 1)

SGLang grows its own tree from three numbers: steps (depth), topk (children of a node) and draft
tokens (nodes verified, the root counted).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.interop.handoff import Engine, File, NotTakenError, Sheet, Writer
from engine.interop.plain import command
from engine.interop.sglang_read import read_sglang
from engine.tree import ChoiceTree

Files = tuple[File, ...]
Options = list[tuple[str, object]]
GREEDY = (
    "When sampling, SGLang drafts the likeliest tokens: the law of the output stays, acceptance "
    "falls with the temperature."
)


def _launch(sheet: Sheet, options: Options) -> Files:
    text = command(
        f"python -m sglang.launch_server --model-path {shlex.quote(sheet.context.target)}",
        *options,
    )
    return (File("launch.sh", text, "bash"),)


def _flags(options_of: Callable[[Any, Sheet], Options]) -> Writer:
    """A writer from what makes the options."""
    return lambda config, sheet: _launch(sheet, options_of(config, sheet))


def _plain(config: AutoregressiveConfig, sheet: Sheet) -> Options:
    sheet.note("Without --speculative-algorithm, SGLang decodes plainly.")
    return []


def _tree_size(steps: int, topk: int, tokens: int) -> Options:
    return [
        ("--speculative-num-steps", steps),
        ("--speculative-eagle-topk", topk),
        ("--speculative-num-draft-tokens", tokens),
    ]


def _draft_target(config: DraftTargetConfig, sheet: Sheet) -> Options:
    if not sheet.at_least(0, 5, 2):
        raise NotTakenError("SGLang has draft models (STANDALONE) from 0.5.2 on.", "EAGLE heads.")
    sheet.explain("confidence_threshold", "SGLang always drafts all steps.")
    if sheet.take("use_draft_probs"):
        sheet.warn(f"use_draft_probs is dropped. {GREEDY}")
    steps = sheet.take("max_draft_len")
    return [
        ("--speculative-algorithm", "STANDALONE"),
        ("--speculative-draft-model-path", sheet.model()),
        *_tree_size(steps, 1, steps + 1),
    ]


def _ngram(config: NGramConfig, sheet: Sheet) -> Options:
    if not sheet.at_least(0, 5, 3):
        raise NotTakenError("SGLang has n-gram look-up (NGRAM) from 0.5.3 on.", "EAGLE heads.")
    sheet.warn(
        "SGLang keeps its own trie of all requests and proposes the likeliest continuation: the "
        "pool rules (lookup, is_keep_all, is_use_oldest, is_public_pool) are dropped.",
        *("lookup", "is_keep_all", "is_use_oldest", "is_public_pool"),
    )
    length = sheet.take("max_draft_len")
    options: Options = [
        ("--speculative-algorithm", "NGRAM"),
        ("--speculative-num-draft-tokens", length + 1),
        ("--speculative-ngram-max-bfs-breadth", 1),
    ]
    window = sheet.take("max_matching_ngram_size")
    if sheet.at_least(0, 5, 10):
        sheet.warn(
            f"max_matching_ngram_size={window} is dropped: from 0.5.10 on SGLang matches as many "
            "tokens as its trie is deep (--speculative-ngram-max-trie-depth, 18)."
        )
        return options
    return [
        *options,
        ("--speculative-ngram-min-match-window-size", 1),
        ("--speculative-ngram-max-match-window-size", window),
        ("--speculative-ngram-branch-length", max(18, window + length)),
    ]


def _eagle(config: EagleConfig, sheet: Sheet) -> Options:
    head: Options = [
        ("--speculative-algorithm", "EAGLE"),
        ("--speculative-draft-model-path", sheet.model()),
    ]
    if sheet.take("use_dynamic_tree"):
        return [*head, *_grown(sheet)]
    tree = ChoiceTree(sheet.take("eagle_choices"))
    topk = max(len(children) for children in tree.shape.children)
    if topk == 1 and tree.max_rank == 0:
        sheet.note(GREEDY)
    else:
        sheet.warn(
            f"SGLang grows its own tree: the drawn tree of {len(tree)} nodes is dropped. The "
            f"nearest it takes is the same size: {tree.depth} steps, up to {topk} children per "
            f"node, {len(tree)} drafted nodes."
        )
    return [*head, *_tree_size(tree.depth, topk, len(tree) + 1)]


def _grown(sheet: Sheet) -> Options:
    """Our dynamic tree is the same as SGLang's, but for how many nodes are expanded per level."""
    topk, steps = sheet.take("dynamic_tree_max_topK"), sheet.take("max_draft_len")
    keep, expanded = sheet.take("max_total_draft_tokens"), sheet.take("max_non_leaves_per_layer")
    if expanded not in (None, topk):
        sheet.warn(
            f"max_non_leaves_per_layer={expanded} is dropped: SGLang expands {topk} nodes a level."
        )
    if topk == 1:
        return _tree_size(steps, 1, steps + 1)
    if keep + 1 > steps * topk + 1:
        sheet.note(
            f"{keep + 1} draft tokens are more than steps × topk + 1 = {steps * topk + 1}, which "
            "SGLang's own tuning script skips; lower them if the server refuses."
        )
    sheet.note("Overlap scheduling (SGLANG_ENABLE_SPEC_V2) wants topk 1 in 0.5.9 to 0.5.12.")
    return _tree_size(steps, topk, keep + 1)


def _eagle3(config: Eagle3Config, sheet: Sheet) -> Options:
    sheet.explain("eagle3_layers_to_capture", "SGLang reads the layers from the checkpoint.")
    head: Options = [
        ("--speculative-algorithm", "EAGLE3"),
        ("--speculative-draft-model-path", sheet.model()),
    ]
    if sheet.take("use_dynamic_tree"):
        return [*head, *_grown(sheet)]
    steps = sheet.take("max_draft_len")
    return [*head, *_tree_size(steps, 1, steps + 1)]


def _mtp(config: MTPConfig, sheet: Sheet) -> Options:
    sheet.explain(
        "use_relaxed_acceptance_for_thinking",
        "SGLang's own lossy switch is --speculative-accept-threshold-single.",
    )
    steps = sheet.take("max_draft_len")
    return [("--speculative-algorithm", "NEXTN"), *_tree_size(steps, 1, steps + 1)]


def _dflash(config: DFlashConfig, sheet: Sheet) -> Options:
    if not sheet.at_least(0, 5, 11):
        raise NotTakenError("SGLang has DFlash from 0.5.11 on.", "EAGLE-3 heads.")
    for name in ("mask_token_id", "target_layer_ids"):
        sheet.explain(name, "SGLang reads it from the checkpoint.")
    length = sheet.take("max_draft_len")
    options: Options = [
        ("--speculative-algorithm", "DFLASH"),
        ("--speculative-draft-model-path", sheet.model()),
    ]
    if length is not None:
        options.append(("--speculative-num-draft-tokens", length + 1))
    return options


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    versions=(
        ("0.5.23", "the newest known here"),
        ("0.5.11", "the first with DFLASH"),
        ("0.5.9", "the last with n-gram match windows"),
        ("0.5.3", "the first with NGRAM"),
        ("0.5.2", "the first with draft models"),
    ),
    trees="dynamic trees from steps, topk and draft tokens; none that is drawn",
    writers={
        "Autoregressive": _flags(_plain),
        "Draft_Target": _flags(_draft_target),
        "NGram": _flags(_ngram),
        "Eagle": _flags(_eagle),
        "Eagle3": _flags(_eagle3),
        "MTP": _flags(_mtp),
        "DFlash": _flags(_dflash),
    },
    refused={
        "Medusa": ("SGLang has no Medusa.", "EAGLE or EAGLE-3 heads for the same target."),
        "Lookahead": ("SGLang has no lookahead decoding.", "NGram: it needs no weights either."),
        "ReDrafter": ("SGLang has no ReDrafter.", "EAGLE or EAGLE-3 heads for the same target."),
        "Suffix": ("SGLang has no suffix decoding.", "NGram: its trie spans requests, too."),
        "Token_Recycling": ("SGLang has no token recycling.", "NGram."),
        "Combined": (
            "SGLang runs one drafting method at a time.",
            "Export the method that drafts most of the accepted tokens by itself.",
        ),
        "User_Provided": (
            "A drafter written for this playground does not run in SGLang.",
            "Newer releases run a class registered with SpeculativeAlgorithm.register.",
        ),
    },
    read=read_sglang,
)
