"""Trees in and out of the Tree page: shipped and saved presets, import, export."""

from __future__ import annotations

import base64
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import presets
from engine.drafters.method import ChoiceLimits
from engine.errors import ConfigError, TreeError
from engine.tree import ChoiceTree
from playground.deploy.trees import FORMATS, format_tree, parse_tree, read_growmap_file
from presets.reading import parse_yaml
from storage import RunLog

KIND = "tree"
MAX_NAME_CHARS = 80
MAX_TEXT_CHARS = 1_000_000
_LISTS = (
    "TensorRT-LLM takes medusa_choices up to 1.2 and drops eagle_choices with 1.4; the "
    "repositories of Medusa and EAGLE take the lists."
)
NOTES = {
    "triton": "For TensorRT-LLM's engine backend in Triton, removed in July 2026.",
    "tuples": "vLLM took speculative_token_tree until 0.20 and has removed tree attention since.",
    "buffers": "TensorRT-LLM's packed mask and positions, Medusa's and SGLang's indices.",
    "yaml": _LISTS,
    "lists": _LISTS,
}
SUFFIXES = dict(yaml="yaml", sequoia="json", buffers="json")
TITLES = {name: title for name, (title, _) in FORMATS.items()}
"""Of the formats."""


def read_text(raw: str, limits: ChoiceLimits) -> dict[str, Any]:
    """A tree from text in any known format.

    Raises TreeError: it is not a tree, or exceeds the drafter's limits; names the path.
    """
    if len(raw) > MAX_TEXT_CHARS:
        raise TreeError(f"The text has {len(raw)} characters; at most {MAX_TEXT_CHARS} are read.")
    tree = parse_tree(raw, read_yaml=partial(parse_yaml, where="The text"))
    return _fitting(tree, limits)


def read_growmap(raw: str, limits: ChoiceLimits) -> dict[str, Any]:
    """A tree from the bytes of Sequoia's .pt file, in base64.

    Raises TreeError: it is not a growmap, or exceeds the drafter's limits.
    """
    if len(raw) > 2 * MAX_TEXT_CHARS:
        raise TreeError(f"A growmap file must have at most {MAX_TEXT_CHARS} bytes.")
    try:
        payload = base64.b64decode(raw, validate=True)
    except ValueError as error:
        raise TreeError("The upload was incomplete. Try again.") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "growmap.pt"
        file.write_bytes(payload)
        try:
            tree = read_growmap_file(file)
        except TreeError as error:
            raise TreeError(str(error).replace(str(file), "The file")) from error
    return _fitting(tree, limits)


def _fitting(tree: ChoiceTree, limits: ChoiceLimits) -> dict[str, Any]:
    depth, ranks = limits.depth or tree.depth, limits.ranks or tree.max_rank + 1
    tree.check_fits(depth=depth, ranks=ranks, what=limits.what)
    return {"tree": tree.as_lists()}


def write_text(tree: ChoiceTree, format: str, *, decoding_type: str) -> dict[str, Any]:
    """The tree in a format.

    Args:
        decoding_type: the method that the text is for.

    Raises:
        ConfigError: no such format.
        TreeError: the format cannot represent this tree.
    """
    text = format_tree(tree, format, decoding_type)
    return {"text": text, "suffix": SUFFIXES.get(format, "txt"), "note": NOTES.get(format, "")}


# ---- presets


def tree_rows(log: RunLog) -> list[dict[str, Any]]:
    """The menu: the user's own trees, then the shipped ones."""
    own = [
        {
            "group": "Saved here",
            "title": artifact.key["name"],
            "note": f"Saved for {artifact.meta['method']}." if artifact.meta["method"] else "",
            "paths": artifact.meta["tree"],
        }
        for artifact in log.artifacts.find(KIND)
    ]
    shipped = [
        {
            "group": "Shipped",
            "title": preset.title,
            "note": preset.description,
            "paths": preset.tree.as_lists(),
        }
        for preset in presets.trees().values()
    ]
    return sorted(own, key=lambda row: row["title"].lower()) + shipped


def save_tree(log: RunLog, name: str, tree: ChoiceTree, method: str) -> str:
    """Save a tree under a name, replacing an older one; returns the normalized name.

    Args:
        method: title of the method that it is saved for; empty = none.

    Raises ConfigError: the name is empty or too long.
    """
    clean_name = _name(name)
    meta = {"method": method, "tree": tree.as_lists()}
    log.artifacts.put(KIND, {"name": clean_name}, meta=meta, payload=b"")
    return clean_name


def forget_tree(log: RunLog, name: str) -> str:
    """Delete the saved tree of a name. Raises ConfigError: there is none."""
    clean_name = _name(name)
    if not log.artifacts.forget(KIND, {"name": clean_name}):
        raise ConfigError(
            f"No tree is saved as {clean_name!r}. Shipped trees cannot be deleted here."
        )
    return clean_name


def _name(raw: str) -> str:
    name = " ".join(raw.split())
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"The name must have 1 to {MAX_NAME_CHARS} characters.")
    return name
