"""A target's facts before it is loaded, from its config or GGUF header; weights are not read."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from engine.errors import OutOfMemoryError, PlaygroundError
from engine.model.files import read_settings
from engine.model.packed import num_weights
from engine.model.placement import Placement, free_bytes, is_placement
from engine.model.plan import open_weights, pick_device, plan_loading
from engine.model.sources import TargetSpec, Weights, locate

LICENCE = re.compile(r"^license(?:_name)?:\s*['\"]?([\w.+ -]{1,80})", re.MULTILINE)
MAX_CARD_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target before it is loaded.

    Attributes:
        dtype: in which it would be loaded: `q4`, `bfloat16`, …
        num_bytes: memory that its weights need.
        free_bytes: of the device; None = several devices, see `shares`.
        licence: from the file or the model card; None where neither names one.
        slow: why the compiled kernels do not run it; None where they do, or on other devices.
        quantization: types of a GGUF file's matrices, by number of weights.
        fault: why it does not fit here; None where it does.
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

    Raises SourceError, TargetError, ConfigError: as `plan_loading`.
    """
    plan = plan_loading(spec, dtype=dtype, device=device, cache_dir=cache_dir)
    config, file, fault, shares = plan.config, plan.file, None, tuple[str, ...]()
    licence = None if file is None else file.metadata.get("general.license")
    try:
        place = plan.destination()
        shares = place.shares if isinstance(place, Placement) else ()
    except OutOfMemoryError as error:
        fault = str(error)
    return TargetFacts(
        architecture=str((getattr(config, "architectures", None) or [config.model_type])[0]),
        num_parameters=num_weights(plan.empty),
        dtype=plan.stored.name,
        num_bytes=plan.num_bytes,
        free_bytes=None if is_placement(device) else free_bytes(pick_device(device)),
        context_len=getattr(config.get_text_config(), "max_position_embeddings", None),
        licence=licence if isinstance(licence, str) else _licence(plan.weights),
        fault=fault,
        slow=plan.no_kernels,
        shares=shares,
        quantization=() if file is None else file.matrix_types,
    )


def with_gguf_title(spec: TargetSpec) -> TargetSpec:
    """The spec with its GGUF file's title, if it names a local GGUF file."""
    with suppress(PlaygroundError):  # loading it reports what is wrong
        if file := _local_file(spec):
            return spec.replace(title=file.title)
    return spec


def chat_template_of(spec: TargetSpec) -> str | None:
    """A target's chat template; empty without one, None where only loading it tells."""
    with suppress(PlaygroundError, OSError, UnicodeDecodeError):
        if file := _local_file(spec):
            return str(file.metadata.get("tokenizer.chat_template") or "")
        if spec.path is not None:
            folder = Path(spec.path).expanduser()
            config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
            if template.is_file():
                return template.read_text(encoding="utf-8")
            inside = read_settings(config).get("chat_template") if config.is_file() else None
            return str(inside or "".join(map(str, folder.glob("chat_template*"))))
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
