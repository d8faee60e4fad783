"""A GGUF file by transformers' names: its config, its tokenizer, and its tensors as they are.

Names, and what a file keeps otherwise than transformers (the row order of Llama's queries, Gemma's
norms), are transformers' own but for the commonest families, whose rules are here: transformers'
take long to import, and leave some families out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.gguf import TYPES, GGUFFile
from engine.kernels.cpu.operators import Matrix
from engine.kernels.cpu.packed_model import Tensors, Unmapped
from engine.model.files import read_settings
from engine.model.reading import read_config, read_tokenizer
from engine.model.sources import Weights, partial_folder, writing
from engine.model.tokenizer import check_tokenizer

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)
DIGESTS = "digests.json"
"""In a described folder: the SHA-256 of every other file."""
ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3's rotary frequencies are divided by."""
INTERLEAVED = {"llama", "smollm3", "granite"}
"""Architectures whose queries and keys have the two halves of a head in turns."""
OFFSET_NORMS = {"gemma2", "gemma3"}
"""Architectures whose norms have 1 added."""
AS_THEY_ARE = {"qwen2", "qwen3", "phi3", "olmo2"}
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
"""Architectures that transformers does not know in a GGUF file: where their fields differ from
Llama's, as a file names them and as their config does."""


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
    """Whether a file of an architecture can be loaded at all."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    _add_families()
    return architecture in theirs.GGUF_SUPPORTED_ARCHITECTURES


def why_not(file: GGUFFile) -> str | None:
    """Why the kernels do not run a file's model, as far as its header says; None if they do."""
    name = file.architecture
    if file.metadata.get(f"{name}.expert_count"):
        return "its layers have experts, which transformers' modules compute in floats"
    if name not in INTERLEAVED | OFFSET_NORMS | AS_THEY_ARE:
        return f"models of the architecture {name} are computed by transformers' modules"
    return None


@contextlib.contextmanager
def quick_reader(file: GGUFFile) -> Iterator[None]:
    """Within it, transformers reads this file by `GGUFFile`: its own reader takes ten seconds.

    Other files are read as ever, by threads that load them meanwhile.
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


def described_tokenizer(weights: Weights) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a described folder, exactly as it was saved; None if it has none.

    Its own class would make its vocabulary anew, which takes seconds.
    """
    from transformers import PreTrainedTokenizerFast

    place = Path(weights.location)
    if not (place / "tokenizer.json").is_file():
        return None
    settings = read_settings(place / "tokenizer_config.json")
    for name in ("tokenizer_class", "backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    template = place / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), **settings)
    check_tokenizer(tokenizer, weights.location)
    return tokenizer


class GGUFTensors(Tensors):
    """A file's tensors, in their own width."""

    def __init__(
        self, model: PreTrainedModel, file: GGUFFile, kernels: CDLL, bits: int = 16
    ) -> None:
        """Map the model's names to the file's.

        Args:
            bits: of what the file holds in floats: 16 = as it is.

        Raises Unmapped: its tensors are not those of the model, one for one.
        """
        self._file, self._bits = file, bits
        config = model.config.get_text_config()
        self._process = _value_rule(file.architecture, config)
        archs = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
        if not archs:
            raise Unmapped(f"no names are known for the architecture {file.architecture}")
        known = gguf.get_tensor_name_map(archs[0], config.num_hidden_layers)
        names: dict[str, str] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            stem, _, suffix = name.rpartition(".")
            gguf_name = known.get_name(stem)
            if gguf_name is not None and f"{gguf_name}.{suffix}" in file.names:
                names[name] = f"{gguf_name}.{suffix}"
        super().__init__(model, names, kernels)
        unused = set(file.names) - set(names.values()) - {ROPE_FACTORS}
        if unused:
            raise Unmapped(f"{min(unused)} has no counterpart")

    def frequency_factors(self) -> Tensor | None:
        names = self._file.names
        return torch.from_numpy(self._file.floats(ROPE_FACTORS)) if ROPE_FACTORS in names else None

    def _pack(self, source: str, bias: Tensor | None, is_table: bool) -> Matrix:
        """In 8 bits where the kernels have not the file's type."""
        matrix = None
        bits = max(self._bits, 8) if is_table else self._bits
        if bits == 16 or TYPES[self._file.kind(source)].bits < 16:
            bits = 8
            with self._file.tensor(source) as raw:
                order = self._order(source, raw.shape[0])
                matrix = Matrix.of_file(self.kernels, raw, bias, order=order)
        return matrix or Matrix.of(self.kernels, self._values(source), bias, bits=bits)

    def _values(self, source: str) -> Tensor:
        values = self._process(self._file.floats(source), source)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _order(self, source: str, rows: int) -> Tensor | None:
        """The file's row that each row of a matrix is; None = as they are."""
        numbers = np.arange(rows, dtype=np.int64)[:, None]
        order = self._process(numbers, source)
        if order is numbers:
            return None
        if order.shape != numbers.shape or sorted(order[:, 0]) != list(range(rows)):
            raise Unmapped(f"{source} is kept otherwise than by the order of its rows")
        return torch.from_numpy(np.ascontiguousarray(order[:, 0]))


def _value_rule(architecture: str, config: Any) -> Callable[[Any, str], Any]:
    """What makes a model's values of a file's tensor, given its name."""
    if architecture in AS_THEY_ARE:
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
