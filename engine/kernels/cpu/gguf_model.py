"""A GGUF file's tensors for the kernels, in their own quantization where that is possible."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
import torch
import transformers
from torch import Tensor

from engine.kernels.cpu.operators import Matrix
from engine.kernels.cpu.packed_model import CheckpointTensors
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
