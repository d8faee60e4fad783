"""What a target is, before it is loaded: read from its config or header, not from its weights."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils.hub import cached_file

from engine.errors import PlaygroundError, TargetError
from engine.model.files import check_sizes, read_settings
from engine.model.kinds import is_recurrent
from engine.model.loading import (
    WEIGHT_BITS,
    needed_bytes,
    opened,
    pick_device,
    pick_dtype,
    unreadable,
    why_slow,
)
from engine.model.packed import num_weights
from engine.model.placement import (
    Share,
    all_free_bytes,
    first_of,
    free_bytes,
    is_placement,
    placed,
)
from engine.model.reading import empty_model, read_config, translate_errors
from engine.model.sources import TargetSpec, Weights, locate, without_telemetry

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LICENCE = re.compile(r"^license(?:_name)?:\s*['\"]?([\w.+ -]{1,80})", re.MULTILINE)
MOST_CARD_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target before it is loaded.

    Attributes:
        dtype: that it would be loaded in: `q4`, `bfloat16`, …
        num_bytes: that its weights need in memory.
        free_bytes: of the device; None where it cannot be told.
        licence: as the file or the model card says it; None where neither does.
        slow: why the compiled kernels do not run it; None where they do, or on other devices.
        quantization: types of a GGUF file's matrices, those of most weights first.
        fault: why it cannot be loaded here; None where nothing is known against it.
        shares: of the devices that it is spread over.
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
    shares: tuple[Share, ...] = ()
    quantization: tuple[str, ...] = ()


class _Model(NamedTuple):
    """What a config or a header says; `empty` is the model without its weights."""

    architecture: str
    num_parameters: int
    context_len: int | None
    fault: str | None = None
    empty: PreTrainedModel | None = None


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
        model = _of_header(file) if file else _of_config(spec, weights, num_bytes, torch_dtype)
    slow, fault, shares = None, model.fault, tuple[Share, ...]()
    if where.type == "cpu":
        has_kernels, slow = why_slow(file, model.empty)
        if file is not None and dtype == "auto" and has_kernels:
            bits = file.bits
        if file is not None and file.metadata.get(f"{file.architecture}.expert_count"):
            bits = None  # by way of floats
    free = free_bytes(where)
    needed = needed_bytes(model.num_parameters, torch_dtype, bits, file)
    if is_placement(device):
        free = None
        if model.empty is not None:
            try:
                shares = placed(model.empty, device, torch_dtype, all_free_bytes()).shares
            except TargetError as error:
                fault = str(error)
    elif fault is None and free is not None and needed > free:
        fault = f"Its weights need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free."
    licence = None if file is None else file.metadata.get("general.license")
    return TargetFacts(
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        dtype=str(torch_dtype).removeprefix("torch.") if bits is None else f"q{bits}",
        num_bytes=needed,
        free_bytes=free,
        context_len=model.context_len,
        licence=licence if isinstance(licence, str) else _licence(weights),
        fault=fault,
        slow=slow,
        shares=shares,
        quantization=() if file is None else tuple(file.weights_by_type),
    )


def _of_header(file: Any) -> _Model:
    context = file.metadata.get(f"{file.architecture}.context_length")
    return _Model(file.architecture, file.num_weights, context, unreadable(file))


def _of_config(
    spec: TargetSpec, weights: Weights, num_bytes: int | None, dtype: torch.dtype
) -> _Model:
    config = read_config(weights)
    names = getattr(config, "architectures", None) or [config.model_type]
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    try:
        empty = empty_model(config, num_bytes, spec.name, dtype=dtype)
    except PlaygroundError as error:
        return _Model(str(names[0]), 0, context, str(error))
    except ValueError as error:  # transformers has no causal language model of this kind
        raise TargetError(f"{spec.name} is not a causal language model: {names[0]}.") from error
    return _Model(str(names[0]), num_weights(empty), context, empty=empty)


def titled(spec: TargetSpec) -> TargetSpec:
    """The same, by the title that its GGUF file has, if it comes from one on this machine."""
    with suppress(PlaygroundError):  # inspecting and loading it says what is wrong
        if file := _local_file(spec):
            return spec.replace(title=file.title)
    return spec


def has_chat_template(spec: TargetSpec) -> bool | None:
    """Whether a target has a chat template; None where that is not known before it is loaded."""
    with suppress(PlaygroundError):
        if file := _local_file(spec):
            return bool(file.has_chat_template)
        if spec.path is not None:
            folder = Path(spec.path).expanduser()
            config = folder / "tokenizer_config.json"
            inside = config.is_file() and "chat_template" in read_settings(config)
            return inside or any(folder.glob("chat_template*"))
    return None


def _local_file(spec: TargetSpec) -> Any:
    weights = None if spec.path is None else locate(spec, Path())
    return None if weights is None or weights.gguf_file is None else opened(weights)[0]


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
