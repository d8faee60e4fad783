"""Loads a target: locate, check memory, read weights and tokenizer, prepare its attention."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import tempfile
import weakref
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from engine.errors import ConfigError, OutOfMemoryError, TargetError, one_of
from engine.kernels.cpu import native
from engine.kernels.cpu.compile import (
    NO_COMPILER,
    NotNative,
    find_compiler,
    library,
    whole_library,
)
from engine.kernels.cpu.gguf import GGUFFile
from engine.kernels.cpu.gguf_model import (
    GGUFTensors,
    can_read,
    described,
    described_tokenizer,
    quick_reader,
    why_not,
)
from engine.kernels.cpu.operators import pack_native, wants_rare
from engine.kernels.cpu.packed_model import (
    SafetensorsTensors,
    Tensors,
    Unmapped,
    packed_model,
    safetensors_files,
)
from engine.kernels.cpu.weights import can_pack, pack
from engine.kernels.cuda import runner
from engine.kernels.cuda.graphs import CudaGraphs
from engine.model.audit import disagreement, plain_step_s, reference_logits, wrong_product
from engine.model.files import check_folder, check_sizes, read_settings
from engine.model.forward import Forward, ModulesForward, prepare_attention
from engine.model.packed import Packed, num_weights
from engine.model.placement import (
    Placement,
    all_free_bytes,
    first_of,
    free_bytes,
    is_placement,
    placed,
)
from engine.model.reading import (
    empty_model,
    freeze_modules,
    gguf_file,
    read_config,
    read_tokenizer,
    read_weights,
    report_progress,
    return_memory,
    translate_errors,
)
from engine.model.sources import ProgressCallback, TargetSpec, Weights, locate, without_telemetry
from engine.model.target import Target
from engine.safe_text import short

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "q8", "q4"]
"""`q8`, `q4`: matrices in at most 8 or 4 bits, a GGUF file's own as they are; on a processor."""
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
        device: `auto` = CUDA if there is one, else the CPU; any torch device string, or
            several devices as `placement` has it.
        cache_dir: where fetched weights, tokenizers of GGUF files and compiled kernels are kept.
        progress: told what is being done.

    Raises:
        SourceError: the weights cannot be found or read.
        TargetError: the model cannot serve as a target, or needs too much memory.
        ConfigError: unknown dtype or device.
    """
    tell = progress or (lambda message, fraction: None)
    freeze_modules()
    _quiet_libraries()
    where = pick_device(first_of(device))
    pick_dtype(dtype, where)
    tell(f"Looking for {spec.title or spec.name}", None)
    weights = locate(spec, cache_dir, tell)
    with translate_errors(spec):
        file, num_bytes = opened(weights)
    plan = _quantization_plan(spec, file, dtype, device, cache_dir)
    kind = torch.bfloat16 if plan is not None else pick_dtype(dtype, where)
    with translate_errors(spec):
        tell("Reading its config and tokenizer", 0.1)
        source = weights if file is None else described(file, weights, cache_dir)
        config = read_config(source)
        empty = empty_model(config, num_bytes, spec.name, dtype=kind)
        needed = needed_bytes(num_weights(empty), kind, None if plan is None else plan.bits, file)
        place = _place(spec, empty, needed, kind, device)
        tokenizer = (read_tokenizer if file is None else described_tokenizer)(source)
        reason = None
        if plan is None and isinstance(place, torch.device) and place.type == "cpu":
            plan, reason = _native_plan(spec, empty, cache_dir)
        model, remark = _read_model(spec, weights, empty, file, plan, kind, place, tell)
    tell("Preparing it for this device", 0.95)
    revision = weights.revision or getattr(config, "_commit_hash", None)
    provenance = {"weights": weights.fingerprint, "revision": revision}
    provenance |= {} if spec.random is None else {"random_weights": True}
    target = Target(model, tokenizer, name=spec.name, provenance=provenance)
    target = _fastest(target, spec, plan, reason)
    no_compiler = target.device.type == "cpu" and target.kernels is None and not find_compiler()
    if remark := remark or (NO_COMPILER if no_compiler and spec.native_kernels != "off" else ""):
        target.provenance["remark"] = f"{target.name} runs slowly: {remark}."
    return_memory()
    LOG.info("%s runs by %s", spec.name, target.environment()["forward"])
    tell("Ready", 1.0)
    return target


def _place(
    spec: TargetSpec, model: PreTrainedModel, needed: int, dtype: torch.dtype, device: str
) -> Destination:
    """Where a model of so many bytes is to be; OutOfMemoryError where it has no room."""
    if is_placement(device):
        return placed(model, device, dtype, all_free_bytes())
    where = pick_device(device)
    free = free_bytes(where)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{spec.name} needs about {needed / 2**30:.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, but {where} has {free / 2**30:.1f} GiB free. "
            "Choose a smaller model, a smaller dtype or another device."
        )
    return where


def _fastest(
    plain: Target, spec: TargetSpec, plan: PackingPlan | None, reason: str | None
) -> Target:
    """The target as its device runs it fastest, or by its modules where that computes wrongly.

    Args:
        reason: why the kernels do not run a model in floats.
    """
    name = plan.dtype_name if plan is not None else None
    forward, note = _fast_forward(spec, plain.model, plan, reason)
    plain.provenance |= note
    if forward is None:
        return plain
    made = functools.partial(
        Target, plain.model, plain.tokenizer, name=plain.name, provenance=plain.provenance
    )
    packed = [module for module in plain.model.modules() if isinstance(module, Packed)]
    fault = wrong_product(packed)
    if fault is not None:
        for module in packed:
            module.by_kernels = False
    else:
        expected = reference_logits(made(dtype_name=name))
        target = made(forward=forward, dtype_name=name)
        fault = disagreement(target, expected)
        if fault is None and isinstance(forward, runner.GraphRunner):
            return _faster(target, made(dtype_name=name), forward)
        if fault is None:
            return target
    LOG.warning("%s's fast forward is not used, because %s", plain.name, fault)
    plain.provenance["fast_forward"] = f"not used, because {fault}"
    plain.provenance["remark"] = f"{plain.name} runs slowly: the fast forward is wrong, {fault}."
    forward.close()
    return made(dtype_name=name)


def _faster(graphs: Target, eager: Target, forward: runner.GraphRunner) -> Target:
    """A target by graphs or one operator at a time: what is faster here, and the page says so."""
    by_graphs, by_operators = 1000 * plain_step_s(graphs), 1000 * plain_step_s(eager)
    faster = by_graphs < by_operators and forward.sizes != ()
    forward.verdict = (
        f"{'used' if faster else 'not used'}: a plain step takes {by_graphs:.2f} ms, "
        f"{by_operators:.2f} ms without"
    )
    graphs.provenance["remark"] = f"CUDA graphs are {forward.verdict}."
    if faster:
        return graphs
    graphs.provenance["cuda_graphs"] = forward.verdict
    forward.close()
    return eager


def opened(weights: Weights) -> tuple[GGUFFile | None, int | None]:
    """The GGUF file if it is one, and the bytes of the weights where they are on this machine.

    Raises ConfigError, SourceError: a file is damaged, or says what no model has.
    """
    if weights.gguf_file is not None:
        file = GGUFFile(gguf_file(weights))
        return file, file.num_bytes
    if weights.local:
        return None, check_folder(Path(weights.location))
    config_file = cached_file(weights.location, "config.json", revision=weights.revision)
    assert config_file is not None
    check_sizes(read_settings(Path(config_file)), weights.location)
    return None, None


def unreadable(file: GGUFFile) -> str | None:
    """Why a file cannot be loaded at all; None where it can."""
    name = file.architecture
    fault = f"transformers cannot read GGUF files of the architecture {name}."
    return None if can_read(name) else fault


def why_slow(file: GGUFFile | None, empty: PreTrainedModel | None) -> tuple[bool, str | None]:
    """Whether the processor's kernels can be used here, and why they do not run this model.

    Args:
        empty: without a file, the model on the `meta` device; None = it cannot be made.
    """
    if find_compiler() is None:
        return False, NO_COMPILER
    if file is not None:
        return True, why_not(file)
    return True, None if empty is None else native.why_not(empty)


def needed_bytes(count: int, dtype: torch.dtype, bits: int | None, file: GGUFFile | None) -> int:
    """Bytes of a model's weights in memory.

    Args:
        bits: of its matrices, if they are quantized: a file's own keep the file's size.
    """
    if bits is None:
        return count * dtype.itemsize
    return file.num_bytes if file is not None and file.bits is not None else count * (bits + 1) // 8


def _read_model(
    spec: TargetSpec,
    weights: Weights,
    empty: PreTrainedModel,
    file: GGUFFile | None,
    plan: PackingPlan | None,
    dtype: torch.dtype,
    where: Destination,
    tell: ProgressCallback,
) -> tuple[PreTrainedModel, str]:
    """The model where it is to be, packed tensor by tensor if the kernels hold its matrices.

    Args:
        empty: the same on the `meta` device, which is given the packed matrices.

    Returns:
        Why a file's quantized matrices are not packed as they are; else an empty text.
    """
    remark = ""

    def share(done: float) -> None:
        tell("Loading weights", 0.3 + 0.6 * done)

    with translate_errors(spec), report_progress(share):
        if plan is not None:
            try:
                model = packed_model(empty, _tensors(weights, empty, file, plan), share)
                prepare_attention(model)
                return model, ""
            except Unmapped as error:
                LOG.info("%s is loaded by way of floats: %s", spec.name, error)
                if file is not None and file.bits is not None:
                    remark = f"its file is loaded by way of floats, because {error}"
        reader = quick_reader(file) if file is not None else contextlib.nullcontext()
        placing: dict[str, Any] = {}
        if isinstance(where, Placement):
            folder = tempfile.mkdtemp(prefix="offloaded-")
            placing = {"device_map": dict(where.device_map), "offload_folder": folder}
        with reader:
            model = read_weights(spec, weights, dtype, **placing)
        if isinstance(where, Placement):
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        else:
            model.to(where)  # type: ignore[arg-type]
        prepare_attention(model)
        return model, remark


def _tensors(
    weights: Weights, empty: PreTrainedModel, file: GGUFFile | None, plan: PackingPlan
) -> Tensors:
    """The checkpoint's, for packing; Unmapped if they are not those of the model."""
    if file is not None:
        return GGUFTensors(empty, file, plan.kernels, 16 if file.bits is not None else plan.bits)
    from transformers import GenerationConfig

    if getattr(empty, "_keep_in_fp32_modules", None):
        raise Unmapped("some of its modules stay in float32")
    files = safetensors_files(weights.location, weights.revision)
    tensors = SafetensorsTensors(empty, files, plan.kernels, plan.bits)
    with contextlib.suppress(OSError):  # it has none
        empty.generation_config = GenerationConfig.from_pretrained(
            weights.location, revision=weights.revision or "main"
        )
    return tensors


def _quiet_libraries() -> None:
    """What transformers would report, we say; what the hub would be told, it need not know."""
    disable_progress_bar()
    set_verbosity_error()
    without_telemetry()


def _fast_forward(
    spec: TargetSpec, model: PreTrainedModel, plan: PackingPlan | None, reason: str | None
) -> tuple[Forward | None, dict[str, str]]:
    """A forward for the model's device, and what the log of a run says beside its name.

    None where transformers' modules run the model.
    """
    if getattr(model, "hf_device_map", None):
        return None, {"placement": "several devices, one after another"}
    if model.device.type != "cpu":
        reason = "switched off" if spec.cuda_graphs == "off" else runner.why_not(model)
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
    reason = native.why_not(model)
    if reason is None:
        return native.NativeForward(model, weights=weights), {}
    return ModulesForward(model, weights=weights), {"native_kernels": f"not used: {reason}"}


def _kernels(spec: TargetSpec, cache_dir: Path, file: GGUFFile | None = None) -> CDLL:
    """The compiled kernels, for matrices of a file.

    Raises NotNative: they are switched off, or cannot be used here.
    """
    if spec.native_kernels == "off":
        raise NotNative("switched off")
    return whole_library(cache_dir) if file and wants_rare(file) else library(cache_dir)


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How many bits a matrix weight has at least, and what packs and multiplies matrices."""

    bits: int
    kernels: CDLL

    @property
    def dtype_name(self) -> str | None:
        """Of a target whose weights are quantized."""
        return f"q{self.bits}" if self.bits < 16 else None


def _native_plan(
    spec: TargetSpec, model: PreTrainedModel, cache_dir: Path
) -> tuple[PackingPlan | None, str | None]:
    """How the kernels hold a model in floats; or why they do not run it."""
    reason = native.why_not(model)
    if reason is None:
        try:
            return PackingPlan(16, _kernels(spec, cache_dir)), None
        except NotNative as error:
            reason = str(error)
            if spec.native_kernels != "off":
                LOG.warning("%s runs without the compiled kernels: %s", spec.name, reason)
    return None, reason


def _quantization_plan(
    spec: TargetSpec, file: GGUFFile | None, dtype: str, device: str, cache_dir: Path
) -> PackingPlan | None:
    """None where the matrices are floats.

    Raises:
        ConfigError: the file holds its matrices in more bits than `dtype` says, or quantized
            weights are to be on several devices.
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
    except NotNative as error:
        if bits_of_dtype is None:
            return None
        raise TargetError(
            f"dtype {dtype} needs the compiled kernels, which are not used: {error}. Choose "
            "bfloat16 or float32."
        ) from error
    own_bits = None if file is None else file.bits
    if bits_of_dtype is not None and bits_of_dtype < (own_bits or 0):
        raise ConfigError(
            f"dtype is {dtype}, but {spec.name}'s file holds its matrices in {own_bits} bits. "
            f"Choose q{own_bits}, or auto."
        )
    bits = own_bits or bits_of_dtype
    return None if bits is None else PackingPlan(bits, kernels)


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
    elif (device.type != "cpu" or device.index) and not _is_accelerator(device):
        raise ConfigError(f"{allowed}, got {short(name)}.")
    return device


def _is_accelerator(device: torch.device) -> bool:
    """Whether it is of the kind that this build of torch can use here, such as `mps` or `xpu`."""
    known = torch.accelerator.current_accelerator(check_available=True)
    return known is not None and device.type == known.type


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting names; that of all but the quantized matrices for `q8` and `q4`.

    ConfigError if it is not one of `DtypeName`, or not for this device.
    """
    one_of("dtype", name, get_args(DtypeName))
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
