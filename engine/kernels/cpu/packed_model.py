"""Loads a checkpoint into transformers' model, packed for the kernels tensor by tensor.

No float model is built: modules are created without storage, and a tensor is read, packed and
dropped. So loading takes no more memory than the packed model and one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from ctypes import CDLL
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from engine.kernels.cpu.operators import FLOAT_TYPES, Matrix, NativeEmbedding, NativeLinear
from engine.model.packed import stored_buffers


class UnmappedTensor(Exception):
    """The model's tensors do not match the checkpoint's one to one; the message names one."""


SourceT = TypeVar("SourceT", bound=Hashable)


class CheckpointTensors(ABC, Generic[SourceT]):
    """A checkpoint's tensors by the names of a model's parameters and stored buffers."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        sources: Mapping[str, SourceT],
        kernels: CDLL,
        bits: int,
    ) -> None:
        """Prepare to pack.

        Args:
            sources: a parameter's name → what stands for its tensor; tied ones may be missing.
                Tensors without a parameter are listed by their own names.
            bits: to quantize float matrices to; 16 = bfloat16.

        Raises UnmappedTensor: a parameter has no tensor, or a tensor has no parameter.
        """
        self.kernels, self._sources, self._bits = kernels, dict(sources), bits
        for name, other in model.all_tied_weights_keys.items():
            for one, tied in ((name, other), (other, name)):
                if one not in self._sources and tied in self._sources:
                    self._sources[one] = self._sources[tied]
        parameters = dict(model.named_parameters(remove_duplicate=False)) | stored_buffers(model)
        unmapped = sorted(parameters.keys() ^ self._sources.keys())
        if unmapped:
            raise UnmappedTensor(f"{unmapped[0]} has no counterpart")
        self._shapes = {name: tuple(one.shape) for name, one in parameters.items()}
        self._packed: dict[SourceT, Matrix] = {}

    def matrix(self, name: str, bias: Tensor | None, *, is_vocab: bool) -> Matrix:
        """A matrix packed for the kernels.

        Args:
            is_vocab: whether it is the embedding or the output matrix.
        """
        source = self._sources[name]
        if source in self._packed and bias is None:
            return self._packed[source]
        # The vocabulary's matrices have at least 8 bits: they affect the probabilities most.
        matrix = self._pack(name, source, bias, max(self._bits, 8) if is_vocab else self._bits)
        self._check(name, matrix.shape)
        self._packed[source] = matrix
        return matrix

    def parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.buffer(name).to(torch.bfloat16), requires_grad=False)

    def buffer(self, name: str) -> Tensor:
        """A copy of a tensor's values."""
        values = self._values(name, self._sources[name])
        self._check(name, tuple(values.shape))
        return values.clone()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes[name] != shape:
            raise UnmappedTensor(f"{name} is {shape}, but by its config {self._shapes[name]}")

    def _pack(self, name: str, source: SourceT, bias: Tensor | None, bits: int) -> Matrix:
        """A parameter's tensor, packed."""
        return Matrix.of(self.kernels, self._values(name, source), bias, bits=bits)

    @abstractmethod
    def _values(self, name: str, source: SourceT) -> Tensor:
        """A parameter's tensor, as floats."""


class SafetensorsTensors(CheckpointTensors[str]):
    """Tensors of safetensors files, in bfloat16 or quantized to 8 or 4 bits."""

    def __init__(
        self, model: transformers.PreTrainedModel, files: Iterable[str], kernels: CDLL, bits: int
    ) -> None:
        self._files: dict[str, str] = {}
        for file in files:
            with safe_open(file, framework="pt", backend="pread") as stored:
                self._files |= dict.fromkeys(stored.keys(), file)
        if not self._files:
            raise UnmappedTensor("it has no safetensors files")
        if getattr(model.config, "quantization_config", None) is not None:
            raise UnmappedTensor("its tensors are quantized")
        super().__init__(model, {name: name for name in self._files}, kernels, bits)

    def _values(self, name: str, source: str) -> Tensor:
        with safe_open(self._files[source], framework="pt", backend="pread") as stored:
            values: Tensor = stored.get_tensor(source)
        if values.dtype not in FLOAT_TYPES:
            raise UnmappedTensor(f"{source} is {values.dtype}")
        return values


def load_packed(
    model: transformers.PreTrainedModel,
    tensors: CheckpointTensors[Any],
    report: Callable[[float], None],
) -> transformers.PreTrainedModel:
    """Load weights into a model on the `meta` device: packed matrices, the rest in bfloat16.

    Args:
        report: called with the share of modules done.

    Raises UnmappedTensor: its tensors do not match the checkpoint's one to one.
    """
    _fill_buffers(model, tensors)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = dict(model.named_modules())
    for done, (name, module) in enumerate(names.items()):
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if not keys:
            continue
        prefix = f"{name}." if name else ""
        is_linear, is_vocab = type(module) is nn.Linear, module in tables
        is_matrix = is_linear or module is tables[0]
        for key in set(keys) - ({"weight"} if is_matrix else set()):
            setattr(module, key, tensors.parameter(prefix + key))
        if is_matrix:
            bias = getattr(module, "bias", None)
            matrix = tensors.matrix(prefix + "weight", bias, is_vocab=is_vocab)
            packed_class: Any = NativeLinear if is_linear else NativeEmbedding
            model.set_submodule(name, packed_class(module, matrix))
        report((done + 1) / len(names))
    model.eval()
    return model


def _fill_buffers(model: transformers.PreTrainedModel, tensors: CheckpointTensors[Any]) -> None:
    """Allocate and compute buffers, such as rotary frequencies; read those that are stored."""
    stored = stored_buffers(model)
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        empty = torch.empty_like(buffer, device="cpu")
        setattr(model.get_submodule(owner), last, empty)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model.initialize_weights()
        for name in stored:
            model.get_buffer(name).copy_(tensors.buffer(name))


def safetensors_files(location: str, revision: str | None) -> list[str]:
    """The safetensors files of a folder or hub model, fetched; empty if it has none."""
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
