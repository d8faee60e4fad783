"""A GGUF file as transformers' model, its matrices packed straight from the file's blocks.

No float model is built: modules are made without storage, and tensor by tensor packed for the
kernels in the file's own width. Names and what a file keeps otherwise than transformers (the row
order of Llama's queries, Gemma's norms) are transformers' own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils

from engine.kernels.cpu.gguf import GGUFFile
from engine.kernels.cpu.operators import Matrix, NativeEmbedding, NativeLinear
from engine.model.reading import read_config, read_tokenizer
from engine.model.sources import Weights, partial_folder, writing

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
DIGESTS = "digests.json"
"""In a described folder: the SHA-256 of every other file."""
ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3's rotary frequencies are divided by."""


class Unmapped(Exception):
    """Tensors of the model that are not one by one those of the file; says which."""


@contextlib.contextmanager
def quick_reader(file: GGUFFile) -> Iterator[None]:
    """Within it, transformers reads this file by `GGUFFile`: its own reader takes ten seconds.

    Other files are read as ever, by threads that load them meanwhile.
    """
    import gguf

    plain, own = gguf.GGUFReader, file.path.resolve()

    def reader(path: Any, *rest: Any) -> Any:
        return file.as_reader() if Path(path).resolve() == own else plain(path, *rest)

    gguf.GGUFReader = reader  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = plain  # type: ignore[misc]


def described(file: GGUFFile, weights: Weights, cache_dir: Path) -> Weights:
    """A folder with a GGUF file's config and tokenizer, made once and kept in the cache."""
    # By the file, not by the weights' fingerprint: a hub's is a revision, of any repository.
    about = file.path.stat()
    mark = f"{file.path.resolve()}:{about.st_size}:{about.st_mtime_ns}"
    key = f"{file.path.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
    folder = cache_dir / "described" / key
    damaged = _damaged_file(folder)
    if damaged is not None:
        if folder.is_dir():
            LOG.warning("%s in the cache is damaged or unknown; making it again.", damaged)
        with quick_reader(file):
            config, tokenizer = read_config(weights), read_tokenizer(weights)
        with partial_folder(folder.parent) as temp:
            made = temp / key
            with writing(made):
                config.save_pretrained(made)
                if tokenizer is not None:
                    tokenizer.save_pretrained(made)
                names = sorted(one.name for one in made.iterdir())
                digests = {name: _digest(made / name) for name in names}
                (made / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return Weights(str(folder), None, None, True, weights.fingerprint)


def _damaged_file(folder: Path) -> Path | None:
    """A file of a described folder that is not as it was made; None = all are."""
    file = folder / DIGESTS
    try:
        digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        for name, digest in digests.items():
            file = folder / name
            if _digest(file) != digest:
                return file
    except (OSError, ValueError, TypeError, AttributeError):
        return file
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def packed_model(
    config: Any, file: GGUFFile, kernels: CDLL, tell: Callable[[float], None]
) -> PreTrainedModel:
    """The file's model, in bfloat16 but for its matrices.

    Args:
        tell: given the share of the tensors that are packed.

    Raises Unmapped: its tensors are not those of the model, one for one.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    tensors = _Tensors(model, file)
    _fill_buffers(model, file)
    embedding, packed = model.get_input_embeddings(), 0
    names = dict(model.named_modules())
    by_tensor: dict[str, Matrix] = {}
    for name, module in names.items():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        prefix = f"{name}." if name else ""
        is_linear = type(module) is nn.Linear
        if is_linear or module is embedding:
            for key in set(own) - {"weight"}:
                setattr(module, key, tensors.parameter(prefix + key))
            bias = getattr(module, "bias", None)
            matrix = tensors.matrix(prefix + "weight", kernels, bias, by_tensor)
            made = (NativeLinear if is_linear else NativeEmbedding)(module, matrix)
            owner, _, last = name.rpartition(".")
            setattr(names[owner], last, made)
        else:
            for key in own:
                setattr(module, key, tensors.parameter(prefix + key))
        packed += 1
        tell(packed / len(names))
    model.eval()
    return model


class _Tensors:
    """The file's tensors by transformers' names."""

    def __init__(self, model: PreTrainedModel, file: GGUFFile) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._file = file
        archs = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture]
        if not archs:
            raise Unmapped(f"no names are known for the architecture {file.architecture}")
        config = model.config.get_text_config()
        processors = modeling_gguf_pytorch_utils.TENSOR_PROCESSORS
        kind = processors.get(file.architecture, modeling_gguf_pytorch_utils.TensorProcessor)
        self._processor: Any = kind(config=config.to_dict())  # type: ignore[no-untyped-call]
        names = get_tensor_name_map(archs[0], config.num_hidden_layers)
        self._names: dict[str, str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in parameters:
            stem, _, suffix = name.rpartition(".")
            gguf_name = names.get_name(stem)
            if gguf_name is not None and f"{gguf_name}.{suffix}" in file.names:
                self._names[name] = f"{gguf_name}.{suffix}"
        for name, source in model.all_tied_weights_keys.items():
            if name not in self._names and source in self._names:
                self._names[name] = self._names[source]
        missing = sorted(parameters.keys() - self._names.keys())
        unused = set(file.names) - set(self._names.values()) - {ROPE_FACTORS}
        if missing or unused:
            raise Unmapped(f"{(missing or sorted(unused))[0]} has no counterpart")
        self._shapes: Mapping[str, torch.Size] = {n: p.shape for n, p in parameters.items()}

    def matrix(
        self, name: str, kernels: CDLL, bias: Tensor | None, known: dict[str, Matrix]
    ) -> Matrix:
        """A matrix in its own width, or in 8 bits where the kernels have none of it.

        Args:
            known: matrices that were packed already, by their names in the file.
        """
        source = self._names[name]
        if source in known and bias is None:
            return known[source]
        with self._file.tensor(source) as raw:
            self._check(name, raw.shape)
            order = self._order(source, raw.shape[0])
            matrix = Matrix.of_file(kernels, raw, bias, order=order)
        if matrix is None:
            matrix = Matrix.of(kernels, self._values(name), bias, bits=8)
        known[source] = matrix
        return matrix

    def parameter(self, name: str) -> nn.Parameter:
        values = self._values(name)
        self._check(name, tuple(values.shape))
        return nn.Parameter(values.to(torch.bfloat16), requires_grad=False)

    def _values(self, name: str) -> Tensor:
        source = self._names[name]
        return torch.from_numpy(
            np.ascontiguousarray(self._process(self._file.floats(source), source))
        )

    def _process(self, values: Any, source: str) -> Any:
        return self._processor.process(
            weights=values, name=source, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        ).weights

    def _order(self, source: str, rows: int) -> Tensor | None:
        """The file's row that each row of a matrix is; None = as they are."""
        numbers = np.arange(rows, dtype=np.int64)[:, None]
        order = self._process(numbers, source)
        if order is numbers:
            return None
        if order.shape != numbers.shape or sorted(order[:, 0]) != list(range(rows)):
            raise Unmapped(f"{source} is kept otherwise than by the order of its rows")
        return torch.from_numpy(np.ascontiguousarray(order[:, 0]))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if tuple(self._shapes[name]) != shape:
            raise Unmapped(f"{name} is {shape}, but by its config {tuple(self._shapes[name])}")


def _fill_buffers(model: PreTrainedModel, file: GGUFFile) -> None:
    """Give what no checkpoint has its storage and values: rotary frequencies, embedding scales."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.empty_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model.initialize_weights()
    if ROPE_FACTORS in file.names:
        factors = torch.from_numpy(file.floats(ROPE_FACTORS))
        for module in model.modules():
            frequencies = getattr(module, "inv_freq", None)
            if isinstance(frequencies, Tensor) and frequencies.shape == factors.shape:
                frequencies.div_(factors)
