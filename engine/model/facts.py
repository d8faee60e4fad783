"""What a target is, before it is loaded: read from its config or header, not from its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

from engine.errors import PlaygroundError, TargetError
from engine.model.files import check_sizes, read_settings
from engine.model.kinds import is_recurrent
from engine.model.loading import (
    WEIGHT_BITS,
    all_free_bytes,
    free_bytes,
    needed_bytes,
    opened,
    pick_device,
    pick_dtype,
)
from engine.model.placement import Share, first_of, is_placement, placed
from engine.model.reading import checked_parameters, read_config, translate_errors
from engine.model.sources import TargetSpec, Weights, locate, without_telemetry

LICENCE = re.compile(r"^license(?:_name)?:\s*['\"]?([\w.+ -]{1,80})", re.MULTILINE)
MOST_CARD_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target before it is loaded.

    Attributes:
        num_bytes: that its weights need in memory.
        free_bytes: of the device; None where it cannot be told.
        licence: as the model card says it; None where it says nothing.
        quantization: types of a GGUF file's matrices, those of most weights first.
        fault: why it cannot be loaded here; None where nothing is known against it.
        shares: of the devices that it is spread over.
    """

    architecture: str
    num_parameters: int
    num_bytes: int
    free_bytes: int | None
    context_len: int | None
    licence: str | None
    fault: str | None
    shares: tuple[Share, ...] = ()
    quantization: tuple[str, ...] = ()


def facts_of(spec: TargetSpec, *, dtype: str, device: str, cache_dir: Path) -> TargetFacts:
    """A target's facts; of a hub's model its config and card are fetched, nothing else.

    Raises:
        SourceError, TargetError: it cannot be found or read.
        ConfigError: unknown dtype or device.
    """
    without_telemetry()
    where = pick_device(first_of(device))
    torch_dtype, bits = pick_dtype(dtype, where), WEIGHT_BITS.get(dtype)
    weights = locate(spec, cache_dir)
    with translate_errors(spec):
        file, num_bytes = opened(weights)
        facts = (
            _of_header(file.metadata, file.num_weights)
            if file is not None
            else _of_config(spec, weights, num_bytes)
        )
        architecture, count, context_len, fault, licence = facts
        licence = licence or _licence(weights)
    if file is not None and where.type == "cpu" and (bits is not None or dtype == "auto"):
        bits = file.bits or bits
    free, needed = free_bytes(where), needed_bytes(count, torch_dtype, bits, file)
    shares: tuple[Share, ...] = ()
    if is_placement(device):
        free = None
        if fault is None and file is None:
            shares, fault = _shares(weights, device, torch_dtype)
    elif fault is None and free is not None and needed > free:
        fault = f"Its weights need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free."
    types = () if file is None else tuple(file.weights_by_type)
    return TargetFacts(
        architecture, count, needed, free, context_len, licence, fault, shares, types
    )


def _shares(
    weights: Weights, device: str, dtype: torch.dtype
) -> tuple[tuple[Share, ...], str | None]:
    """What lies on which device, or why the model cannot be placed."""
    try:
        return placed(read_config(weights), device, dtype, all_free_bytes()).shares, None
    except TargetError as error:
        return (), str(error)


_ModelFacts = tuple[str, int, int | None, str | None, str | None]
"""Architecture, number of parameters, context length, fault, licence."""


def _of_header(metadata: Mapping[str, Any], count: int) -> _ModelFacts:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    name = str(metadata["general.architecture"])
    context = metadata.get(f"{name}.context_length")
    fault = None
    if name not in GGUF_SUPPORTED_ARCHITECTURES:
        fault = f"transformers cannot read GGUF files of the architecture {name}."
    licence = metadata.get("general.license")
    return name, count, context, fault, licence if isinstance(licence, str) else None


def _of_config(spec: TargetSpec, weights: Weights, num_bytes: int | None) -> _ModelFacts:
    config = read_config(weights)
    names = getattr(config, "architectures", None) or [config.model_type]
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    count, fault = 0, None
    try:
        count = checked_parameters(config, num_bytes, spec.name)
    except PlaygroundError as error:
        fault = str(error)
    except ValueError as error:  # transformers has no causal language model of this kind
        raise TargetError(f"{spec.name} is not a causal language model: {names[0]}.") from error
    return str(names[0]), count, context, fault, None


def recurrent_by_config(folder: Path) -> bool:
    """Whether the model whose config.json lies in a folder has recurrent layers, as far as that
    can be read."""
    spec = TargetSpec(name=folder.name, path=str(folder))
    try:
        check_sizes(read_settings(folder / "config.json"), spec.name)
        with translate_errors(spec):
            config = read_config(Weights(str(folder), None, None, True, None))
    except PlaygroundError:
        return False
    return is_recurrent(config.get_text_config())


def _licence(weights: Weights) -> str | None:
    """What the model card's head says."""
    if weights.local:
        card: str | None = str(Path(weights.location) / "README.md")
    else:
        card = cached_file(
            weights.location,
            "README.md",
            revision=weights.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if card is None or not Path(card).is_file():
        return None
    with Path(card).open(encoding="utf-8", errors="replace") as text:
        head = text.read(MOST_CARD_CHARS)
    match = LICENCE.search(head.split("\n---", 1)[0])
    return match[1].strip() if match else None
