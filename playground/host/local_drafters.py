"""Drafters for a target that are on this machine: heads in its folder, and smaller models."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from engine.drafters import methods as decoding_types
from engine.drafters import parse_method
from engine.drafters.heads.checkpoint import layout_of
from engine.errors import PlaygroundError
from engine.model.checkpoints import tensor_names
from engine.model.gguf.config import can_read
from engine.model.gguf.drafters import target_width
from engine.model.gguf.file import GGUFFile
from engine.model.sources import TargetSpec
from presets import MethodPreset

MAX_FOLDERS = 64
LOCAL_PREFIX = "local "
"""Prefix of the keys of draft models on this machine."""
MAX_SHARE, MAX_MODELS = 0.5, 3
"""Largest size of a draft model over the target's, and how many are offered: the smallest ones."""


def heads_of(spec: TargetSpec) -> list[MethodPreset]:
    """Heads in a target's folder, its direct subfolders, and the GGUF files beside it."""
    path = Path(spec.path).expanduser() if spec.path else None
    if path is None or not path.exists():
        return []
    places = _files_beside(path)
    if path.is_dir():
        below = sorted(place for place in path.iterdir() if place.is_dir())
        places = [path, *below[:MAX_FOLDERS], *places]
    heads = []
    for place in places:
        decoding_type = _type_of(place, path)
        if decoding_type is not None:
            values = {"decoding_type": decoding_type, "speculative_model": str(place)}
            method = decoding_types()[decoding_type]
            of_size = f" ({size_text(place.stat().st_size)})" if place.is_file() else ""
            heads.append(
                MethodPreset(
                    name=str(place),
                    title=f"{method.title} · {place.name}{of_size}",
                    target=spec.name,
                    config=parse_method(values, where=str(place)),
                )
            )
    return heads


def size_text(num_bytes: int) -> str:
    """A number of bytes as text."""
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.1f} MiB"


def _files_beside(path: Path) -> list[Path]:
    """GGUF files in a target's folder, its own apart."""
    folder = path if path.is_dir() else path.parent
    is_beside = path.is_dir() or path.suffix == ".gguf"
    files = sorted(folder.glob("*.gguf"))[:MAX_FOLDERS] if is_beside else []
    return [file for file in files if file != path]


def _type_of(place: Path, target: Path) -> str | None:
    """The method of a checkpoint; None of others, and of a file for a target of another size."""
    try:
        layout = layout_of(tensor_names(str(place)))
        if layout is None or (place.is_file() and target.is_file() and not _fits(place, target)):
            return None
        return layout.method
    except (PlaygroundError, OSError):
        return None


def _fits(drafter: Path, target: Path) -> bool:
    width: object = GGUFFile(target).fields.get("embedding_length")
    return width == target_width(GGUFFile(drafter))


def draft_models_of(target: TargetSpec, others: Iterable[TargetSpec]) -> list[MethodPreset]:
    """Smaller models on this machine that can draft for a target by text, with any vocabulary.

    They are other targets, and the .gguf files in the folder of the target's own.
    """
    max_bytes = MAX_SHARE * num_bytes(target)
    path = Path(target.path or "").expanduser()
    files = _files_beside(path) if path.suffix == ".gguf" else []
    specs = {other.name: other for other in others if other.random is None}
    specs |= {str(file): TargetSpec.of_path_or_hub(str(file)) for file in files}
    specs.pop(target.name, None)
    sizes = {name: num_bytes(other) for name, other in specs.items()}
    by_size = sorted(sizes, key=sizes.__getitem__)
    small = (name for name in by_size if 0 < sizes[name] <= max_bytes and _is_model(specs[name]))
    by_text = {"decoding_type": "Draft_Target", "vocabulary": "text"}
    return [
        MethodPreset(
            name=f"{LOCAL_PREFIX}{name} for {target.name}",
            title=f"Draft model · {specs[name].title or name}, by text ({size_text(sizes[name])})",
            description="A smaller model on this machine drafts; its vocabulary may be any.",
            target=target.name,
            config=parse_method({**by_text, "speculative_model": name}, where=name),
        )
        for name in islice(small, MAX_MODELS)
    ]


def _is_model(spec: TargetSpec) -> bool:
    """False of a GGUF file that is damaged, of an unknown architecture, or part of a model."""
    if spec.path is None or not spec.path.endswith(".gguf"):
        return True
    try:
        file = GGUFFile(Path(spec.path).expanduser())
    except PlaygroundError:
        return False
    is_whole = file.metadata.get("general.type", "model") == "model"  # else an adapter, say
    return is_whole and can_read(file.architecture)


def num_bytes(spec: TargetSpec) -> int:
    """Size of a model's weights in a folder, a file or a wheel; 0 where unknown."""
    if spec.wheel is not None:
        return spec.wheel.member_bytes
    path = Path(spec.path).expanduser() if spec.path else None
    if path is None:
        return 0
    parts = glob.escape(path.name).replace("-00001-of-", "-?????-of-")
    files = path.parent.glob(parts) if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
