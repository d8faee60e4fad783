"""Drafter checkpoints: a folder, a weight file or a hub repository, with tensors and a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import DrafterError, SourceError, first_line
from engine.model.files import read_settings, read_tensors
from engine.model.gguf.drafters import drafter_names, read_drafter
from engine.model.sources import disable_telemetry, hub_error

SCALE = "_scale"
INT8_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}
"""compressed-tensors' `quantization_config` of int8 matrices with a scale per row."""
GGUF_SUFFIX = ".gguf"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.pt"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A drafter's `config.json` ({} where there is none) and its tensors as stored.

    `location` is what the user gave; messages name it.
    """

    location: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        """A tensor with this shape (None = any size); DrafterError if there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise DrafterError(
                f"{self.location} has no tensor {name}. It is not a checkpoint of this method; "
                f"it holds {', '.join(sorted(self.tensors)[:6])} …"
            )
        fits = len(shape) == tensor.ndim and all(
            size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
        )
        if shape and not fits:
            expected = "×".join("any" if s is None else str(s) for s in shape)
            actual = "×".join(str(s) for s in tensor.shape)
            raise DrafterError(
                f"{self.location}: {name} is {actual}, but the target needs {expected}. "
                "This drafter was made for another model."
            )
        return tensor


def read_checkpoint(
    location: str, *, keep: Callable[[str], bool] = lambda name: True
) -> Checkpoint:
    """Read a drafter's folder, single weight file (GGUF's too), or hub repository.

    Args:
        keep: whether to read a tensor, by its name; a drafter inside a full model reads its own.

    Raises SourceError: it does not exist, has no weight file, or cannot be read safely.
    """
    path = Path(location).expanduser()
    if not path.exists():
        from huggingface_hub import snapshot_download

        with _hub_errors(location):
            path = Path(snapshot_download(location, allow_patterns=_HUB_PATTERNS))
    if path.suffix == GGUF_SUFFIX:
        config, tensors = read_drafter(path)
        kept = {name: tensor for name, tensor in tensors.items() if keep(name)}
        return Checkpoint(location, config, kept)
    tensors = {}
    for file in _weight_files(path, location):
        tensors |= read_tensors(file, lambda name: keep(name.removesuffix(SCALE)))
    config_file = (path.parent if path.is_file() else path) / "config.json"
    config = read_settings(config_file) if config_file.exists() else {}
    if config.get("quantization_config") == INT8_QUANTIZATION:
        tensors = _dequantized(location, tensors)
        del config["quantization_config"]
    return Checkpoint(location, config, tensors)


def quantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices `*.weight` as int8 with `*.weight_scale` `(rows, 1)`; other tensors in bfloat16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith(".weight"):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            stored[name], stored[name + SCALE] = (tensor / scale).round().to(torch.int8), scale
        else:
            stored[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    return stored


def _dequantized(location: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantize`, to bfloat16; SourceError where a scale is missing."""
    plain = {name: t for name, t in tensors.items() if not name.endswith(SCALE)}
    for name, matrix in plain.items():
        if matrix.dtype == torch.int8:
            scale = tensors.get(name + SCALE)
            if scale is None or scale.shape != (len(matrix), 1):
                raise SourceError(f"{location} has no scale per row of {name}. Copy it again.")
            plain[name] = (matrix.float() * scale.float()).bfloat16()
    return plain


def local_file(location: str) -> Path:
    """A file by its path, or by `owner/repository/file` on the hub.

    Raises SourceError: it is neither.
    """
    path = Path(location).expanduser()
    if path.is_file():
        return path
    owner, _, rest = location.partition("/")
    repository, _, file = rest.partition("/")
    if not file:
        raise SourceError(f"{location!r:.200} is neither a local file nor owner/repository/file.")
    from huggingface_hub import hf_hub_download

    with _hub_errors(location):
        return Path(hf_hub_download(f"{owner}/{repository}", file))


def tensor_names(location: str) -> tuple[str, ...]:
    """Names of all tensors in a local folder or weight file; no values are read.

    Raises SourceError: as `read_checkpoint`, and for a hub id.
    """
    path = Path(location).expanduser()
    if path.suffix == GGUF_SUFFIX:
        return drafter_names(path)
    files = _weight_files(path, location)
    return tuple(name for file in files for name in read_tensors(file, values=False))


def _weight_files(path: Path, location: str) -> list[Path]:
    """The file, or the folder's weights: safetensors if there are any, else pickles."""
    if path.is_file():
        return [path]
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        files = sorted(path.glob(pattern))
        if files:
            return files
    raise SourceError(f"{location} has no .safetensors, .bin or .pt file on this machine.")


@contextmanager
def _hub_errors(location: str) -> Iterator[None]:
    """Translates exceptions of the hub's client into SourceError."""
    from huggingface_hub.errors import HFValidationError

    disable_telemetry()
    try:
        yield
    except HFValidationError as error:
        raise SourceError(f"{location!r:.200} is neither a local path nor a hub id.") from error
    except OSError as error:
        fault = SourceError(f"{location}: {first_line(error)}.")
        raise hub_error(location, error) or fault from error
