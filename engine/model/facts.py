"""A target's facts before it is loaded, from its config or GGUF header; weights are not read."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.hub import cached_file

from engine.errors import ConfigError, PlaygroundError, TargetError
from engine.model.files import read_settings
from engine.model.loading import (
    WEIGHT_BITS,
    kernel_support,
    needed_bytes,
    open_weights,
    packed_bits,
    pick_device,
    pick_dtype,
    unsupported_architecture,
)
from engine.model.packed import num_weights
from engine.model.placement import (
    all_free_bytes,
    first_device,
    free_bytes,
    is_placement,
    place_layers,
)
from engine.model.reading import empty_model, read_config, translate_errors
from engine.model.sources import TargetSpec, Weights, disable_telemetry, locate

LICENCE = re.compile(r"^license(?:_name)?:\s*['\"]?([\w.+ -]{1,80})", re.MULTILINE)
MAX_CARD_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target before it is loaded.

    Attributes:
        dtype: in which it would be loaded: `q4`, `bfloat16`, …
        num_bytes: memory that its weights need.
        free_bytes: of the device; None = unknown.
        licence: from the file or the model card; None where neither names one.
        slow: why the compiled kernels do not run it; None where they do, or on other devices.
        quantization: types of a GGUF file's matrices, by number of weights.
        fault: why it cannot be loaded here; None = no reason known.
        shares: as in `Placement`, where it is placed on several devices.
    """

    architecture: str
    num_parameters: int
    dtype: str
    num_bytes: int
    free_bytes: int | None
    context_len: int | None
    licence: str | None
    fault: str | None
    slow: str | None = None
    shares: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()


def facts_of(spec: TargetSpec, *, dtype: str, device: str, cache_dir: Path) -> TargetFacts:
    """A target's facts; for a hub model, only its config and card are fetched.

    Raises:
        SourceError, TargetError: it cannot be found or read.
        ConfigError: unknown dtype or device.
    """
    disable_telemetry()
    where = pick_device(first_device(device))
    torch_dtype, bits = pick_dtype(dtype, where), WEIGHT_BITS.get(dtype)
    weights = locate(spec, cache_dir)
    empty, slow, shares = None, None, tuple[str, ...]()
    with translate_errors(spec):
        file, num_bytes = open_weights(weights)
        if file is not None:
            architecture, count = file.architecture, file.num_weights
            context = file.metadata.get(f"{architecture}.context_length")
            licence = file.metadata.get("general.license")
            fault = unsupported_architecture(file)
        else:
            config = read_config(weights)
            architecture = str((getattr(config, "architectures", None) or [config.model_type])[0])
            context = getattr(config.get_text_config(), "max_position_embeddings", None)
            empty, fault = _empty_model(spec, config, architecture, num_bytes, torch_dtype)
            licence, count = None, 0 if empty is None else num_weights(empty)
    if where.type == "cpu":
        has_kernels, slow = kernel_support(file, empty)
        if bits is not None or (dtype == "auto" and has_kernels):
            try:
                bits = packed_bits(spec, file, dtype)
            except ConfigError as error:
                fault = str(error)
        if file is not None and file.metadata.get(f"{architecture}.expert_count"):
            bits = None  # loaded as floats
    needed = needed_bytes(count, torch_dtype, bits, file)
    free = None if is_placement(device) else free_bytes(where)
    if is_placement(device) and empty is not None:
        try:
            shares = place_layers(empty, device, torch_dtype, all_free_bytes()).shares
        except TargetError as error:
            fault = str(error)
    if fault is None and free is not None and needed > free:
        fault = f"Its weights need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free."
    return TargetFacts(
        architecture=architecture,
        num_parameters=count,
        dtype=str(torch_dtype).removeprefix("torch.") if bits is None else f"q{bits}",
        num_bytes=needed,
        free_bytes=free,
        context_len=context,
        licence=licence if isinstance(licence, str) else _licence(weights),
        fault=fault,
        slow=slow,
        shares=shares,
        quantization=() if file is None else tuple(file.weights_by_type),
    )


def _empty_model(
    spec: TargetSpec,
    config: Any,
    architecture: str,
    num_bytes: int | None,
    dtype: torch.dtype,
) -> tuple[transformers.PreTrainedModel | None, str | None]:
    """A model on the `meta` device; or None, and why it cannot serve as a target.

    Raises TargetError: it is not a causal language model of transformers.
    """
    try:
        return empty_model(config, num_bytes, spec.name, dtype=dtype), None
    except PlaygroundError as error:
        return None, str(error)
    except ValueError as error:
        message = f"{spec.name} is not a causal language model: {architecture}."
        raise TargetError(message) from error


def with_gguf_title(spec: TargetSpec) -> TargetSpec:
    """The spec with its GGUF file's title, if it names a local GGUF file."""
    with suppress(PlaygroundError):  # loading it reports what is wrong
        if file := _local_file(spec):
            return spec.replace(title=file.title)
    return spec


def has_chat_template(spec: TargetSpec) -> bool | None:
    """Whether a target has a chat template; None where only loading it tells."""
    with suppress(PlaygroundError):
        if file := _local_file(spec):
            return bool(file.metadata.get("tokenizer.chat_template"))
        if spec.path is not None:
            folder = Path(spec.path).expanduser()
            config = folder / "tokenizer_config.json"
            inside = config.is_file() and "chat_template" in read_settings(config)
            return inside or any(folder.glob("chat_template*"))
    return None


def _local_file(spec: TargetSpec) -> Any:
    weights = None if spec.path is None else locate(spec, Path())
    return None if weights is None or weights.gguf_file is None else open_weights(weights)[0]


def _licence(weights: Weights) -> str | None:
    """The licence in the front matter of the model card, if it names one."""
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
        head = text.read(MAX_CARD_CHARS).split("\n---", 1)[0]
    match = LICENCE.search(head)
    return match[1].strip() if match else None
