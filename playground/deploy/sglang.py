"""SGLang: `--speculative-*` flags, in a `launch_server` command or a YAML file of its flags.

FROZEN_KV_MTP (since 0.5.14, #24436) replaces EAGLE and NEXTN where the draft model is an assistant;
a DSPARK block (0.5.16, #30261) is gamma tokens. Source: server_args.py of each release.

SGLang builds its own tree from three numbers: steps (depth), topk (children per node) and draft
tokens (nodes verified, including the root).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.tree import ChoiceTree
from playground.deploy import table
from playground.deploy.conversion import Reader, Writer
from playground.deploy.files import ReadYaml, read_flags
from playground.deploy.table import (
    Codec,
    DroppedSetting,
    Field,
    Refusal,
    Values,
    load_engine,
    method,
)

PREFIX = "--speculative-"


ALGORITHM = PREFIX + "algorithm"
TOKENS = PREFIX + "num-draft-tokens"
SIZE = (PREFIX + "num-steps", PREFIX + "eagle-topk", TOKENS)
"""Steps, children per node, and nodes verified, including the root."""
WINDOW = PREFIX + "ngram-max-match-window-size"
TARGETS = ("--model-path", "--model")
WEIGHTS = table.weights(PREFIX + "draft-model-path", PREFIX + "draft-model")
GREEDY = (
    "When sampling, SGLang drafts the most probable tokens: the law of the output stays, "
    "acceptance falls with the temperature."
)


# ---- steps, topk and draft tokens, for chains and trees alike


def _write_size(writer: Writer, values: Values) -> None:
    if getattr(writer.config, "use_dynamic_tree", False):
        steps, topk, nodes = _dynamic_size(writer)
    elif hasattr(writer.config, "eagle_choices"):
        steps, topk, nodes = _static_size(writer)
    else:
        steps, topk, nodes = writer.take("max_draft_len"), 1, 0
    values |= zip(SIZE, (steps, topk, (steps if topk == 1 else nodes) + 1), strict=True)


def _dynamic_size(writer: Writer) -> tuple[int, int, int]:
    """The dynamic tree here is SGLang's, except for how many nodes are expanded per level."""
    topk, nodes, expanded = (writer.take(name) for name in table.DYNAMIC.split())
    steps = writer.take("max_draft_len")
    writer.take("use_dynamic_tree")
    if expanded not in (None, topk):
        writer.warnings.append(
            f"max_non_leaves_per_layer={expanded} is dropped: SGLang expands {topk} nodes a level."
        )
    if topk > 1 and nodes > steps * topk:
        writer.notes.append(
            f"{nodes + 1} draft tokens are more than steps × topk + 1 = {steps * topk + 1}, which "
            "SGLang's own tuning script skips; lower them if the server refuses."
        )
    return steps, topk, nodes


def _static_size(writer: Writer) -> tuple[int, int, int]:
    """The closest size to a static tree, since SGLang builds its own."""
    tree = ChoiceTree(writer.take("eagle_choices"))
    topk = max(len(children) for children in tree.shape.children)
    if topk == 1 and tree.max_rank == 0:
        writer.notes.append(GREEDY)
    else:
        writer.warnings.append(
            f"SGLang grows its own tree: the drawn tree of {len(tree)} nodes is dropped. The "
            f"nearest it takes is the same size: {tree.depth} steps, up to {topk} children per "
            f"node, {len(tree)} drafted nodes."
        )
    return tree.depth, topk, len(tree)


def _read_size(reader: Reader) -> None:
    """Missing sizes are those that SGLang sets for most models."""
    reader.used.update(SIZE)
    missing = [name for name in SIZE if reader.find(name) is None]
    if len(missing) == len(SIZE):
        reader.notes.append(
            "SGLang sets steps, topk and draft tokens itself: 5, 4, 8 for Llama and Grok, "
            "3, 1, 4 for others; 3, 1, 4 is used here."
        )
    elif missing:
        raise ConfigError(f"SGLang wants all of {', '.join(SIZE)}; {missing[0]} is missing.")
    steps, topk, tokens = (3, 1, 4) if missing else (reader.typed(name, int) for name in SIZE)
    if topk == 1 and tokens != steps + 1:
        reader.notes.append(
            f"With topk 1, SGLang drafts {steps} tokens regardless of num-draft-tokens."
        )
    name, settings = reader.methods[-1].decoding_type, reader.settings
    if topk > 1 and name in ("Eagle", "Eagle3"):
        settings |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk}
        settings |= {"max_draft_len": steps, "max_total_draft_tokens": tokens - 1}
    elif name == "Eagle":
        settings["eagle_choices"] = ChoiceTree.chain(steps).paths
    else:
        settings["max_draft_len"] = steps
        if topk > 1:
            reader.notes.append("Here the method drafts a chain: topk is ignored.")


def _read_window(reader: Reader) -> None:
    """Older releases verify as many tokens as they match at most, unless told otherwise."""
    if reader.find(WINDOW):
        reader.used.add(WINDOW)
        size = reader.settings["max_matching_ngram_size"] = reader.typed(WINDOW, int)
        if reader.find(TOKENS) is None:
            reader.settings["max_draft_len"] = size - 1


# ---- the table


SIZES = Codec(SIZE, _write_size, _read_size)
TOKEN_MAP = Field("speculative_token_map", PREFIX + "token-map")
NO_MAP = Refusal(TOKEN_MAP.key, "the drafter chooses among the tokens of a file (FR-Spec)")
NO_PROBS = table.drops_draft_probs(f". {GREEDY}")
ONE_MORE: dict[str, Any] = {"encode": lambda length: length + 1, "decode": lambda count: count - 1}
"""SGLang's number of draft tokens includes the root."""
DFLASH_LENGTH = Field("max_draft_len", TOKENS, (PREFIX + "dflash-block-size",), **ONE_MORE)
DSPARK_LENGTH = (
    Field("max_draft_len", PREFIX + "dspark-block-size"),
    table.read_only("max_draft_len", TOKENS, decode=ONE_MORE["decode"]),
)
TRIE = "here one continuation is drafted, by the pool's rules."
NGRAM = (
    Field("max_draft_len", TOKENS, default=11, **ONE_MORE),
    table.const(PREFIX + "ngram-max-bfs-breadth", 1, note=TRIE),
    *(
        table.read_only("", PREFIX + name, decode=lambda value: table.IGNORED, note=TRIE)
        for name in (
            *("ngram-min-bfs-breadth", "ngram-match-type", "ngram-max-trie-depth"),
            *("ngram-min-match-window-size", "ngram-branch-length"),
        )
    ),
    Codec((WINDOW,), read=_read_window),
    DroppedSetting(
        "max_matching_ngram_size",
        "max_matching_ngram_size={c.max_matching_ngram_size} is dropped: SGLang matches as many "
        "tokens as its trie is deep (--speculative-ngram-max-trie-depth, 18).",
    ),
    table.drops_pool(
        "SGLang keeps its own trie of all requests and proposes the most probable continuation"
    ),
)
TRIE_NOTE = "SGLang's trie and the pool here choose continuations by different rules."
RAGGED = (
    "With SGLANG_RAGGED_VERIFY_MODE=compact, SGLang verifies as much of a block as its confidence "
    "head finds worth it."
)
GREEDY_DRAFTS = {"use_draft_probs": False}
METHODS = (
    method("Eagle", "EAGLE", WEIGHTS, TOKEN_MAP, SIZES),
    method("Eagle3", "EAGLE3", WEIGHTS, SIZES),
    method("MTP", "NEXTN", NO_MAP, SIZES),
    method("MTP_Assistant", "FROZEN_KV_MTP", WEIGHTS, NO_MAP, SIZES, since=(0, 5, 14)),
    method("Draft_Target", "STANDALONE", WEIGHTS, NO_PROBS, NO_MAP, SIZES, implied=GREEDY_DRAFTS),
    method("NGram", "NGRAM", *NGRAM, read_notes=(TRIE_NOTE,)),
    method("DFlash", "DFLASH", WEIGHTS, DFLASH_LENGTH),
    method("DSpark", "DSPARK", WEIGHTS, *DSPARK_LENGTH, since=(0, 5, 16), notes=(RAGGED,)),
)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """A command, or flags as keys of YAML (`--config`)."""
    flags = read_flags(text)
    if not flags.options and ":" in text and isinstance(values := read_yaml(text), Mapping):
        named = {f"--{key}".replace("_", "-"): value for key, value in values.items()}
        given = {k: v for k, v in named.items() if v is not None and v is not False}
        flags = flags._replace(options={k: "" if v is True else str(v) for k, v in given.items()})
    if "candidate_steps" in text:
        raise ConfigError(
            "candidate_steps by batch size is the table of SGLang's adaptive drafting; here "
            "drafting: auto adapts. Paste the command with its --speculative-* flags."
        )
    options = {**flags.options, **flags.environment}
    return {k: v for k, v in options.items() if _is_drafting(k)}, flags.first(*TARGETS)


def _is_drafting(name: str) -> bool:
    return name in ENGINE.keys or name.startswith(PREFIX)


def _find_method(reader: Reader) -> table.Method:
    name = str(reader.values.get(ALGORITHM, "")).upper()
    model = reader.find(*WEIGHTS.keys)
    if name in ("EAGLE", "NEXTN") and model and "assistant" in reader.values[model].lower():
        name = "FROZEN_KV_MTP"
    if name == "EAGLE" and model is None:
        reader.notes.append("EAGLE without a draft model is the target's own MTP layer.")
        name = "NEXTN"
    return table.method_named(METHODS, ALGORITHM, name)


ENGINE = load_engine(
    "sglang",
    methods=METHODS,
    parse=_parse,
    find_method=_find_method,
)
