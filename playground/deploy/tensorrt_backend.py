"""TensorRT-LLM's TensorRT backend, until 1.2: Medusa, EAGLE-1/2 and Lookahead.

The PyTorch backend that replaced it has neither these nor choice trees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError
from engine.tree import ChoicePaths, ChoiceTree
from playground.deploy import table
from playground.deploy.conversion import Reader, Writer
from playground.deploy.table import Codec, Field, Refusal, Values, method, read_only
from playground.deploy.trees import MC_SIM_7B_63, parse_tree, tensorrt_sizes

CURRENT = (1, 3)
"""First release with only the PyTorch backend."""
EAGLE_ROWS = (
    table.Ignored(
        "posterior_threshold use_dynamic_tree dynamic_tree_max_topK num_eagle_layers "
        "max_non_leaves_per_layer eagle3_one_model eagle3_layers_to_capture eagle3_model_arch"
    ),
    Refusal("greedy_sampling", "false accepts any plausible token", ("true", "none")),
)
WEIGHTS = (
    table.weights("speculative_model", since=CURRENT),
    table.weights("speculative_model_dir", until=CURRENT),
)


def read_tree(reader: Reader, name: str) -> None:
    """Read the tree under a key, as lists or a text in any format, and check sizes beside it.

    Raises:
        ConfigError: the tree is malformed, or larger than another key allows.
    """
    value = reader.values.get(name)
    tree = MC_SIM_7B_63 if value is None else parse_tree(str(value))
    if value is None:
        reader.notes.append(DEFAULT_TREE.format(name))
    elif len(re.findall(r"[\[({]\s*\d", str(value))) < len(tree):
        reader.notes.append(ONLY_LEAVES)
    reader.settings[name] = tree.paths
    reader.used.add(name)
    sizes = tensorrt_sizes(tree)
    sizes |= {"max_total_draft_tokens": len(tree), "num_medusa_heads": tree.depth}
    if name == "eagle_choices":  # from 1.2 on, max_draft_len counts the levels
        sizes["max_draft_len"] = tree.depth
    for key in filter(reader.find, sizes):
        if (size := reader.typed(key, int)) < sizes[key]:
            raise ConfigError(
                f"{key} must be at least {sizes[key]} for the tree of {len(tree)} nodes "
                f"({name}{' is not set' if value is None else ''}), got {size}."
            )
        reader.used.update([key] if size == sizes[key] else [])


def tree_rows(
    name: str, encode: Callable[[ChoicePaths], object], *sizes: str
) -> tuple[table.Row, ...]:
    """Rows for a tree, and keys of its sizes that are read with it."""
    codec = Codec((name, *sizes), read=lambda reader: read_tree(reader, name))
    return Field(name, name, encode=encode, decode=None), codec


def _write_eagle(writer: Writer, values: Values) -> None:
    """Writes a static tree, where max_draft_len counts nodes, or EAGLE-2's, where it is levels."""
    if not writer.take("use_dynamic_tree"):
        tree = ChoiceTree(writer.take("eagle_choices"))
        values |= {**tensorrt_sizes(tree), "eagle_choices": tree.as_lists()}
        return
    levels = writer.take("max_draft_len")
    topk, nodes, expanded = (writer.take(name) for name in table.DYNAMIC.split())
    values |= {
        "max_draft_len": levels,
        "max_total_draft_tokens": nodes,
        "num_eagle_layers": levels,
        "max_non_leaves_per_layer": topk if expanded is None else expanded,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
    }


def _read_eagle(reader: Reader) -> None:
    if not reader.settings.get("use_dynamic_tree"):
        read_tree(reader, "eagle_choices")
        return
    reader.used.add("max_non_leaves_per_layer")
    if reader.find("max_non_leaves_per_layer"):
        expanded = reader.typed("max_non_leaves_per_layer", int)
        if expanded != reader.settings.get("dynamic_tree_max_topK"):
            reader.settings["max_non_leaves_per_layer"] = expanded
    keys = ("max_total_draft_tokens", "max_draft_len", "num_eagle_layers")
    sizes = keys if reader.find(keys[0]) else keys[1:]
    for setting, key in zip(keys[:2], sizes, strict=False):
        if reader.find(key):
            reader.settings[setting] = reader.typed(key, int)
            reader.used.add(key)


DEFAULT_TREE = "{} is not set: TensorRT-LLM then takes Medusa's mc_sim_7b_63, 63 nodes."
ONLY_LEAVES = (
    "The tree lists only the ends of paths, which TensorRT-LLM reads in its Python runtime alone; "
    "an export lists every node."
)
MEDUSA = (
    Field(
        "medusa_choices",
        "max_draft_len",
        build=lambda writer: len(writer.config.medusa_choices),
        decode=None,
    ),
    *table.same_name("num_medusa_heads"),
    *WEIGHTS,
    *tree_rows(
        "medusa_choices",
        lambda paths: list(map(list, paths)),
        *("max_draft_len", "max_total_draft_tokens"),
    ),
)
EAGLE_SIZES = ("eagle_choices", "max_draft_len", "num_eagle_layers", "max_non_leaves_per_layer")
EAGLE = (
    *WEIGHTS,
    read_only("use_dynamic_tree", "use_dynamic_tree"),
    read_only("dynamic_tree_max_topK", "dynamic_tree_max_topK", switch="use_dynamic_tree"),
    *EAGLE_ROWS,
    Codec(EAGLE_SIZES, _write_eagle, _read_eagle),
)
LOOKAHEAD = table.same_name("max_window_size", "max_ngram_size", "max_verification_set_size")
REMOVED = (
    "TensorRT-LLM removed {} with its TensorRT backend in July 2026; 1.2 is the last release that "
    "has it."
)
HEADS = "EAGLE-3 heads for the same target"
NO_MEDUSA = (REMOVED.format("Medusa"), f"{HEADS}, or TensorRT-LLM 1.2.")
NO_EAGLE = (
    "TensorRT-LLM's PyTorch backend takes EAGLE-3 heads only.",
    f"{HEADS}; EAGLE-1 and EAGLE-2 ran until 1.2.",
)
NO_LOOKAHEAD = (REMOVED.format("lookahead"), "NGram or SA: they need no weights either.")
MEDUSA_NOTE = "TensorRT-LLM documents Medusa for Vicuna and LLaMA, and decodes greedily with it."
ENGINE_BUILD_NOTE = "It runs on the TensorRT backend, which builds an engine when it starts."
RELEASES: Any = {"until": CURRENT, "notes": (ENGINE_BUILD_NOTE,)}
EAGLE_1 = "EAGLE-1"
"""The reader's name for it, since `Eagle` alone means EAGLE-3."""
METHODS = (
    method(
        "Medusa",
        "Medusa",
        *MEDUSA,
        removal=NO_MEDUSA,
        until=CURRENT,
        notes=(ENGINE_BUILD_NOTE, MEDUSA_NOTE),
    ),
    method(
        "Eagle",
        "Eagle",
        *EAGLE,
        aliases=(EAGLE_1,),
        removal=NO_EAGLE,
        read_notes=("It is read as EAGLE-1/2 of the TensorRT backend.",),
        **RELEASES,
    ),
    method("Lookahead", "Lookahead", *LOOKAHEAD, removal=NO_LOOKAHEAD, **RELEASES),
)
LEGACY = tuple(method.name for method in METHODS)
