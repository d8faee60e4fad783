"""A GGUF file under transformers' names: its config, and its tensors as stored.

The conversions between a file's tensors and transformers' (the row order of Llama's queries, an
offset of Gemma's norms) are transformers' own, except for the most common families: transformers'
take long to import, and lack some families.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from engine.kernels.cpu.operators import Matrix
from engine.kernels.cpu.packed_model import CheckpointTensors, UnmappedTensor
from engine.model.gguf.file import GGML_TYPES, GGUFFile
from engine.model.gguf.tokenizer import write_tokenizer
from engine.model.reading import read_config
from engine.model.sources import Weights, whole_folder

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of Llama 3's rotary frequencies."""
INTERLEAVED = {"llama", "smollm3", "granite"}
"""Architectures whose queries and keys interleave the two halves of a head."""
OFFSET_NORMS = {"gemma2", "gemma3"}
"""Architectures whose stored norms have 1 added."""
IDENTICAL = {"qwen2", "qwen3", "phi3", "olmo2"}
"""Architectures whose tensors are those of transformers."""
FURTHER_FAMILIES: dict[str, dict[str, str | None]] = {
    "smollm3": {},
    "olmo2": {"rope.dimension_count": None},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
}
"""Architectures that transformers cannot read from GGUF files: where their fields differ from
Llama's, in the file → in the config."""


@functools.cache
def _add_families() -> None:
    """Let transformers read the config and the weights of `FURTHER_FAMILIES`."""
    from transformers import modeling_gguf_pytorch_utils as theirs
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mapping: Any = GGUF_CONFIG_MAPPING
    for name, fields in FURTHER_FAMILIES.items():
        mapping.setdefault(name, mapping["llama"] | fields)
        theirs.GGUF_SUPPORTED_ARCHITECTURES.append(name)
        if name in INTERLEAVED:
            theirs.TENSOR_PROCESSORS.setdefault(name, theirs.LlamaTensorProcessor)


def can_read(architecture: str) -> bool:
    """Whether transformers can load GGUF files of this architecture."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    _add_families()
    return architecture in theirs.GGUF_SUPPORTED_ARCHITECTURES


@contextlib.contextmanager
def fast_gguf_reader(file: GGUFFile) -> Iterator[None]:
    """Makes transformers read this file by `GGUFFile`: its own reader takes ten seconds.

    Other files, which other threads may be loading, are read as before.
    """
    from transformers import modeling_gguf_pytorch_utils as theirs

    _add_families()
    plain, bar, own = gguf.GGUFReader, theirs.tqdm, file.path.resolve()  # type: ignore[attr-defined]

    def reader(path: Any, *rest: Any) -> Any:
        return file.as_reader() if Path(path).resolve() == own else plain(path, *rest)

    gguf.GGUFReader = reader  # type: ignore[misc, assignment]
    theirs.tqdm = lambda tensors, **_: tensors  # type: ignore[attr-defined]
    try:
        yield
    finally:
        gguf.GGUFReader, theirs.tqdm = plain, bar  # type: ignore[misc, attr-defined]


def extract_config(file: GGUFFile, weights: Weights, cache_dir: Path) -> Weights:
    """A cached folder with a GGUF file's config and tokenizer in transformers' layout."""
    # Keyed by the file on the disk: its weights' fingerprint may not see an edited chat template.
    status = file.path.stat()
    identity = f"{file.path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    key = f"{file.path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder = cache_dir / "gguf" / key
    if not folder.is_dir():
        with fast_gguf_reader(file):
            config = read_config(weights)
        with whole_folder(folder) as temp:
            config.save_pretrained(temp)
            write_tokenizer(file, temp)
    return Weights(str(folder), None, None, True, weights.fingerprint)


def divide_frequencies(model: transformers.PreTrainedModel, file: GGUFFile) -> None:
    """Divide the rotary frequencies by the file's factors, if it has them."""
    if ROPE_FACTORS in file.entries:
        factors = torch.from_numpy(file.floats(ROPE_FACTORS))
        for name, frequencies in model.named_buffers():
            if name.endswith("inv_freq") and frequencies.shape == factors.shape:
                frequencies.div_(factors.to(frequencies.device))


class GGUFTensors(CheckpointTensors):
    """A GGUF file's tensors: in their own quantization, or in bfloat16 where `bits` is 16."""

    def __init__(
        self, model: transformers.PreTrainedModel, file: GGUFFile, kernels: CDLL, bits: int
    ) -> None:
        """Map the model's names to the file's.

        Raises UnmappedTensor: the file's tensors do not match the model's one to one.
        """
        self._file = file
        config = model.config.get_text_config()
        self._process = _value_rule(file.architecture, config)
        archs = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
        if not archs:
            raise UnmappedTensor(f"no names are known for the architecture {file.architecture}")
        name_map = gguf.get_tensor_name_map(archs[0], config.num_hidden_layers)
        names: dict[str, str] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            stem, _, suffix = name.rpartition(".")
            gguf_name = name_map.get_name(stem)
            if gguf_name is not None and f"{gguf_name}.{suffix}" in file.entries:
                names[name] = f"{gguf_name}.{suffix}"
        unused = file.entries.keys() - set(names.values()) - {ROPE_FACTORS}
        super().__init__(model, names | {name: name for name in unused}, kernels, bits)

    def _pack(self, source: str, bias: Tensor | None, bits: int) -> Matrix:
        """In 8 bits where the kernels lack a quantized tensor's type.

        Float tensors stay floats in a file that has quantized ones.
        """
        is_quantized = GGML_TYPES[self._file.entries[source].type_id].bits < 16
        keeps_type = bits < 16 if is_quantized else bits == 16 or self._file.bits is not None
        if not keeps_type:
            return super()._pack(source, bias, bits)
        raw = self._file.tensor(source)
        order = self._order(source, raw.shape[0])
        matrix = Matrix.from_gguf(self.kernels, raw, bias, order=order)
        return matrix or super()._pack(source, bias, 8)

    def _values(self, source: str) -> Tensor:
        values = self._process(self._file.floats(source), source)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _order(self, source: str, rows: int) -> Tensor | None:
        """The file's row for each row of a matrix; None = the same."""
        numbers = np.arange(rows, dtype=np.int64)[:, None]
        order = self._process(numbers, source)
        if order is numbers:
            return None
        if order.shape != numbers.shape or sorted(order[:, 0]) != list(range(rows)):
            raise UnmappedTensor(f"{source} is not a permutation of the model's rows")
        return torch.from_numpy(np.ascontiguousarray(order[:, 0]))


def _value_rule(architecture: str, config: Any) -> Callable[[Any, str], Any]:
    """The function from a file's tensor and its name to the model's values."""
    if architecture in IDENTICAL:
        return lambda values, name: values
    if architecture in OFFSET_NORMS:
        return lambda values, name: values - 1 if name.endswith("norm.weight") else values
    if architecture in INTERLEAVED:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

        def separate(values: Any, name: str) -> Any:
            count = heads.get(name.split(".")[-2])
            if count is None:
                return values
            pairs = values.reshape(count, -1, 2, *values.shape[1:])
            return pairs.swapaxes(1, 2).reshape(values.shape)

        return separate
    from transformers import modeling_gguf_pytorch_utils as theirs

    kind = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)
    processor: Any = kind(config=config.to_dict())  # type: ignore[no-untyped-call]
    empty: dict[str, Any] = {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}}
    return lambda values, name: processor.process(weights=values, name=name, **empty).weights
