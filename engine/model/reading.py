"""Reads a checkpoint by transformers.

transformers never runs code of a model's here, and nothing that it makes up gets by.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file
from transformers.utils.logging import set_tqdm_hook

from engine.errors import OutOfMemoryError, SourceError, TargetError, first_line
from engine.model.files import UNREADABLE, check_complete, check_parameters
from engine.model.kinds import check_can_roll_back
from engine.model.packed import num_weights
from engine.model.sources import TargetSpec, Weights, hub_error
from engine.model.tokenizer import check_tokenizer, is_panic
from engine.safe_text import disk_is_full, unwritable

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def translate_errors(spec: TargetSpec) -> Iterator[None]:
    """Turns what transformers raises over a model that it cannot read into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{spec.name} does not fit into memory: {error}") from error
    except UNREADABLE as error:
        raise explain(spec, error) from error


@contextlib.contextmanager
def report_progress(tell: Callable[[float], None]) -> Iterator[None]:
    """Within it, `tell` gets the share of a checkpoint's tensors that transformers has read."""

    def bar(tensors: Any, **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors, 1):
            yield tensor
            tell(done / len(tensors))

    def hooked(factory: Any, args: Any, kwargs: Any) -> Any:
        is_weights = kwargs.get("desc") == "Loading weights"
        return (bar if is_weights else factory)(*args, **kwargs)

    hook = set_tqdm_hook(hooked)
    try:
        yield
    finally:
        set_tqdm_hook(hook)


def explain(spec: TargetSpec, error: Exception) -> SourceError | TargetError:
    """transformers' exception as one sentence."""
    if disk_is_full(error):  # of the hub's cache, or where weights are offloaded
        place = getattr(error, "filename", None) or "The folder of fetched or offloaded weights"
        return SourceError(unwritable(place, error))
    text = str(error)
    where = spec.hub or spec.path or spec.name
    from_hub = hub_error(where, error) if spec.hub else None
    if from_hub is not None:
        return from_hub
    if "trust_remote_code" in text:
        return TargetError(f"{where} needs its own code (trust_remote_code), which is never run.")
    if "weights_only" in text:
        return TargetError(f"{where} holds more than tensors, and a model's code is never run.")
    reason = first_line(error, 300)
    return TargetError(f"{where} could not be loaded as a causal language model: {reason}.")


def read_weights(
    spec: TargetSpec, weights: Weights, dtype: torch.dtype, **placing: Any
) -> PreTrainedModel:
    """A model with the weights of its checkpoint, and no others.

    Args:
        placing: `device_map` and `offload_folder` of a model over several devices.

    Raises TargetError: the checkpoint lacks some of them.
    """
    result: Any = transformers.AutoModelForCausalLM.from_pretrained(
        weights.location,
        revision=weights.revision,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **reading(weights),
        **placing,
    )
    model, info = result
    assert isinstance(model, transformers.PreTrainedModel)
    check_complete(model, info, spec.name)
    return model


def read_config(weights: Weights) -> Any:
    """The model's config as transformers has it."""
    return transformers.AutoConfig.from_pretrained(
        weights.location, revision=weights.revision, **reading(weights)
    )


def empty_model(
    config: Any, num_bytes: int | None, name: str, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A model that can serve as a target, on the `meta` device: its modules without storage.

    Raises TargetError: it cannot serve, or its weights have not as many bytes as it needs.
    """
    check_can_roll_back(config.get_text_config(), name)
    _import_models()
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    model.tie_weights()
    check_parameters(num_weights(model), num_bytes, name)
    return model


@functools.cache
def _import_models() -> None:
    """Import what models share, but not SciPy for the losses of object detection: 0.3 s."""
    utils: Any = transformers.utils
    has_scipy, utils.is_scipy_available = utils.is_scipy_available, lambda: False
    try:
        importlib.import_module("transformers.modeling_utils")
    finally:
        utils.is_scipy_available = has_scipy


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
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            weights.location, revision=weights.revision, **reading(weights)
        )
    except BaseException as error:
        # The library of tokenizers has no exception of its own: it raises Exception, or panics.
        is_tokenizer_fault = type(error) is Exception or is_panic(error)
        if not is_tokenizer_fault and not (weights.local and isinstance(error, UNREADABLE)):
            raise
        raise SourceError(
            f"{weights.location}: its tokenizer could not be read: {first_line(error)}."
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    check_tokenizer(tokenizer, weights.location)
    return tokenizer


def reading(weights: Weights) -> dict[str, Any]:
    """How transformers reads them: never by code that comes along; unasked, it asks the user."""
    gguf = {} if weights.gguf_file is None else {"gguf_file": weights.gguf_file}
    return {"trust_remote_code": False, **gguf}


def gguf_file(weights: Weights) -> Path:
    """The GGUF file that a target comes from."""
    assert weights.gguf_file is not None
    if weights.local:
        return Path(weights.location) / weights.gguf_file
    file = cached_file(weights.location, weights.gguf_file, revision=weights.revision)
    assert file is not None
    return Path(file)


@functools.cache
def freeze_modules() -> None:
    """Exempt what was imported from garbage collection, once.

    Looking through the 400,000 objects of torch and transformers takes 0.2 s, in the middle of
    somebody's text; they stay for good anyhow. What a model brings is made after this.
    """
    gc.collect()
    gc.freeze()


def return_memory() -> None:
    """Give back what reading and packing held: glibc keeps it, as much as the weights again."""
    gc.collect()
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
