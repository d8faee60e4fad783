"""Loads a target by its plan: reads weights and tokenizer, and chooses the fastest forward."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from engine.kernels.cpu import native
from engine.kernels.cpu.compile import NO_COMPILER, NoKernels, full_library, library
from engine.kernels.cpu.experts import pack_experts
from engine.kernels.cpu.gguf_model import GGUFTensors
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
from engine.model.backend import Backend
from engine.model.forward import Forward, ModulesForward, prepare_attention
from engine.model.gguf import tokenizer as gguf_tokenizer
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.tensors import divide_frequencies, lazy_state_dict
from engine.model.packed import Packed, can_pack, pack
from engine.model.placement import Placement
from engine.model.plan import LoadPlan, plan_loading
from engine.model.reading import (
    empty_model,
    freeze_imports,
    read_tokenizer,
    read_weights,
    report_progress,
    translate_errors,
    trim_memory,
    unmapped_files,
)
from engine.model.sources import ProgressCallback, TargetSpec
from engine.model.target import Target

LOG = logging.getLogger(__name__)


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
            else bfloat16 where the device computes in it natively, else float16, on CPUs float32.
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
    plan = plan_loading(
        spec,
        dtype=dtype,
        device=device,
        cache_dir=cache_dir,
        find_kernels=functools.partial(_compiled_kernels, spec, cache_dir),
        report=report,
    )
    file = plan.file
    with translate_errors(spec):
        place = plan.destination()
        if file is None:
            tokenizer = read_tokenizer(plan.source)
        else:
            tokenizer = gguf_tokenizer.read_tokenizer(Path(plan.source.location))
        model, slow = _read_model(plan, place, report)
    if file is not None and model.generation_config is not None:
        ends = gguf_tokenizer.end_ids(Path(plan.source.location))
        model.generation_config.eos_token_id = ends
    report("Preparing it for this device", 0.95)
    make_target = functools.partial(
        Target,
        model,
        tokenizer,
        name=spec.name,
        provenance=_provenance(plan),
        bits=plan.precision.bits,
        gguf_path=None if file is None else file.path,
    )
    forward = _choose_forward(make_target, model, plan)
    forward.backend = replace(forward.backend, remark=_remark(plan, slow, forward.backend.remark))
    target = make_target(forward=forward)
    trim_memory()
    LOG.info("%s runs by %s", spec.name, target.backend.name)
    report("Ready", 1.0)
    return target


def _compiled_kernels(spec: TargetSpec, cache_dir: Path, file: GGUFFile | None) -> CDLL:
    """The compiled kernels, with rare formats if the file needs them.

    Raises NoKernels: they are switched off, or cannot be used here.
    """
    if not spec.native_kernels:
        raise NoKernels("switched off")
    try:
        return full_library(cache_dir) if file and needs_rare_formats(file) else library(cache_dir)
    except NoKernels as error:
        LOG.warning("%s runs without the compiled kernels: %s", spec.name, error)
        raise


def _remark(plan: LoadPlan, slow: str, remark: str) -> str:
    """What people are told of a target's speed and of its file's tokenizer; "" = nothing.

    Args:
        slow: why it runs slowly, else "".
        remark: its forward's own.
    """
    if slow := slow or (NO_COMPILER if plan.no_kernels == NO_COMPILER else ""):
        remark = f"{plan.spec.name} runs slowly: {slow}."
    if plan.file is not None:
        remark = f"{remark} {gguf_tokenizer.tokenizer_remark(plan.file)}".strip()
    return remark


def _provenance(plan: LoadPlan) -> dict[str, Any]:
    """What identifies the weights, for the run log."""
    revision = plan.weights.revision or getattr(plan.config, "_commit_hash", None)
    random = {} if plan.spec.random is None else {"random_weights": True}
    return {"weights": plan.weights.fingerprint, "revision": revision, **random}


def _choose_forward(
    make_target: Callable[..., Target], model: transformers.PreTrainedModel, plan: LoadPlan
) -> Forward:
    """The fastest forward of the model's device, or modules where that is wrong or slower."""
    modules = ModulesForward(model, why_not=plan.why_not)
    by_modules = make_target(forward=modules)
    forward = _fast_forward(model, plan)
    if isinstance(forward, Backend):
        modules.backend = forward
        return modules
    fast = make_target(forward=forward)
    fault = check_packed(model) or forward_mismatch(fast, reference_logits(by_modules))
    if fault is not None:
        LOG.warning("%s's fast forward is not used, because %s", fast.name, fault)
        modules.backend = replace(
            modules.backend,
            why_not=plan.why_not | {"fast_forward": f"not used, because {fault}"},
            remark=f"{fast.name} runs slowly: the fast forward is wrong, {fault}.",
        )
    elif isinstance(forward, runner.GraphRunner):
        by_graphs, by_operators = 1000 * plain_step_s(fast), 1000 * plain_step_s(by_modules)
        faster = by_graphs < by_operators and forward.buckets != ()
        used = (
            f"{'used' if faster else 'not used'}: a plain step takes {by_graphs:.2f} ms, "
            f"{by_operators:.2f} ms without"
        )
        fastest = forward if faster else modules
        fastest.backend = replace(
            fastest.backend, why_not={runner.GRAPHS: used}, remark=f"CUDA graphs are {used}."
        )
        if faster:
            return forward
    else:
        return forward
    forward.close()
    return modules


def _read_model(
    plan: LoadPlan, where: torch.device | Placement, report: ProgressCallback
) -> tuple[transformers.PreTrainedModel, str]:
    """The model on its device, packed tensor by tensor if the kernels run it.

    Returns:
        The model, and why a file's quantized matrices are loaded as floats, else "".
    """
    trim_memory()  # reading a large vocabulary took more than the tokenizer holds
    file, model, remark = plan.file, None, ""

    def report_share(done: float) -> None:
        report("Loading weights", 0.3 + 0.6 * done)

    with report_progress(report_share):
        if plan.precision.bits is not None:
            try:
                model = load_packed(plan.empty, _tensors(plan), report_share)
            except UnmappedTensor as error:
                LOG.info("%s is loaded as floats: %s", plan.spec.name, error)
                if file is not None and file.bits is not None:
                    remark = f"its file is loaded as floats, because {error}"
        if model is None:
            model = _read_floats(plan, where)
    if file is not None:
        divide_frequencies(model, file)
    prepare_attention(model)
    return model, remark


def _read_floats(plan: LoadPlan, where: torch.device | Placement) -> transformers.PreTrainedModel:
    placing: dict[str, Any] = {}
    if plan.file is not None:
        # Anew: packing that failed has taken some modules of the plan's own.
        empty = empty_model(plan.config, None, plan.spec.name, dtype=plan.precision.dtype)
        placing["tensors"] = (empty, lazy_state_dict(empty, plan.file))
    if not isinstance(where, Placement):
        # Mapped, a model on its way to another device takes no memory here.
        with unmapped_files() if where.type == "cpu" else contextlib.nullcontext():
            model = read_weights(plan.spec, plan.weights, plan.precision.dtype, **placing)
        model.to(where)  # type: ignore[arg-type]
        return model
    folder = tempfile.mkdtemp(prefix="offloaded-")
    placing |= {"device_map": dict(where.device_map), "offload_folder": folder}
    model = read_weights(plan.spec, plan.weights, plan.precision.dtype, **placing)
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def _tensors(plan: LoadPlan) -> CheckpointTensors[Any]:
    """The checkpoint's tensors, for packing; UnmappedTensor if they do not match the model's."""
    file, empty, weights, bits = plan.file, plan.empty, plan.weights, plan.precision.bits
    assert plan.kernels is not None and bits is not None
    if file is not None:
        return GGUFTensors(empty, file, plan.kernels, bits)
    from transformers import GenerationConfig

    files = safetensors_files(weights.location, weights.revision)
    tensors = SafetensorsTensors(empty, files, plan.kernels, bits)
    with contextlib.suppress(OSError):  # it has none
        empty.generation_config = GenerationConfig.from_pretrained(
            weights.location, revision=weights.revision or "main"
        )
    return tensors


def _fast_forward(model: transformers.PreTrainedModel, plan: LoadPlan) -> Forward | Backend:
    """A fast forward for the model's device; where none is faster than modules, why not."""
    modules = Backend("transformers' modules", plan.why_not)
    if getattr(model, "hf_device_map", None):
        return replace(modules, why_not={"placement": "several devices, one after another"})
    if model.device.type != "cpu":
        fuse_norms(model)
        reason = runner.unsupported_reason(model) if plan.spec.cuda_graphs else "switched off"
        if not CudaGraphs.run_on(model.device):
            reason = f"{model.device.type} has none"
        if reason is None:
            return runner.GraphRunner(model, CudaGraphs(model.device))
        return replace(modules, why_not={runner.GRAPHS: f"not used: {reason}"})
    own = plan.precision
    if own.bits is None or plan.kernels is None:
        if not can_pack(model.dtype):
            return modules
        pack(model)
        return ModulesForward(model, weights="packed", why_not=plan.why_not)
    if not any(isinstance(module, Packed) for module in model.modules()):
        pack_experts(model, plan.kernels, own.bits)
        pack_native(model, plan.kernels, own.bits)
    weights = own.name if own.is_quantized else ""
    if plan.no_kernels is not None:
        return ModulesForward(model, weights=weights, why_not=plan.why_not)
    return native.NativeForward(model, weights=weights)
