"""Drafters for a target that are on this machine: heads in its folder, and smaller models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.drafters import methods as decoding_types
from engine.drafters import parse_method
from engine.drafters.heads.medusa import count_heads
from engine.errors import PlaygroundError
from engine.model.checkpoints import tensor_names
from engine.model.sources import TargetSpec
from presets import MethodPreset

MAX_FOLDERS = 64
HEAD_TENSORS = {
    "midlayer.hidden_norm.weight": "Eagle3",
    "layers.0.hidden_norm.weight": "Eagle3",
    "rnn_u.weight": "ReDrafter",
    "fc.weight": "Eagle",
}
"""Tensors that only heads of one kind have; the first present decides."""
LOCAL_PREFIX = "local "
"""How the keys of drafters begin that are models on this machine."""
MAX_SHARE, MAX_MODELS = 0.5, 3
"""Size of a draft model over the target's, and how many are offered: the smallest."""


def heads_of(spec: TargetSpec) -> list[MethodPreset]:
    """Heads in a target's folder or in the folders right below it; a target elsewhere has none."""
    folder = Path(spec.path).expanduser() if spec.path else None
    if folder is None or not folder.is_dir():
        return []
    below = sorted(place for place in folder.iterdir() if place.is_dir())
    heads = []
    for place in (folder, *below[:MAX_FOLDERS]):
        decoding_type = _type_of(place)
        if decoding_type is not None:
            values = {"decoding_type": decoding_type, "speculative_model": str(place)}
            heads.append(
                MethodPreset(
                    name=str(place),
                    title=f"{decoding_types()[decoding_type].title} · {place.name}",
                    target=spec.name,
                    config=parse_method(values, where=str(place)),
                )
            )
    return heads


def _type_of(place: Path) -> str | None:
    try:
        names = tensor_names(str(place))
        if count_heads(str(place)):
            return "Medusa"
    except (PlaygroundError, OSError):
        return None
    return next((kind for name, kind in HEAD_TENSORS.items() if name in names), None)


def draft_models_of(target: TargetSpec, others: Iterable[TargetSpec]) -> list[MethodPreset]:
    """Smaller models on this machine, to draft for a target by text: of any vocabulary.

    They are other targets, and the .gguf files beside the target's own.
    """
    most = MAX_SHARE * num_bytes(target)
    specs = {other.name: other for other in (*others, *_beside(target)) if other.random is None}
    specs.pop(target.name, None)
    sizes = {name: num_bytes(other) for name, other in specs.items()}
    small = sorted(
        (name for name, size in sizes.items() if 0 < size <= most), key=sizes.__getitem__
    )
    return [_by_text(target, specs[name]) for name in small[:MAX_MODELS]]


def _beside(target: TargetSpec) -> list[TargetSpec]:
    path = Path(target.path or "").expanduser()
    if path.suffix != ".gguf":
        return []
    files = sorted(file for file in path.parent.glob("*.gguf") if file != path)
    return [TargetSpec.of_path_or_hub(str(file)) for file in files[:MAX_FOLDERS]]


def _by_text(target: TargetSpec, model: TargetSpec) -> MethodPreset:
    values = {
        "decoding_type": "Draft_Target",
        "speculative_model": model.name,
        "vocabulary": "text",
    }
    return MethodPreset(
        name=f"{LOCAL_PREFIX}{model.name} for {target.name}",
        title=f"Draft model · {model.title or model.name}, by text",
        description="A smaller model on this machine drafts; its vocabulary may be any.",
        target=target.name,
        config=parse_method(values, where=model.name),
    )


def num_bytes(spec: TargetSpec) -> int:
    """Of a model's weights in a folder, a file or a wheel; 0 where that is not known."""
    if spec.wheel is not None:
        return spec.wheel.member_bytes
    path = Path(spec.path).expanduser() if spec.path else None
    if path is None:
        return 0
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def is_downloaded(place: str) -> bool:
    """Whether a folder, file or hub model is on this machine."""
    if Path(place).expanduser().exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(place, "config.json"), str)
    except HFValidationError:
        return False
