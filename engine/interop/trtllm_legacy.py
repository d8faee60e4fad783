"""TensorRT-LLM's TensorRT backend, until 1.2: Medusa, EAGLE-1/2 and Lookahead.

The PyTorch backend that replaced it has none of them, and no choice trees.
"""

from __future__ import annotations

from typing import Any

from engine.interop import fields
from engine.interop.conversion import DYNAMIC, Reader, Writer
from engine.interop.fields import Field, Method, Refusal, Values, same
from engine.interop.trees import parse_tree, tensorrt_sizes
from engine.tree import ChoiceTree

CURRENT = (1, 3)
"""First release that has the PyTorch backend only."""
REMOVED = (
    "TensorRT-LLM removed {} with its TensorRT backend in July 2026; 1.2 is the last release that "
    "has it."
)
LEGACY_NOTES = ("It runs on the TensorRT backend, which builds an engine when it starts.",)
EAGLE_KEYS = frozenset(
    "posterior_threshold use_dynamic_tree dynamic_tree_max_topK num_eagle_layers "
    "max_non_leaves_per_layer eagle3_one_model eagle3_layers_to_capture eagle3_model_arch".split()
)
TYPICAL = {"greedy_sampling": Refusal("false accepts any plausible token", ("true", "none"))}
WEIGHTS = (
    fields.weights("speculative_model", "speculative_model_dir", since=CURRENT),
    fields.weights("speculative_model_dir", "speculative_model", until=CURRENT),
)


def _tree(value: Any) -> object:
    """Paths of a tree in a YAML file: lists, or a text in any format."""
    tree = parse_tree(value) if isinstance(value, str) else ChoiceTree.parse(value)
    return tree.paths


def _write_eagle(writer: Writer, values: Values) -> None:
    """A drawn tree, or EAGLE-2's; before 1.2 max_draft_len counted the nodes of both."""
    model = {"speculative_model_dir": values.pop("speculative_model_dir")}
    if not writer.take("use_dynamic_tree"):
        tree = ChoiceTree(writer.take("eagle_choices"))
        values |= {**tensorrt_sizes(tree), **model, "eagle_choices": tree.as_lists()}
        return
    levels = writer.take("max_draft_len")
    topk, keep, expanded = (writer.take(name) for name in DYNAMIC.split())
    counts_levels = writer.at_least(1, 2)
    values["max_draft_len"] = levels if counts_levels else keep
    values |= {"max_total_draft_tokens": keep} if counts_levels else {}
    values |= {
        "num_eagle_layers": levels,
        "max_non_leaves_per_layer": topk if expanded is None else expanded,
        **model,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
    }


def _read_eagle(reader: Reader) -> None:
    if not reader.settings.get("use_dynamic_tree"):
        if reader.find("eagle_choices"):
            reader.settings["eagle_choices"] = _tree(reader.values["eagle_choices"])
            reader.used.add("eagle_choices")
        else:
            reader.notes.append("No tree is named; the one of the method's defaults is used here.")
        return
    reader.used.add("max_non_leaves_per_layer")
    if reader.find("max_non_leaves_per_layer"):
        expanded = reader.typed("max_non_leaves_per_layer", int)
        if expanded != reader.settings.get("dynamic_tree_max_topK"):
            reader.settings["max_non_leaves_per_layer"] = expanded
    keys = ("max_total_draft_tokens", "max_draft_len", "num_eagle_layers")
    theirs = keys if reader.find(keys[0]) else keys[1:]
    for ours, key in zip(keys[:2], theirs, strict=False):
        if reader.find(key):
            reader.settings[ours] = reader.typed(key, int)
            reader.used.add(key)


def _read_only(name: str, **rest: Any) -> Field:
    return Field(name, name, write=lambda writer: None, **rest)


METHODS = (
    Method(
        "Medusa",
        "Medusa",
        (
            Field(
                "medusa_choices",
                "max_draft_len",
                ("max_total_draft_tokens",),
                write=lambda writer: len(writer.config.medusa_choices),
                back=None,
            ),
            *same("num_medusa_heads"),
            *WEIGHTS,
            Field("medusa_choices", "medusa_choices", out=lambda c: list(map(list, c)), back=_tree),
        ),
        until=CURRENT,
        outside=(
            REMOVED.format("Medusa"),
            "EAGLE-3 heads for the same target, or TensorRT-LLM 1.2.",
        ),
        notes=LEGACY_NOTES,
    ),
    Method(
        "Eagle",
        "Eagle",
        (
            *WEIGHTS,
            _read_only("use_dynamic_tree"),
            _read_only("dynamic_tree_max_topK", given="use_dynamic_tree"),
        ),
        until=CURRENT,
        outside=(
            "TensorRT-LLM's PyTorch backend takes EAGLE-3 heads only.",
            "EAGLE-3 heads for the same target; EAGLE-1 and EAGLE-2 ran until 1.2.",
        ),
        notes=LEGACY_NOTES,
        read_notes=(
            "num_eagle_layers or eagle_choices: read as EAGLE-1/2 of the TensorRT backend.",
        ),
        takes=("eagle_choices", "max_draft_len", "num_eagle_layers", "max_non_leaves_per_layer"),
        known=EAGLE_KEYS,
        refuses=TYPICAL,
        write=_write_eagle,
        read=_read_eagle,
    ),
    Method(
        "Lookahead",
        "Lookahead",
        same("max_window_size", "max_ngram_size", "max_verification_set_size"),
        until=CURRENT,
        outside=(REMOVED.format("lookahead"), "NGram or SA: they need no weights either."),
        notes=LEGACY_NOTES,
    ),
)
