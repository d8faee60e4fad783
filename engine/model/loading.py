"""Loads a target: locate, check memory, read weights and tokenizer, prepare its attention."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from engine.errors import ConfigError, OutOfMemoryError, TargetError, validate_choice
from engine.kernels.cpu import native
from engine.kernels.cpu.compile import NO_COMPILER, NoKernels, find_compiler, full_library, library
from engine.kernels.cpu.gguf import GGUFFile
from engine.kernels.cpu.gguf_model import (
    GGUFTensors,
    can_read,
    divide_frequencies,
    end_ids,
    extract_config,
    fast_gguf_reader,
    read_extracted_tokenizer,
    unsupported_reason,
)
from engine.kernels.cpu.operators import needs_rare_formats, pack_native
from engine.kernels.cpu.packed_model import (
    CheckpointTensors,
    SafetensorsTensors,
    UnmappedTensor,
    load_packed,
    safetensors_files,
)
from engine.kernels.cuda import runner
from engine.kernels.cuda.graphs import CudaGraphs
from engine.kernels.cuda.norms import fuse_norms
from engine.model.audit import check_packed, forward_mismatch, plain_step_s, reference_logits
from engine.model.files import check_folder, check_sizes, read_settings
from engine.model.forward import Forward, ModulesForward, prepare_attention
from engine.model.packed import Packed, can_pack, num_weights, pack
from engine.model.placement import (
    Placement,
    all_free_bytes,
    first_device,
    free_bytes,
    is_placement,
    place_layers,
)
from engine.model.reading import (
    empty_model,
    freeze_imports,
    read_config,
    read_tokenizer,
    read_weights,
    report_progress,
    translate_errors,
    trim_memory,
)
from engine.model.sources import ProgressCallback, TargetSpec, Weights, disable_telemetry, locate
from engine.model.target import Target
from engine.safe_text import short

LOG = logging.getLogger(__name__)
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "q8", "q4"]
"""`q8`, `q4`: matrices in at most 8 or 4 bits, a GGUF file's own kept as stored; CPU only."""
WEIGHT_BITS = {"q8": 8, "q4": 4}
Destination = torch.device | Placement


def load_target(
    spec: TargetSpec,
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path,
    progress: ProgressCallback | None = None,
) -> Target:
    """Load a model and prepare it for tree verification.

    Args:
        dtype: `auto` = a GGUF file's own quantization on CPUs that the compiled kernels run on,
            else bfloat16 on CUDA and on CPUs with native bfloat16, else float32.
        device: `auto` = CUDA if available, else the CPU; any torch device string, or several
            devices in the syntax of `placement`.
        cache_dir: for fetched weights, tokenizers of GGUF files and compiled kernels.
        progress: called with the stage and the share done.

    Raises:
        SourceError: the weights cannot be found or read.
        TargetError: the model cannot serve as a target, or needs too much memory.
        ConfigError: unknown dtype or device.
    """
    report = progress or (lambda message, fraction: None)
    freeze_imports()
    disable_progress_bar()  # `progress` replaces it
    set_verbosity_error()
    disable_telemetry()
    where = pick_device(first_device(device))
    pick_dtype(dtype, where)
    report(f"Looking for {spec.title or spec.name}", None)
    weights = locate(spec, cache_dir, report)
    with translate_errors(spec):
        file, num_bytes = open_weights(weights)
        plan = _quantization_plan(spec, file, dtype, device, cache_dir)
        torch_dtype = torch.bfloat16 if plan is not None else pick_dtype(dtype, where)
        report("Reading its config and tokenizer", 0.1)
        source = weights if file is None else extract_config(file, weights, cache_dir)
        config = read_config(source)
        empty = empty_model(config, num_bytes, spec.name, dtype=torch_dtype)
        needed = needed_bytes(num_weights(empty), torch_dtype, plan.bits if plan else None, file)
        place = _destination(spec, empty, needed, torch_dtype, device)
        tokenizer = (read_tokenizer if file is None else read_extracted_tokenizer)(source)
        reason = None
        if plan is None and isinstance(place, torch.device) and place.type == "cpu":
            plan, reason = _native_plan(spec, empty, cache_dir)
        model, remark = _read_model(spec, weights, empty, file, plan, torch_dtype, place, report)
    if file is not None and model.generation_config is not None:
        model.generation_config.eos_token_id = end_ids(file, tokenizer)
    report("Preparing it for this device", 0.95)
    provenance = _provenance(spec, weights, config)
    make_target = functools.partial(Target, model, tokenizer, name=spec.name, provenance=provenance)
    target = _choose_forward(make_target, spec, plan, reason)
    no_compiler = target.device.type == "cpu" and target.kernels is None and not find_compiler()
    if remark := remark or (NO_COMPILER if no_compiler and spec.native_kernels != "off" else ""):
        target.provenance["remark"] = f"{target.name} runs slowly: {remark}."
    trim_memory()
    LOG.info("%s runs by %s", spec.name, target.environment()["forward"])
    report("Ready", 1.0)
    return target


def _provenance(spec: TargetSpec, weights: Weights, config: Any) -> dict[str, Any]:
    """What identifies the weights, for the run log."""
    revision = weights.revision or getattr(config, "_commit_hash", None)
    random = {} if spec.random is None else {"random_weights": True}
    return {"weights": weights.fingerprint, "revision": revision, **random}


def _destination(
    spec: TargetSpec,
    model: transformers.PreTrainedModel,
    needed: int,
    dtype: torch.dtype,
    device: str,
) -> Destination:
    """Where to load a model of `needed` bytes; OutOfMemoryError where it does not fit."""
    if is_placement(device):
        return place_layers(model, device, dtype, all_free_bytes())
    where = pick_device(device)
    free = free_bytes(where)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{spec.name} needs about {needed / 2**30:.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, but {where} has {free / 2**30:.1f} GiB free. "
            "Choose a smaller model, a smaller dtype or another device."
        )
    return where


def _choose_forward(
    make_target: Callable[..., Target],
    spec: TargetSpec,
    plan: PackingPlan | None,
    reason: str | None,
) -> Target:
    """The target with its device's fastest forward, or with modules where that is inaccurate.

    Args:
        reason: why the kernels do not run a model in floats.
    """
    make_target = functools.partial(make_target, dtype_name=plan and plan.dtype_name)
    by_modules = make_target()
    provenance = by_modules.provenance  # all targets' that are made
    forward, note = _fast_forward(spec, by_modules.model, plan, reason)
    provenance |= note
    if forward is None:
        return by_modules
    fast = make_target(forward=forward)
    fault = check_packed(fast.model) or forward_mismatch(fast, reference_logits(by_modules))
    if fault is not None:
        LOG.warning("%s's fast forward is not used, because %s", fast.name, fault)
        remark = f"{fast.name} runs slowly: the fast forward is wrong, {fault}."
        provenance |= {"fast_forward": f"not used, because {fault}", "remark": remark}
    elif isinstance(forward, runner.GraphRunner):
        by_graphs, by_operators = 1000 * plain_step_s(fast), 1000 * plain_step_s(by_modules)
        faster = by_graphs < by_operators and forward.buckets != ()
        forward.verdict = (
            f"{'used' if faster else 'not used'}: a plain step takes {by_graphs:.2f} ms, "
            f"{by_operators:.2f} ms without"
        )
        provenance["remark"] = f"CUDA graphs are {forward.verdict}."
        if faster:
            return fast
        provenance["cuda_graphs"] = forward.verdict
    else:
        return fast
    forward.close()
    return by_modules


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
    return file, file.num_bytes


def unsupported_architecture(file: GGUFFile) -> str | None:
    """Why transformers cannot load a file's architecture; None where it can."""
    fault = f"transformers cannot read GGUF files of the architecture {file.architecture}."
    return None if can_read(file.architecture) else fault


def kernel_support(
    file: GGUFFile | None, empty: transformers.PreTrainedModel | None
) -> tuple[bool, str | None]:
    """Whether the compiled kernels can be used here, and why they do not run this model.

    Args:
        empty: without a file, the model on the `meta` device; None = it cannot be created.
    """
    if find_compiler() is None:
        return False, NO_COMPILER
    if file is not None:
        return True, unsupported_reason(file)
    return True, None if empty is None else native.unsupported_reason(empty)


def needed_bytes(count: int, dtype: torch.dtype, bits: int | None, file: GGUFFile | None) -> int:
    """Bytes of a model's weights in memory.

    Args:
        bits: of quantized matrices; a quantized file's keep the file's size. None = floats.
    """
    if bits is None:
        return count * dtype.itemsize
    return file.num_bytes if file is not None and file.bits is not None else count * (bits + 1) // 8


def _read_model(
    spec: TargetSpec,
    weights: Weights,
    empty: transformers.PreTrainedModel,
    file: GGUFFile | None,
    plan: PackingPlan | None,
    dtype: torch.dtype,
    where: Destination,
    report: ProgressCallback,
) -> tuple[transformers.PreTrainedModel, str]:
    """The model on its device, packed tensor by tensor if the kernels run it.

    Args:
        empty: the model on the `meta` device; receives the packed matrices.

    Returns:
        The model, and why a file's quantized matrices are loaded as floats, else "".
    """
    trim_memory()  # reading a large vocabulary took more than the tokenizer holds
    model, remark = None, ""

    def report_share(done: float) -> None:
        report("Loading weights", 0.3 + 0.6 * done)

    with report_progress(report_share):
        if plan is not None:
            try:
                model = load_packed(empty, _tensors(weights, empty, file, plan), report_share)
            except UnmappedTensor as error:
                LOG.info("%s is loaded as floats: %s", spec.name, error)
                if file is not None and file.bits is not None:
                    remark = f"its file is loaded as floats, because {error}"
        if model is None:
            with contextlib.nullcontext() if file is None else fast_gguf_reader(file):
                model = _read_floats(spec, weights, dtype, where)
    if file is not None:
        divide_frequencies(model, file)
    prepare_attention(model)
    return model, remark


def _read_floats(
    spec: TargetSpec, weights: Weights, dtype: torch.dtype, where: Destination
) -> transformers.PreTrainedModel:
    if not isinstance(where, Placement):
        model = read_weights(spec, weights, dtype)
        model.to(where)  # type: ignore[arg-type]
        return model
    folder = tempfile.mkdtemp(prefix="offloaded-")
    placing = {"device_map": dict(where.device_map), "offload_folder": folder}
    model = read_weights(spec, weights, dtype, **placing)
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def _tensors(
    weights: Weights, empty: transformers.PreTrainedModel, file: GGUFFile | None, plan: PackingPlan
) -> CheckpointTensors:
    """The checkpoint's tensors, for packing; UnmappedTensor if they do not match the model's."""
    if file is not None:
        return GGUFTensors(empty, file, plan.kernels, 16 if file.bits is not None else plan.bits)
    from transformers import GenerationConfig

    if getattr(empty, "_keep_in_fp32_modules", None):
        raise UnmappedTensor("some of its modules stay in float32")
    files = safetensors_files(weights.location, weights.revision)
    tensors = SafetensorsTensors(empty, files, plan.kernels, plan.bits)
    with contextlib.suppress(OSError):  # it has none
        empty.generation_config = GenerationConfig.from_pretrained(
            weights.location, revision=weights.revision or "main"
        )
    return tensors


def _fast_forward(
    spec: TargetSpec,
    model: transformers.PreTrainedModel,
    plan: PackingPlan | None,
    reason: str | None,
) -> tuple[Forward | None, dict[str, str]]:
    """A fast forward for the model's device, and further entries of the run log.

    None where transformers' modules run the model.
    """
    if getattr(model, "hf_device_map", None):
        return None, {"placement": "several devices, one after another"}
    if model.device.type != "cpu":
        fuse_norms(model)
        reason = "switched off" if spec.cuda_graphs == "off" else runner.unsupported_reason(model)
        if reason is None:
            return runner.GraphRunner(model, CudaGraphs(model.device)), {}
        return None, {"cuda_graphs": f"not used: {reason}"}
    if plan is None:
        note = {"native_kernels": f"not used: {reason}"}
        if not can_pack(model.dtype):
            return None, note
        pack(model)
        return ModulesForward(model, weights="packed"), note
    if not any(isinstance(module, Packed) for module in model.modules()):
        pack_native(model, plan.kernels, plan.bits)
    weights = plan.dtype_name or ""
    reason = native.unsupported_reason(model)
    if reason is None:
        return native.NativeForward(model, weights=weights), {}
    return ModulesForward(model, weights=weights), {"native_kernels": f"not used: {reason}"}


def _kernels(spec: TargetSpec, cache_dir: Path, file: GGUFFile | None = None) -> CDLL:
    """The compiled kernels, with rare formats if the file needs them.

    Raises NoKernels: they are switched off, or cannot be used here.
    """
    if spec.native_kernels == "off":
        raise NoKernels("switched off")
    return full_library(cache_dir) if file and needs_rare_formats(file) else library(cache_dir)


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The minimum bits per matrix weight, and the kernels that pack and multiply matrices."""

    bits: int
    kernels: CDLL

    @property
    def dtype_name(self) -> str | None:
        """`q8` or `q4`; None for floats."""
        return f"q{self.bits}" if self.bits < 16 else None


def _native_plan(
    spec: TargetSpec, model: transformers.PreTrainedModel, cache_dir: Path
) -> tuple[PackingPlan | None, str | None]:
    """How the kernels pack a model in bfloat16; or why they do not run it."""
    reason = native.unsupported_reason(model)
    if reason is None:
        try:
            return PackingPlan(16, _kernels(spec, cache_dir)), None
        except NoKernels as error:
            reason = str(error)
            if spec.native_kernels != "off":
                LOG.warning("%s runs without the compiled kernels: %s", spec.name, reason)
    return None, reason


def _quantization_plan(
    spec: TargetSpec, file: GGUFFile | None, dtype: str, device: str, cache_dir: Path
) -> PackingPlan | None:
    """How quantized matrices are packed; None where the matrices are floats.

    Raises:
        ConfigError: the file's matrices have more bits than `dtype`, or quantized weights are
            requested on several devices.
        TargetError: `dtype` is quantized, and the kernels cannot be used here.
    """
    bits_of_dtype = WEIGHT_BITS.get(dtype)
    if is_placement(device):
        if bits_of_dtype is None:
            return None
        raise ConfigError(
            f"dtype {dtype} runs on one device only, got device {device}. Choose bfloat16 or "
            "another device."
        )
    on_processor = pick_device(device).type == "cpu"
    if bits_of_dtype is None and (dtype != "auto" or file is None or not on_processor):
        return None
    try:
        kernels = _kernels(spec, cache_dir, file)
    except NoKernels as error:
        if bits_of_dtype is None:
            return None
        raise TargetError(
            f"dtype {dtype} needs the compiled kernels, which are not used: {error}. Choose "
            "bfloat16 or float32."
        ) from error
    bits = packed_bits(spec, file, dtype)
    return None if bits is None else PackingPlan(bits, kernels)


def packed_bits(spec: TargetSpec, file: GGUFFile | None, dtype: str) -> int | None:
    """Minimum bits per matrix weight where matrices are packed; None where they are floats.

    Raises ConfigError: the file's matrices have more bits than `dtype`.
    """
    own_bits, bits = None if file is None else file.bits, WEIGHT_BITS.get(dtype)
    if bits is not None and bits < (own_bits or 0):
        raise ConfigError(
            f"dtype is {dtype}, but {spec.name}'s file holds its matrices in {own_bits} bits. "
            f"Choose q{own_bits}, or auto."
        )
    return own_bits or bits


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
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    flags = torch.cpu.get_capabilities()
    has_bf16 = any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if has_bf16 else torch.float32
