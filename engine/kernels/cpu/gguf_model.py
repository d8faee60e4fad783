"""A GGUF file's tensors for the kernels, in their own quantization where that is possible."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from engine.kernels.cpu.experts import expert_matrices
from engine.kernels.cpu.operators import Matrix
from engine.kernels.cpu.packed_model import CheckpointTensors, ExpertTensors
from engine.model.gguf.file import GGML_TYPES, GGUFFile, RawTensor
from engine.model.gguf.tensors import Source, find_sources, read_values


class GGUFTensors(CheckpointTensors[Source]):
    """A GGUF file's tensors: in their own quantization, or in bfloat16 where `bits` is 16."""

    def __init__(
        self, model: transformers.PreTrainedModel, file: GGUFFile, kernels: CDLL, bits: int
    ) -> None:
        """Find the parameters' tensors; raises TargetError as `find_sources`."""
        self._file, self._config = file, model.config.get_text_config()
        super().__init__(model, find_sources(model, file), kernels, bits)

    def _pack(self, name: str, source: Source, bias: Tensor | None, bits: int) -> Matrix:
        """In 8 bits where the kernels lack a quantized tensor's type, or its values are converted.

        Float tensors stay floats in a file that has quantized ones.
        """
        type_ids = {self._file.entries[tensor].type_id for tensor in source.tensors}
        is_quantized = any(GGML_TYPES[type_id].bits < 16 for type_id in type_ids)
        keeps_type = bits < 16 if is_quantized else bits == 16 or self._file.bits is not None
        if not keeps_type:
            return super()._pack(name, source, bias, bits)
        matrix = None
        is_flat = all(len(self._file.entries[tensor].shape) == 2 for tensor in source.tensors)
        if is_flat and len(type_ids) == 1 and (source.rule is None or source.rule.moves_rows):
            raw, order = self._rows(source)
            matrix = Matrix.from_gguf(self.kernels, raw, bias, order=order)
        return matrix or super()._pack(name, source, bias, 8 if is_quantized else 16)

    def _pack_expert(self, part: ExpertTensors, index: int, bias: Tensor | None) -> Matrix:
        """As `_pack`, one expert of a stack."""
        (tensor,) = part.names
        raw = self._file.tensor(tensor, index)
        data = np.ascontiguousarray(raw.data[part.rows])
        rows = RawTensor(raw.type_id, (len(data), raw.shape[1]), data)
        is_quantized = GGML_TYPES[raw.type_id].bits < 16
        bits = self._bits
        if bits < 16 if is_quantized else bits == 16 or self._file.bits is not None:
            if matrix := Matrix.from_gguf(self.kernels, rows, bias):
                return matrix
            bits = 8
        return Matrix.of(self.kernels, torch.from_numpy(rows.floats()), bias, bits=bits)

    def _expert_tensors(self, source: Source, plain: Any, key: str) -> tuple[ExpertTensors, ...]:
        """Whatever rule joins and turns them into transformers' parameter does not matter here."""
        if len(source.tensors) > 1 or key.startswith("down"):
            return tuple(ExpertTensors((tensor,), True) for tensor in source.tensors)
        half = expert_matrices(plain, "gate_up_proj").shape[1] // 2
        halves = slice(0, half), slice(half, None)
        return tuple(ExpertTensors(source.tensors, True, rows) for rows in halves)

    def _tensor(self, tensor: str, index: int | None = None) -> Tensor:
        return torch.from_numpy(self._file.floats(tensor, index))

    def _values(self, name: str, source: Source) -> Tensor:
        return read_values(self._file, source, self._config, self._shapes[name])

    def _rows(self, source: Source) -> tuple[RawTensor, Tensor | None]:
        """A matrix as stored, and the file's row for each of its rows; None = the same."""
        parts = [self._file.tensor(tensor) for tensor in source.tensors]
        if source.rule is None:
            return parts[0], None
        data = np.concatenate([part.data for part in parts]) if len(parts) > 1 else parts[0].data
        ends = np.cumsum([len(part.data) for part in parts])
        numbers = np.split(np.arange(ends[-1], dtype=np.int64)[:, None], ends[:-1])
        order = torch.from_numpy(source.rule.convert(self._config, *numbers)[:, 0].copy())
        shape = (len(order), *parts[0].shape[1:])
        return RawTensor(parts[0].type_id, shape, data), order
