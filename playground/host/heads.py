"""Drafters in a target's own folder, recognized by the names of their tensors."""

from __future__ import annotations

from pathlib import Path

from engine.drafters import methods, parse_method
from engine.drafters.heads.medusa import count_heads
from engine.errors import PlaygroundError
from engine.model.checkpoints import tensor_names
from engine.model.sources import TargetSpec
from presets import MethodPreset

MAX_FOLDERS = 64
SIGNS = {
    "midlayer.hidden_norm.weight": "Eagle3",
    "layers.0.hidden_norm.weight": "Eagle3",
    "rnn_u.weight": "ReDrafter",
    "fc.weight": "Eagle",
}
"""Tensors that only heads of one kind have; the first present decides."""


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
                    title=f"{methods()[decoding_type].title} · {place.name}",
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
    return next((kind for name, kind in SIGNS.items() if name in names), None)
