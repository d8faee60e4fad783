"""Reads checkpoints by transformers.

A model's own code is never run, and a model with randomly initialised weights is refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import CDLL
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import set_tqdm_hook

from engine.errors import OutOfMemoryError, SourceError, TargetError, first_line
from engine.model.files import PARAMETERS_PER_BYTE, READ_ERRORS, check_complete
from engine.model.forward import decoder_layers
from engine.model.layer_types import check_can_roll_back
from engine.model.packed import num_weights
from engine.model.sources import TargetSpec, Weights, hub_error
from engine.model.tokenizer import check_tokenizer, is_panic
from engine.safe_text import disk_is_full

_pause_lock = Lock()
_num_pauses, _was_collecting = 0, False
"""Texts for which garbage collection is paused, and whether it was on before them."""


@contextlib.contextmanager
def translate_errors(spec: TargetSpec) -> Iterator[None]:
    """Translates transformers' exceptions about an unreadable model into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{spec.name} does not fit into memory: {error}") from error
    except READ_ERRORS as error:
        raise load_error(spec, error) from error


@contextlib.contextmanager
def report_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Calls `report` with the share of a checkpoint's tensors that transformers has loaded."""

    def bar(tensors: Any, **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors, 1):
            yield tensor
            report(done / len(tensors))

    def hooked(factory: Any, args: Any, kwargs: Any) -> Any:
        is_weights = kwargs.get("desc") == "Loading weights"
        return (bar if is_weights else factory)(*args, **kwargs)

    hook = set_tqdm_hook(hooked)
    try:
        yield
    finally:
        set_tqdm_hook(hook)


@contextlib.contextmanager
def unmapped_files() -> Iterator[None]:
    """Lets transformers read safetensors files, whose pages would else be a model's weights.

    Touching a page of a mapped file that has been shortened kills the process.
    """
    theirs: Any = transformers.modeling_utils
    plain = theirs.safe_open
    theirs.safe_open = lambda *file, **options: plain(*file, **(options | {"backend": "pread"}))
    try:
        yield
    finally:
        theirs.safe_open = plain


def load_error(spec: TargetSpec, error: Exception) -> SourceError | TargetError:
    """The error for transformers' exception, in one sentence."""
    text = str(error)
    where = spec.hub or spec.path or spec.name
    hub_fault = hub_error(where, error) if spec.hub or disk_is_full(error) else None
    if hub_fault is not None:
        return hub_fault
    if "trust_remote_code" in text:
        return TargetError(f"{where} needs its own code (trust_remote_code), which is never run.")
    if "weights_only" in text:
        return TargetError(f"{where} holds more than tensors, and a model's code is never run.")
    reason = first_line(error, 300)
    return TargetError(f"{where} could not be loaded as a causal language model: {reason}.")


def read_weights(
    spec: TargetSpec,
    weights: Weights,
    dtype: torch.dtype,
    *,
    tensors: tuple[transformers.PreTrainedModel, Mapping[str, Any]] | None = None,
    **placing: Any,
) -> transformers.PreTrainedModel:
    """A model with the weights of its checkpoint, and no others.

    Args:
        tensors: the empty model and its state dict, where it is not transformers that reads them.
        placing: `device_map` and `offload_folder` for a model on several devices.

    Raises TargetError: the checkpoint is incomplete.
    """
    kind: Any = transformers.AutoModelForCausalLM
    location: str | None = weights.location
    options = weights.options
    if tensors is not None:
        kind, location = type(tensors[0]), None
        options = {"config": tensors[0].config, "state_dict": tensors[1]}
    result: Any = kind.from_pretrained(
        location,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
        **placing,
    )
    model, info = result
    assert isinstance(model, transformers.PreTrainedModel)
    check_complete(model, info, spec.name)
    return model


def read_config(weights: Weights) -> Any:
    """transformers' config of the model."""
    return transformers.AutoConfig.from_pretrained(weights.location, **weights.options)


def empty_model(
    config: Any, num_bytes: int | None, name: str, *, dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """A model on the `meta` device, checked that it can serve as a target.

    Raises TargetError: it cannot serve as a target, or `num_bytes` of weights are too few for it.
    """
    check_can_roll_back(config.get_text_config(), name)
    with torch.device("meta"):
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    causal = [m.is_causal for m in decoder_layers(model).modules() if hasattr(m, "is_causal")]
    if causal and not any(causal):
        raise TargetError(
            f"{name} ({type(model).__name__}) is an encoder: its tokens attend to later ones, so "
            "it cannot continue a text. Choose a decoder."
        )
    model.tie_weights()
    count = num_weights(model)
    if num_bytes is not None and count > PARAMETERS_PER_BYTE * num_bytes:
        raise TargetError(
            f"{name}'s config describes {count:,} parameters, but its weights have {num_bytes:,} "
            "bytes. Give a complete checkpoint, with its own config.json."
        )
    return model


def read_tokenizer(weights: Weights) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where a local folder has none.

    Raises SourceError: its files are damaged.
    """
    folder = Path(weights.location)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if weights.local and weights.gguf_file is None:
        if not any((folder / name).is_file() for name in names):
            return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights.location, **weights.options)
    except BaseException as error:
        # The tokenizers library has no exception class of its own: it raises Exception, or panics.
        is_tokenizer_fault = type(error) is Exception or is_panic(error)
        if not is_tokenizer_fault and not (weights.local and isinstance(error, READ_ERRORS)):
            raise
        raise SourceError(
            f"{weights.location}: its tokenizer could not be read: {first_line(error)}."
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    check_tokenizer(tokenizer, weights.location)
    return tokenizer


@functools.cache
def freeze_imports() -> None:
    """Exempt all imported objects from garbage collection, once.

    Traversing the 400,000 objects of torch and transformers takes 0.2 s in the middle of a text,
    and they are never freed anyway. A model's objects are created after this.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's cyclic garbage collection out of a text: it can hold up a step for 0.2 s.

    Texts may overlap; the last one to end turns it on again, if it was on.
    """
    global _num_pauses, _was_collecting
    with _pause_lock:
        if not _num_pauses:
            _was_collecting = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _pause_lock:
            _num_pauses -= 1
            if not _num_pauses and _was_collecting:
                gc.enable()


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps it after loading, as much as the weights."""
    gc.collect()
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
