"""A checkpoint as transformers' model, packed for the kernels tensor by tensor.

No float model is built: modules are made without storage, and a tensor's pages of the file are let
go when it is packed. So loading takes no more memory than the packed model and one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.kernels.cpu.operators import FLOATS, Matrix, NativeEmbedding, NativeLinear

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel


class Unmapped(Exception):
    """Tensors of the model that are not one by one those of the checkpoint; says which."""


class Tensors(ABC):
    """A checkpoint's tensors by the names that a model's parameters have."""

    def __init__(self, model: PreTrainedModel, names: Mapping[str, str], kernels: CDLL) -> None:
        """Prepare to pack.

        Args:
            names: a parameter's name → its tensor's; tied ones may be missing.

        Raises Unmapped: a parameter has no tensor.
        """
        self.kernels, self._names = kernels, dict(names)
        for name, source in model.all_tied_weights_keys.items():
            for one, other in ((name, source), (source, name)):
                if one not in self._names and other in self._names:
                    self._names[one] = self._names[other]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        missing = sorted(parameters.keys() - self._names.keys())
        if missing:
            raise Unmapped(f"{missing[0]} has no counterpart")
        self._shapes = {name: tuple(one.shape) for name, one in parameters.items()}
        self._packed: dict[str, Matrix] = {}

    def matrix(self, name: str, bias: Tensor | None, *, is_table: bool) -> Matrix:
        """A matrix for the kernels.

        Args:
            is_table: of the vocabulary: the embedding, or the output matrix.
        """
        source = self._names[name]
        if source in self._packed and bias is None:
            return self._packed[source]
        matrix = self._pack(source, bias, is_table)
        self._check(name, matrix.shape)
        self._packed[source] = matrix
        return matrix

    def parameter(self, name: str) -> nn.Parameter:
        values = self._values(self._names[name])
        self._check(name, tuple(values.shape))
        return nn.Parameter(values.to(torch.bfloat16, copy=True), requires_grad=False)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes[name] != shape:
            raise Unmapped(f"{name} is {shape}, but by its config {self._shapes[name]}")

    def frequency_factors(self) -> Tensor | None:
        """What rotary frequencies are divided by, where the checkpoint says it; else None."""
        return None

    @abstractmethod
    def _pack(self, source: str, bias: Tensor | None, is_table: bool) -> Matrix:
        """The tensor of that name in the checkpoint, packed."""

    @abstractmethod
    def _values(self, source: str) -> Tensor:
        """The same as floats."""


class SafetensorsTensors(Tensors):
    """Tensors of safetensors files, in bfloat16 or rounded to 8 or 4 bits."""

    def __init__(
        self, model: PreTrainedModel, files: Iterable[str], kernels: CDLL, bits: int
    ) -> None:
        self._bits = bits
        self._files: dict[str, str] = {}
        for file in files:
            with safe_open(file, framework="pt") as stored:
                self._files |= dict.fromkeys(stored.keys(), file)
        if not self._files:
            raise Unmapped("it has no safetensors files")
        if getattr(model.config, "quantization_config", None) is not None:
            raise Unmapped("its tensors are quantized")
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        unused = sorted(self._files.keys() - parameters)
        if unused:
            raise Unmapped(f"{unused[0]} has no counterpart")
        super().__init__(model, {name: name for name in self._files}, kernels)

    def _pack(self, source: str, bias: Tensor | None, is_table: bool) -> Matrix:
        # The vocabulary's matrices have 8 bits at least: they move the probabilities most.
        bits = max(self._bits, 8) if is_table else self._bits
        return Matrix.of(self.kernels, self._values(source), bias, bits=bits)

    def _values(self, source: str) -> Tensor:
        # A file that is open keeps the pages that were read.
        with safe_open(self._files[source], framework="pt") as stored:
            values: Tensor = stored.get_tensor(source)
        if values.dtype not in FLOATS:
            raise Unmapped(f"{source} is {values.dtype}")
        return values


def packed_model(
    model: PreTrainedModel, tensors: Tensors, tell: Callable[[float], None]
) -> PreTrainedModel:
    """A model on the `meta` device, given its weights: in bfloat16 but for its matrices.

    Args:
        tell: given the share of the modules that are packed.

    Raises Unmapped: its tensors are not those of the checkpoint, one for one.
    """
    _fill_buffers(model, tensors.frequency_factors())
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = dict(model.named_modules())
    for done, (name, module) in enumerate(names.items()):
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        prefix = f"{name}." if name else ""
        is_linear, is_table = type(module) is nn.Linear, module in tables
        is_matrix = is_linear or module is tables[0]
        for key in set(own) - ({"weight"} if is_matrix else set()):
            setattr(module, key, tensors.parameter(prefix + key))
        if is_matrix:
            bias = getattr(module, "bias", None)
            matrix = tensors.matrix(prefix + "weight", bias, is_table=is_table)
            made: Any = NativeLinear if is_linear else NativeEmbedding
            model.set_submodule(name, made(module, matrix))
        tell((done + 1) / len(names))
    model.eval()
    return model


def _fill_buffers(model: PreTrainedModel, frequency_factors: Tensor | None) -> None:
    """Give what no checkpoint has its storage and values: rotary frequencies, embedding scales."""
    names = [name for name, _ in model.named_non_persistent_buffers()]
    stored = [name for name, _ in model.named_buffers() if name not in names]
    if stored:
        raise Unmapped(f"{stored[0]} is no parameter")
    for name in names:
        owner, _, last = name.rpartition(".")
        empty = torch.empty_like(model.get_buffer(name), device="cpu")
        setattr(model.get_submodule(owner), last, empty)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model.initialize_weights()
    if frequency_factors is not None:
        for module in model.modules():
            frequencies = getattr(module, "inv_freq", None)
            if isinstance(frequencies, Tensor) and frequencies.shape == frequency_factors.shape:
                frequencies.div_(frequency_factors)


def safetensors_files(location: str, revision: str | None) -> list[str]:
    """The safetensors files of a folder or a hub's model, fetched; none if it has others."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def find(name: str) -> str | None:
        return cached_file(
            location, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )

    if whole := find("model.safetensors"):
        return [whole]
    if index := find("model.safetensors.index.json"):
        files, _ = get_checkpoint_shard_files(location, Path(index), revision=revision)
        return list(files)
    return []
