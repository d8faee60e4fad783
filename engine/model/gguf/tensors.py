"""The parameters of a model by the tensors of its GGUF file; every tensor is used, or refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from engine.errors import TargetError
from engine.model.files import name_list
from engine.model.gguf.config import family_of
from engine.model.gguf.families import ANY_NORM, num_layers
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.positions import DIVISORS, LONG_FACTORS, SHORT_FACTORS
from engine.model.gguf.values import (
    JOINED_EXPERTS,
    JOINED_ROWS,
    Array,
    ValueRule,
    rows_between,
    then,
)
from engine.model.packed import stored_buffers

POSITIONS = {DIVISORS, LONG_FACTORS, SHORT_FACTORS}
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    r".*\.experts\.gate_up_proj": ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    r".*\.(?:experts|block_sparse_moe)\.down_proj": ("blk.{}.ffn_down_exps.weight",),
    r".*\.router\.weight": ("blk.{}.ffn_gate_inp.weight",),
    r".*\.shared_mlp\.input_linear\.weight": (
        "blk.{}.ffn_gate_shexp.weight",
        "blk.{}.ffn_up_shexp.weight",
    ),
    r".*\.(?:e_score_correction_bias|expert_bias)": ("blk.{}.exp_probs_b.bias",),
    r".*\.dt_bias": ("blk.{}.ssm_dt.bias",),
    r".*\.\d+\.(enorm|hnorm|eh_proj)\.weight": (r"blk.{}.nextn.\1.weight",),
    r".*\.\d+\.post_norm\.weight": ("blk.{}.nextn.shared_head_norm.weight",),
}
"""Parameters that transformers fuses or names otherwise than the published checkpoints, for which
the `gguf` package knows no tensor."""
_FUSED = {
    "blk.{}.ffn_gate_exps.weight": "blk.{}.ffn_gate_up_exps.weight",
    "blk.{}.exp_probs_b.bias": "blk.{}.exp_probs_b",
}
_QKV = ("q", "k", "v")
_COPIES = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")
"""Of the model's own embedding and output matrices, which transformers' layers share."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter's values are in a file.

    Attributes:
        tensors: their names.
        rule: None = the values of the only tensor.
    """

    tensors: tuple[str, ...]
    rule: ValueRule | None


def find_sources(model: transformers.PreTrainedModel, file: GGUFFile) -> dict[str, Source]:
    """A source per parameter and stored buffer; tied parameters may be missing.

    Raises TargetError: a parameter has no tensor, or a tensor no parameter; both are named.
    """
    finder = _SourceFinder(file, _shapes(model), model.config.get_text_config().num_hidden_layers)
    sources = {name: found for name in finder.shapes if (found := finder.find(name)) is not None}
    tied = dict(model.all_tied_weights_keys)
    for one, other in [*tied.items(), *((b, a) for a, b in tied.items())]:
        if one not in sources and other in sources:
            sources[one] = sources[other]
    missing = finder.shapes.keys() - sources.keys()
    used = {tensor for source in sources.values() for tensor in source.tensors}
    unused = {name for name in file.entries.keys() - used - POSITIONS if not _is_mtp(file, name)}
    if missing or unused:
        lacks = f"lacks a tensor for {name_list(missing)}" if missing else ""
        has = f"has {name_list(unused)}, for which the model has no place" if unused else ""
        raise TargetError(
            f"{file.path} {' and '.join(filter(None, (lacks, has)))} "
            f"({model.config.get_text_config().model_type}). Give a complete file of this model."
        )
    return sources


def _is_mtp(file: GGUFFile, name: str) -> bool:
    """Whether a tensor is of a layer for multi-token prediction, which drafters read."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers(file)


def _shapes(model: transformers.PreTrainedModel) -> dict[str, tuple[int, ...]]:
    values = dict(model.named_parameters(remove_duplicate=False)) | stored_buffers(model)
    return {name: tuple(value.shape) for name, value in values.items()}


def mtp_state_dict(layers: Any, file: GGUFFile) -> dict[str, Tensor]:
    """The float32 values of a file's layers for multi-token prediction, transformers' `MtpModel`.

    Raises TargetError: a parameter has no tensor, or a tensor no parameter; both are named.
    """
    first, state, used = num_layers(file), dict[str, Tensor](), set[str]()
    own = {name: shape for name, shape in _shapes(layers).items() if name.startswith("layers.")}
    in_model = {name: _name_in_model(name, first) for name in own}
    shapes = {in_model[name]: shape for name, shape in own.items()}
    finder = _SourceFinder(file, shapes, first + layers.num_mtp_layers)
    missing = []
    for name, shape in own.items():
        if (source := finder.find(in_model[name])) is None:
            missing.append(name)
        else:
            used |= {*source.tensors}
            state[name] = read_values(file, source, layers.config, shape)
    unused = {
        name
        for name in file.entries.keys() - used
        if _is_mtp(file, name) and not name.endswith(_COPIES)
    }
    if missing or unused:
        raise TargetError(
            f"{file.path} has other layers for multi-token prediction than transformers "
            f"({name_list([*missing, *unused])}). Choose another method."
        )
    return state


def _name_in_model(name: str, first: int) -> str:
    """A parameter of `MtpModel` as if its layers stood behind the model's."""
    _, number, rest = name.split(".", 2)
    return f"model.layers.{first + int(number)}.{rest.removeprefix('mtp_block.')}"


class _SourceFinder:
    """Finds parameters' tensors in a file.

    Attributes:
        shapes: of the model's parameters and stored buffers.
    """

    def __init__(self, file: GGUFFile, shapes: dict[str, tuple[int, ...]], num_layers: int) -> None:
        self._file, self._family, self.shapes = file, family_of(file), shapes
        archs = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
        self._names = gguf.get_tensor_name_map(archs[0], num_layers)

    def find(self, name: str) -> Source | None:
        """A parameter's source; None if the file has none."""
        for pattern, (tensors, rule) in self._family.parameters.items():
            match = re.fullmatch(pattern, name)
            if match and (source := self._source(tensors, match, rule)):
                return source
        if source := self._by_published_name(name):
            return source
        for pattern, tensors in _OTHER_NAMES.items():
            if match := re.fullmatch(pattern, name):
                rule = None
                if len(tensors) > 1:
                    rule = JOINED_EXPERTS if "experts" in name else JOINED_ROWS
                return self._source(tensors, match, rule)
        return None

    def _source(
        self, tensors: tuple[str, ...], match: re.Match[str], rule: ValueRule | None
    ) -> Source | None:
        layer = re.search(r"\.(\d+)\.", match.string)
        number = layer[1] if layer else ""
        names = tuple(match.expand(name.format(number)) for name in tensors)
        if all(name in self._file.entries for name in names):
            return Source(names, self._rule(names[0]) if rule is None else rule)
        fused = _FUSED.get(tensors[0], "").format(number)
        return Source((fused,), None) if fused in self._file.entries else None

    def _by_published_name(self, name: str) -> Source | None:
        """A parameter that the `gguf` package knows by the name in published checkpoints."""
        stem, _, suffix = name.rpartition(".")
        whole, base = self._names.get_name(name), self._names.get_name(stem)
        names = (whole, f"{whole}.weight", f"{base}.{suffix}")
        for tensor in names:
            if tensor in self._file.entries:
                return Source((str(tensor),), self._rule(str(tensor)))
        return self._part_of_qkv(name, base, suffix)

    def _rule(self, tensor: str) -> ValueRule | None:
        short_name = re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", tensor)
        values = self._family.values
        is_norm = short_name.endswith("norm") and tensor.endswith(".weight")
        return values.get(short_name, values.get(ANY_NORM) if is_norm else None)

    def _part_of_qkv(self, name: str, base: str | None, suffix: str) -> Source | None:
        """Queries, keys or values that a file joins into one tensor."""
        match = re.fullmatch(r"(blk\.\d+\.)attn_([qkv])", base or "")
        joined = f"{match[1]}attn_qkv.{suffix}" if match else ""
        if match is None or joined not in self._file.entries:
            return None
        part = _QKV.index(match[2])
        siblings = [re.sub(r"[qkv](_proj\.\w+)$", rf"{kind}\1", name) for kind in _QKV]
        begin = sum(self.shapes[sibling][0] for sibling in siblings[:part])
        rows = rows_between(begin, begin + self.shapes[name][0])
        return Source((joined,), then(rows, self._rule(str(base))))


def read_values(file: GGUFFile, source: Source, config: Any, shape: tuple[int, ...]) -> Tensor:
    """A parameter's values in float32.

    Raises TargetError: they have another shape than the config says.
    """
    arrays: list[Array] = [file.floats(name) for name in source.tensors]
    values = arrays[0] if source.rule is None else source.rule.convert(config, *arrays)
    without_ones = [tuple(size for size in one if size != 1) for one in (values.shape, shape)]
    if without_ones[0] != without_ones[1]:
        sizes = "×".join(map(str, values.shape))
        wanted = "×".join(map(str, shape))
        raise TargetError(
            f"{file.path}: {name_list(source.tensors)} is {sizes}, but by the file's fields it "
            f"must be {wanted}. Give an undamaged file."
        )
    return torch.from_numpy(np.ascontiguousarray(values.reshape(shape)))


class LazyValues:
    """A parameter's values, read when transformers takes them by `[...]`, from any thread."""

    def __init__(self, file: GGUFFile, source: Source, config: Any, shape: tuple[int, ...]) -> None:
        self._read = functools.partial(read_values, file, source, config, shape)
        self._lock = file.lock

    def __getitem__(self, index: Any) -> Tensor:
        with self._lock:
            return self._read()


def lazy_state_dict(model: transformers.PreTrainedModel, file: GGUFFile) -> dict[str, Any]:
    """A model's state dict of a file, for `from_pretrained`; raises as `find_sources`."""
    sources, config = find_sources(model, file), model.config.get_text_config()
    shapes = dict(model.named_parameters(remove_duplicate=False)) | stored_buffers(model)
    return {
        name: LazyValues(file, source, config, tuple(shapes[name].shape))
        for name, source in sources.items()
    }


def divide_frequencies(model: transformers.PreTrainedModel, file: GGUFFile) -> None:
    """Divide the rotary frequencies by the file's divisors, if it has them.

    Raises TargetError: there are not as many frequencies.
    """
    if DIVISORS not in file.entries:
        return
    divisors, found = torch.from_numpy(file.floats(DIVISORS)), False
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq") and frequencies.shape == divisors.shape:
            frequencies.div_(divisors.to(frequencies.device))
            found = True
    if not found:
        raise TargetError(
            f"{file.path} has {len(divisors)} divisors of rotary frequencies, and the model not as "
            "many frequencies. Choose another file of this model."
        )
