"""Decides how a target is loaded, from its config or GGUF header; no weights are read."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers.utils.hub import cached_file

from engine.errors import ConfigError, OutOfMemoryError, TargetError, validate_choice
from engine.kernels.cpu import native
from engine.kernels.cpu.compile import NO_COMPILER, NoKernels, find_compiler
from engine.kernels.cpu.experts import has_plain_experts
from engine.kernels.cpu.operators import GGML_FORMATS
from engine.model.backend import Precision
from engine.model.files import check_folder, check_sizes, read_settings
from engine.model.gguf.config import extract_config
from engine.model.gguf.drafters import check_is_model
from engine.model.gguf.file import GGUFFile
from engine.model.packed import num_weights
from engine.model.placement import (
    Placement,
    all_free_bytes,
    first_device,
    free_bytes,
    is_placement,
    place_layers,
)
from engine.model.reading import empty_model, read_config, translate_errors
from engine.model.sources import ProgressCallback, TargetSpec, Weights, disable_telemetry, locate
from engine.safe_text import short

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "q8", "q4"]
"""`q8`, `q4`: matrices in at most 8 or 4 bits, a GGUF file's own kept as stored; CPU only."""
WEIGHT_BITS = {"q8": 8, "q4": 4}
FindKernels = Callable[[GGUFFile | None], CDLL | None]
"""The compiled kernels that a file needs; None = nothing is compiled. Raises NoKernels."""


def expect_kernels(file: GGUFFile | None) -> None:
    """Stands in for the kernels where nothing is compiled. Raises NoKernels: no compiler."""
    if find_compiler() is None:
        raise NoKernels(NO_COMPILER)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """How a target is loaded.

    Attributes:
        device: the setting, which may name several.
        file: the GGUF file with the weights, if they are in one.
        source: where config and tokenizer are: beside the weights, or extracted from `file`.
        empty: the model on the `meta` device.
        kernels: as `FindKernels` returns them.
        no_kernels: why the kernels do not run the forward; None where they do, and elsewhere than
            on the processor.
    """

    spec: TargetSpec
    device: str
    weights: Weights
    file: GGUFFile | None
    source: Weights
    config: Any
    empty: transformers.PreTrainedModel
    precision: Precision
    kernels: CDLL | None
    no_kernels: str | None

    @property
    def why_not(self) -> dict[str, str]:
        """As in `Backend`."""
        no_kernels = self.no_kernels
        return {} if no_kernels is None else {"native_kernels": f"not used: {no_kernels}"}

    @property
    def stored(self) -> Precision:
        """Of its matrices in memory; experts that the kernels do not run are loaded as floats."""
        own = self.precision
        return Precision(own.dtype) if own.is_quantized and has_plain_experts(self.empty) else own

    @property
    def num_bytes(self) -> int:
        """Memory that the weights need."""
        count = num_weights(self.empty)
        bits, is_quantized = self.stored.bits, self.stored.is_quantized
        if bits is None or not is_quantized:
            return count * self.precision.dtype.itemsize
        if self.file is not None and self.file.bits is not None:
            types = self.file.weights_by_type.items()  # in 9 bits if the kernels lack a type
            lacking = sum(num for type_id, num in types if type_id not in GGML_FORMATS)
            return self.file.num_bytes + lacking * 9 // 8
        model: Any = self.empty
        vocab = (model.get_input_embeddings(), model.get_output_embeddings())
        tables: dict[int, int] = {
            id(one.weight): one.weight.numel() for one in vocab if one is not None
        }
        return (count * (bits + 1) + sum(tables.values()) * (max(bits, 8) - bits)) // 8

    def destination(self) -> torch.device | Placement:
        """Where the model goes. Raises OutOfMemoryError: it does not fit there."""
        if is_placement(self.device):
            return place_layers(self.empty, self.device, self.precision.dtype, all_free_bytes())
        where = pick_device(self.device)
        free = free_bytes(where)
        if self.num_bytes > free:
            raise OutOfMemoryError(
                f"{self.spec.name} needs about {self.num_bytes / 2**30:.1f} GiB for its weights in "
                f"{self.stored.name}, but {where} has {free / 2**30:.1f} GiB free. Choose a "
                "smaller model, a smaller dtype or another device."
            )
        return where


def plan_loading(
    spec: TargetSpec,
    *,
    dtype: str,
    device: str,
    cache_dir: Path,
    find_kernels: FindKernels = expect_kernels,
    report: ProgressCallback = lambda message, fraction: None,
) -> LoadPlan:
    """Decide how to load a target; of a hub model, only its config is fetched.

    Args:
        find_kernels: called only where the kernels are to be used.

    Raises:
        SourceError: the weights cannot be found or read.
        TargetError: the model cannot serve as a target, or `dtype` needs kernels that are missing.
        ConfigError: unknown dtype or device, or they do not fit the weights.
    """
    disable_telemetry()
    where = pick_device(first_device(device))
    torch_dtype, no_kernels = pick_dtype(dtype, where), None
    report(f"Looking for {spec.title or spec.name}", None)
    weights = locate(spec, cache_dir, report)
    with translate_errors(spec):
        file, stored_bytes = open_weights(weights)
        bits, kernels = _quantization(spec, file, dtype, device, find_kernels)
        if bits is not None:
            torch_dtype = torch.bfloat16
        report("Reading its config and tokenizer", 0.1)
        source = weights if file is None else extract_config(file, weights, cache_dir)
        config = read_config(source)
        empty = empty_model(config, stored_bytes, spec.name, dtype=torch_dtype)
    if where.type == "cpu" and not is_placement(device):
        has_compiler = bits is not None or find_compiler() is not None
        no_kernels = native.unsupported_reason(empty) if has_compiler else NO_COMPILER
        if no_kernels is None and bits is None:
            try:
                bits, kernels = 16, find_kernels(None)
            except NoKernels as error:
                bits, no_kernels = None, str(error)
    own = Precision(torch_dtype, bits)
    return LoadPlan(spec, device, weights, file, source, config, empty, own, kernels, no_kernels)


def open_weights(weights: Weights) -> tuple[GGUFFile | None, int | None]:
    """The GGUF file, if it is one, and the bytes of the weights, if they are on this machine.

    Raises ConfigError, SourceError: a file is damaged or invalid.
    """
    if weights.local and weights.gguf_file is None:
        return None, check_folder(Path(weights.location))
    name = weights.gguf_file or "config.json"
    path = Path(weights.location) / name
    if not weights.local:
        path = Path(cached_file(weights.location, name, revision=weights.revision) or name)
    if weights.gguf_file is None:
        check_sizes(read_settings(path), weights.location)
        return None, None
    file = GGUFFile(path)
    check_is_model(file)
    return file, file.num_bytes


def _quantization(
    spec: TargetSpec, file: GGUFFile | None, dtype: str, device: str, find_kernels: FindKernels
) -> tuple[int | None, CDLL | None]:
    """Minimum bits per matrix weight, and the kernels, where matrices are quantized; else None.

    Raises:
        ConfigError: the file's matrices have more bits than `dtype`, or quantized weights are
            requested on several devices.
        TargetError: `dtype` is quantized, and the kernels cannot be used here.
    """
    bits_of_dtype, own_bits = WEIGHT_BITS.get(dtype), None if file is None else file.bits
    if is_placement(device):
        if bits_of_dtype is None:
            return None, None
        raise ConfigError(
            f"dtype {dtype} runs on one device only, got device {device}. Choose bfloat16 or "
            "another device."
        )
    if bits_of_dtype is not None and bits_of_dtype < (own_bits or 0):
        raise ConfigError(
            f"dtype is {dtype}, but {spec.name}'s file holds its matrices in {own_bits} bits. "
            f"Choose q{own_bits}, or auto."
        )
    keeps_own = dtype == "auto" and own_bits is not None and pick_device(device).type == "cpu"
    if bits_of_dtype is None and not keeps_own:
        return None, None
    try:
        return own_bits or bits_of_dtype, find_kernels(file)
    except NoKernels as error:
        if bits_of_dtype is None:
            return None, None
        raise TargetError(
            f"dtype {dtype} needs the compiled kernels, which are not used: {error}. Choose "
            "bfloat16 or float32."
        ) from error


def pick_device(name: str) -> torch.device:
    """The device that a setting names; ConfigError if it does not exist here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = "device must be auto, cpu, cuda, cuda:N, balanced or a list like cuda:0,cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{allowed}, got {short(name)}.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(f"device is {name}, but torch sees no CUDA device. Use cpu or auto.")
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name}, but there are cuda:0 to cuda:{count - 1} only.")
    elif device.type != "cpu" or device.index:
        # An accelerator that this build of torch supports here, such as `mps` or `xpu`?
        available = torch.accelerator.current_accelerator(check_available=True)
        if available is None or device.type != available.type:
            raise ConfigError(f"{allowed}, got {short(name)}.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a setting; for `q8` and `q4`, that of everything but matrices.

    Raises ConfigError: it is not one of `DtypeName`, or not available on this device.
    """
    validate_choice("dtype", name, get_args(DtypeName))
    if name in WEIGHT_BITS:
        if device.type != "cpu":
            raise ConfigError(
                f"dtype {name} runs on the processor only, got device {device}. Use cpu."
            )
        return torch.bfloat16
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cpu":
        flags = torch.cpu.get_capabilities()
        has_bf16 = any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
        return torch.bfloat16 if has_bf16 else torch.float32
    has_bf16 = device.type == "xpu"
    if device.type == "cuda":
        # `is_bf16_supported` includes emulation, and asks the current card.
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16
