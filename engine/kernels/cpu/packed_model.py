"""Loads a checkpoint into transformers' model, packed for the kernels tensor by tensor.

No float model is built: modules are created without storage, and a tensor is read, packed and
dropped. So loading takes no more memory than the packed model and one tensor.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from engine.kernels.cpu.experts import (
    NativeExperts,
    expert_matrices,
    is_experts,
    split_rows,
    unsupported_reason,
)
from engine.kernels.cpu.operators import FLOAT_TYPES, Matrix, NativeEmbedding, NativeLinear
from engine.model.packed import stored_buffers


class UnmappedTensor(Exception):
    """The model's tensors do not match the checkpoint's one to one; the message names one."""


ALL = slice(None)


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Where a checkpoint has one matrix of each expert: its gate, its up or its down.

    Attributes:
        names: of one tensor per expert, or of the tensor in which they are stacked.
        rows: of each expert's tensor.
        is_transposed: whether the tensors are `(in, out)`.
    """

    names: tuple[str, ...]
    is_stack: bool
    rows: slice = field(default_factory=lambda: ALL)
    is_transposed: bool = False


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

    def experts(self, prefix: str, plain: Any) -> NativeExperts:
        """A layer's experts, packed one after the other.

        Args:
            plain: the module that they replace; its parameters' names begin with `prefix`.
        """
        hidden, width = expert_matrices(plain, "down_proj").shape[1:]
        gate, up = self._expert_matrices(prefix, "gate_up_proj", plain, (width, hidden))
        (down,) = self._expert_matrices(prefix, "down_proj", plain, (hidden, width))
        return NativeExperts(plain, gate, up, down)

    def _expert_matrices(
        self, prefix: str, key: str, plain: Any, shape: tuple[int, int]
    ) -> list[list[Matrix]]:
        """Per part of a parameter, such as gate and up, one matrix `shape` per expert."""
        name, count, found = prefix + key, len(getattr(plain, key)), []
        parts = self._expert_tensors(self._sources[name], plain, key)
        biases: list[Sequence[Tensor | None]] = [[None] * count] * len(parts)
        if plain.has_bias:
            own = self._expert_tensors(self._sources[f"{name}_bias"], plain, f"{key}_bias")
            biases = [list(self._tensor(one.names[0])[:, one.rows]) for one in own]
        for part, bias in zip(parts, biases, strict=True):
            try:
                matrices = [self._pack_expert(part, i, bias[i]) for i in range(count)]
            except IndexError as error:
                raise UnmappedTensor(f"{part.names[0]} is not of {count} experts") from error
            if any(matrix.shape != shape for matrix in matrices):
                raise UnmappedTensor(f"{part.names[0]} is not {shape} per expert")
            found.append(matrices)
        return found

    def _pack_expert(self, part: ExpertTensors, index: int, bias: Tensor | None) -> Matrix:
        where = (part.names[0], index) if part.is_stack else (part.names[index],)
        values = self._tensor(*where)
        values = values.mT if part.is_transposed else values
        return Matrix.of(self.kernels, values[part.rows], bias, bits=self._bits)

    @abstractmethod
    def _expert_tensors(self, source: SourceT, plain: Any, key: str) -> tuple[ExpertTensors, ...]:
        """The tensors of a parameter of experts, per part; of biases, always stacks."""

    @abstractmethod
    def _tensor(self, tensor: str, index: int | None = None) -> Tensor:
        """The checkpoint's tensor of that name, or one item of it, as floats."""

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

    def parameter(self, name: str, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(self.buffer(name).to(dtype), requires_grad=False)

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


NamedTensors = str | tuple[ExpertTensors, ...]
"""A parameter's tensor; of experts, the tensors of gate and up, or those of down."""


class SafetensorsTensors(CheckpointTensors[NamedTensors]):
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
        super().__init__(model, _by_parameter(model, self._files), kernels, bits)

    def _values(self, name: str, source: NamedTensors) -> Tensor:
        if not isinstance(source, str):
            raise UnmappedTensor(f"{name} is of experts that the kernels do not run")
        return self._tensor(source)

    def _tensor(self, tensor: str, index: int | None = None) -> Tensor:
        with safe_open(self._files[tensor], framework="pt", backend="pread") as stored:
            if index is None:
                values: Tensor = stored.get_tensor(tensor)
            else:
                values = stored.get_slice(tensor)[index]
        if values.dtype not in FLOAT_TYPES:
            raise UnmappedTensor(f"{tensor} is {values.dtype}")
        return values

    def _expert_tensors(
        self, source: NamedTensors, plain: Any, key: str
    ) -> tuple[ExpertTensors, ...]:
        if not isinstance(source, str):
            return source
        is_transposed, parts = plain.is_transposed, split_rows(plain, key)
        return tuple(ExpertTensors((source,), True, rows, is_transposed) for rows in parts)


def _by_parameter(
    model: transformers.PreTrainedModel, names: Collection[str]
) -> dict[str, NamedTensors]:
    """Tensors by the names of parameters, as transformers renames and joins them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    own = model.state_dict()
    if set(names) <= own.keys():
        return {name: name for name in names}
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    joins = [step for step in steps if isinstance(step, WeightConverter)]
    patterns = {pattern: step for step in joins for pattern in step.source_patterns}
    found: dict[str, NamedTensors] = {}
    stacks: dict[str, dict[str, dict[int, str]]] = {}  # by parameter, pattern and expert
    for name in names:
        target, pattern = rename_source_key(name, renamings, joins, model.base_model_prefix, own)
        if pattern is None:
            found[target] = name
            continue
        kinds = {type(one).__name__ for one in patterns[pattern].operations}
        numbers = re.findall(r"\.(\d+)\.", name)
        if not kinds <= {"MergeModulelist", "Concatenate"} or not numbers:
            raise UnmappedTensor(f"{name} is converted on loading")
        stacks.setdefault(target, {}).setdefault(pattern, {})[int(numbers[-1])] = name
    for target, by_pattern in stacks.items():
        order = [one for one in patterns[min(by_pattern)].source_patterns if one in by_pattern]
        found[target] = tuple(
            ExpertTensors(tuple(name for _, name in sorted(by_pattern[one].items())), False)
            for one in order
        )
    return found


def load_packed(
    model: transformers.PreTrainedModel,
    tensors: CheckpointTensors[Any],
    report: Callable[[float], None],
) -> transformers.PreTrainedModel:
    """Load weights into a model on the `meta` device: packed matrices, the rest in its own dtypes.

    Args:
        report: called with the share of modules done.

    Raises UnmappedTensor: its tensors do not match the checkpoint's one to one.
    """
    _fill_buffers(model, tensors)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = dict(model.named_modules())
    for done, (name, module) in enumerate(names.items()):
        prefix = f"{name}." if name else ""
        if is_experts(module) and unsupported_reason(module) is None:
            model.set_submodule(name, tensors.experts(prefix, module))
            continue
        dtypes = {key: one.dtype for key, one in module.named_parameters(recurse=False)}
        is_linear, is_vocab = type(module) is nn.Linear, module in tables
        is_matrix = is_linear or module is tables[0]
        for key in dtypes.keys() - ({"weight"} if is_matrix else set()):
            setattr(module, key, tensors.parameter(prefix + key, dtypes[key]))
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
