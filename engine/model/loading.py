"""Loads a target: locate, check memory, read weights and tokenizer, prepare its attention."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from engine.errors import ConfigError, OutOfMemoryError, SourceError, TargetError
from engine.kernels.cpu import native
from engine.kernels.cpu.compile import NotNative, library
from engine.kernels.cpu.gguf import GGUFFile
from engine.kernels.cpu.operators import pack_codes
from engine.kernels.cpu.weights import Codes, can_pack, pack, unpacked
from engine.kernels.cuda import runner
from engine.kernels.cuda.graphs import CudaGraphs
from engine.model.audit import disagreement, reference_logits
from engine.model.forward import Forward, ModulesForward, prepare_attention
from engine.model.sources import (
    ProgressCallback,
    TargetSpec,
    Weights,
    hub_error,
    locate,
    partial_folder,
)
from engine.model.target import Target, check_can_roll_back

LOG = logging.getLogger(__name__)
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "q8", "q4"]
"""`q8`, `q4`: matrices in at most 8 or 4 bits, a GGUF file's own as they are; on a processor."""
CODE_BITS = {"q8": 8, "q4": 4}
CONVERT_BELOW_BYTES = 2 << 30
"""GGUF files up to this size are converted once and kept, because parsing them is slow."""
DIGESTS = "digests.json"
"""In a converted folder: size, time and SHA-256 of every file."""
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)
"""What transformers raises over missing, damaged, unknown or unsupported files."""


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
        dtype: `auto` = a GGUF file's own codes on CPUs that the compiled kernels run on, else
            bfloat16 on CUDA and on CPUs with native bfloat16, else float32.
        device: `auto` = CUDA if there is one, else the CPU; or any torch device string.
        cache_dir: where fetched and converted weights are kept.
        progress: told what is being done.

    Raises:
        SourceError: the weights cannot be found or read.
        TargetError: the model cannot serve as a target, or needs too much memory.
        ConfigError: unknown dtype or device.
    """
    tell = progress or (lambda message, fraction: None)
    _freeze_modules()
    disable_progress_bar()
    where = pick_device(device)
    pick_dtype(dtype, where)
    tell(f"Looking for {spec.title or spec.name}", None)
    weights = locate(spec, cache_dir, tell)
    coded = _coded(spec, weights, dtype, where, cache_dir)
    kind = torch.bfloat16 if coded is not None else pick_dtype(dtype, where)

    def read() -> PreTrainedModel:
        with _explained(spec):
            return _read_model(weights, kind, where)

    with _explained(spec):
        if weights.gguf_file is not None:
            weights = _converted(weights, cache_dir, tell)
        tell("Reading its config", 0.2)
        config = AutoConfig.from_pretrained(
            weights.location, revision=weights.revision, **_reading(weights)
        )
        check_can_roll_back(config.get_text_config(), spec.name)
        _check_memory(spec, config, kind, where)
        tell("Loading weights", 0.4)
        model = read()
        tell("Loading its tokenizer", 0.9)
        tokenizer = _read_tokenizer(weights)
    tell("Packing the weights for this device", 0.95)
    codes = None if coded is None else Codes(model, bits=coded.bits, file=coded.file)
    revision = weights.revision or getattr(config, "_commit_hash", None)
    provenance = {"weights": weights.fingerprint, "revision": revision}
    target = Target(model, tokenizer, name=spec.name, provenance=provenance)
    forward, note = _fast_forward(spec, model, codes, cache_dir)
    provenance |= note
    if forward is not None:
        dtype_name = None if codes is None else f"q{codes.bits}"
        target = _checked(target, forward, dtype_name, read)
    _return_memory()
    tell("Ready", 1.0)
    return target


def _checked(
    plain: Target,
    forward: Forward,
    dtype_name: str | None,
    read_again: Callable[[], PreTrainedModel],
) -> Target:
    """The target under a fast forward; under its modules, read anew, where the two disagree.

    Args:
        plain: its modules, whose weights the forward may have packed.
    """
    with unpacked(plain.model):
        expected = reference_logits(plain)
    target = Target(
        plain.model,
        plain.tokenizer,
        name=plain.name,
        provenance=plain.provenance,
        forward=forward,
        dtype_name=dtype_name,
    )
    fault = disagreement(target, expected)
    if fault is None:
        return target
    LOG.warning("%s's fast forward is not used, because %s", plain.name, fault)
    plain.provenance["fast_forward"] = f"not used, because {fault}"
    target.close()
    return Target(read_again(), plain.tokenizer, name=plain.name, provenance=plain.provenance)


def _return_memory() -> None:
    """Give back what reading and packing held: glibc keeps it, as much as the weights again."""
    gc.collect()
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _read_model(weights: Weights, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        weights.location, revision=weights.revision, dtype=dtype, **_reading(weights)
    )
    assert isinstance(model, PreTrainedModel)
    model.to(device)  # type: ignore[arg-type]
    prepare_attention(model)
    return model


@functools.cache
def _freeze_modules() -> None:
    """Exempt what was imported from garbage collection, once.

    Looking through the 400,000 objects of torch and transformers takes 0.2 s, in the middle of
    somebody's text; they stay for good anyhow. What a model brings is made after this.
    """
    gc.collect()
    gc.freeze()


def _fast_forward(
    spec: TargetSpec, model: PreTrainedModel, codes: Codes | None, cache_dir: Path
) -> tuple[Forward | None, dict[str, str]]:
    """A forward for the model's device, and what the log of a run says beside its name.

    None where transformers' modules run the model.
    """
    if model.device.type == "cuda":
        reason = "switched off" if spec.cuda_graphs == "off" else runner.why_not(model)
        if reason is None:
            return runner.GraphRunner(model, CudaGraphs(model.device)), {}
        return None, {"cuda_graphs": f"not used: {reason}"}
    if model.device.type == "cpu":
        return _on_processor(spec, model, codes, cache_dir)
    return None, {}


def _on_processor(
    spec: TargetSpec, model: PreTrainedModel, codes: Codes | None, cache_dir: Path
) -> tuple[Forward | None, dict[str, str]]:
    """By compiled kernels, else by transformers' modules with packed weights."""
    reason = native.why_not(model)
    if reason is None or codes is not None:
        try:
            kernels = _kernels(spec, cache_dir)
            if reason is None:
                return native.NativeForward(model, kernels, codes), {}
        except NotNative as error:
            reason = str(error)
    note = {"native_kernels": f"not used: {reason}"}
    if codes is not None:
        pack_codes(model, kernels, codes)
        return ModulesForward(model, weights=f"q{codes.bits}"), note
    if not can_pack(model.dtype):
        return None, note
    pack(model)
    return ModulesForward(model, weights="packed"), note


def _kernels(spec: TargetSpec, cache_dir: Path) -> CDLL:
    """The compiled kernels.

    Raises:
        NotNative: they are switched off, or cannot be used here.
    """
    if spec.native_kernels == "off":
        raise NotNative("switched off")
    return library(cache_dir)


@dataclass(frozen=True, slots=True)
class _Coded:
    """That matrices are to be multiplied as codes of so many bits: a file's own, or made."""

    bits: int
    file: GGUFFile | None


def _coded(
    spec: TargetSpec, weights: Weights, dtype: str, device: torch.device, cache_dir: Path
) -> _Coded | None:
    """None where the matrices are floats.

    Raises:
        ConfigError: the file holds its matrices in more bits than were asked for.
        SourceError: it cannot be read.
        TargetError: codes were asked for, and the kernels cannot be used here.
    """
    asked = CODE_BITS.get(dtype)
    if asked is None and (dtype != "auto" or weights.gguf_file is None or device.type != "cpu"):
        return None
    try:
        _kernels(spec, cache_dir)
    except NotNative as error:
        if asked is None:
            return None
        raise TargetError(
            f"dtype {dtype} needs the compiled kernels, which are not used: {error}. Choose "
            "bfloat16 or float32."
        ) from error
    if weights.gguf_file is None:
        return None if asked is None else _Coded(asked, None)
    file = GGUFFile(_gguf_file(weights))
    if asked is not None and asked < (file.bits or asked):
        raise ConfigError(
            f"dtype is {dtype}, but {spec.name}'s file holds its matrices in {file.bits} bits. "
            f"Choose q{file.bits}, or auto."
        )
    bits = file.bits or asked
    return None if bits is None else _Coded(bits, file)


def _gguf_file(weights: Weights) -> Path:
    """The GGUF file that a target comes from."""
    assert weights.gguf_file is not None
    if weights.local:
        return Path(weights.location) / weights.gguf_file
    from transformers.utils.hub import cached_file

    found = cached_file(weights.location, weights.gguf_file, revision=weights.revision)
    assert found is not None
    return Path(found)


@contextlib.contextmanager
def _explained(spec: TargetSpec) -> Iterator[None]:
    """Turns what transformers raises over a model that it cannot read into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{spec.name} does not fit into memory: {error}") from error
    except _UNREADABLE as error:
        raise _explain(spec, error) from error


def pick_device(name: str) -> torch.device:
    """The device that a setting names; ConfigError if it does not exist here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name}, but torch sees no CUDA device. Use cpu or auto.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting names; that of all but the matrices in codes for `q8` and `q4`.

    ConfigError if it is not one of `DtypeName`, or not for this device.
    """
    if name not in get_args(DtypeName):
        raise ConfigError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {name!r}.")
    if name in CODE_BITS:
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


def _read_tokenizer(weights: Weights) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where a local folder has none."""
    folder = Path(weights.location)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if weights.local and weights.gguf_file is None:
        if not any((folder / name).is_file() for name in names):
            return None
    tokenizer = AutoTokenizer.from_pretrained(
        weights.location, revision=weights.revision, **_reading(weights)
    )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _reading(weights: Weights) -> dict[str, Any]:
    """How transformers reads them: never by code that comes along; unasked, it asks the user."""
    gguf = {} if weights.gguf_file is None else {"gguf_file": weights.gguf_file}
    return {"trust_remote_code": False, **gguf}


def _explain(spec: TargetSpec, error: Exception) -> SourceError | TargetError:
    """transformers' exception as one sentence."""
    text = str(error)
    where = spec.hub or spec.path or spec.name
    from_hub = hub_error(where, error) if spec.hub else None
    if from_hub is not None:
        return from_hub
    if "trust_remote_code" in text:
        return TargetError(f"{where} needs its own code (trust_remote_code), which is never run.")
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return TargetError(f"{where} could not be loaded as a causal language model: {first[:300]}")


def _check_memory(spec: TargetSpec, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the size of the weights with free memory before reading them."""
    free = free_bytes(device)
    if free is None:
        return
    needed = weight_bytes(config, dtype)
    if needed > free:
        raise OutOfMemoryError(
            f"{spec.name} needs about {needed / 2**30:.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, but {device} has {free / 2**30:.1f} GiB free. "
            "Choose a smaller model, a smaller dtype or another device."
        )


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Size of a model's weights, counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return int(sum(p.numel() for p in model.parameters())) * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _converted(weights: Weights, cache_dir: Path, tell: ProgressCallback) -> Weights:
    """A GGUF file as a folder of safetensors in float32, made once and kept in the cache.

    Parsing a GGUF takes tens of seconds and dequantised weights load in one; float32 keeps every
    dequantised value exactly.
    """
    assert weights.gguf_file is not None
    file = Path(weights.location) / weights.gguf_file
    if not weights.local or file.stat().st_size > CONVERT_BELOW_BYTES:
        return weights
    key = f"{file.stem}-{(weights.fingerprint or '')[:16]}"
    folder = cache_dir / "converted" / key
    damaged = _damaged_file(folder)
    if damaged is not None:
        if folder.is_dir():
            LOG.warning("%s in the cache is damaged or unknown; it is made again.", damaged)
        tell("Unpacking 4-bit weights (once; about half a minute)", None)
        with partial_folder(folder.parent) as temp:
            _convert(weights, temp / key)
            _write_digests(temp / key)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temp / key, folder)
    return Weights(str(folder), None, None, True, weights.fingerprint)


def _write_digests(folder: Path) -> None:
    """Note what the folder's files are, as `_damaged_file` reads it."""
    files = sorted(file for file in folder.iterdir() if file.name != DIGESTS)
    noted = {file.name: [*_marks(file), _digest(file)] for file in files}
    (folder / DIGESTS).write_text(json.dumps(noted, indent=1), encoding="utf-8")


def _damaged_file(folder: Path) -> Path | None:
    """A file of a converted folder that is not as it was made; None = all are.

    Files whose size and time are as they were are not read.
    """
    file = folder / DIGESTS
    noted: dict[str, tuple[int, int, str]]
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
        for name, (size, changed_ns, digest) in noted.items():
            file = folder / name
            if _marks(file) != (size, changed_ns) and _digest(file) != digest:
                return file
    except (OSError, ValueError, TypeError, AttributeError):
        return file
    return None


def _marks(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(weights: Weights, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(weights.location, **_reading(weights))
    model = AutoModelForCausalLM.from_pretrained(
        weights.location, dtype=torch.float32, **_reading(weights)
    )
    # transformers marks the model as quantised although its weights are plain by now.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
