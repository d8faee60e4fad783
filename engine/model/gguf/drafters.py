"""GGUF files that are no models but drafters of one: EAGLE-3 heads, DFlash models, MTP layers.

Their tensors get the names of published checkpoints, and their fields those of a config.json, so
that drafters read them as any other checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import DrafterError, SourceError
from engine.model.files import READ_ERRORS, name_list
from engine.model.gguf.architectures import QK
from engine.model.gguf.config import read_fields
from engine.model.gguf.families import Family, num_layers, sets
from engine.model.gguf.file import GGML_TYPES, GGUFFile
from engine.model.gguf.positions import DIVISORS
from engine.safe_text import visible

ID_MAP = "d2t"
"""Target ids of the drafted tokens in a file; in a published checkpoint, less their own ids."""
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
_LAYER_STEMS = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_STEMS = {"output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens", "fc": "fc"}
"""Names without their suffixes in files and in published checkpoints."""
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


def _windows(value: Any, file: GGUFFile) -> dict[str, Any]:
    """Where all layers have windows, the config says `use_swa`, and none is causal for that."""
    if all(value):
        return {"use_swa": True}
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in value]}


def _embedding_scale(value: Any, file: GGUFFile) -> dict[str, Any]:
    """Gemma's embedding scales its rows itself."""
    is_gemma_s = math.isclose(value**2, file.fields.get("embedding_length", 0), rel_tol=1e-4)
    return {} if is_gemma_s else {"input_embedding_scale": value}


def _sections(value: Any, file: GGUFFile) -> dict[str, Any]:
    """A text has one position, so a single section is all of a head."""
    return {"mrope_section": value} if any(value[1:]) else {}


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What a file is that drafts for a target.

    Attributes:
        title: with its article, for sentences.
        method: `decoding_type` of the method that reads it; None = none reads the file.
        family: how its fields and values are read.
        stems: names of its tensors outside its layers, without their suffixes.
        instead: what to do where none reads it.
        when: whether a file of the architecture is of this kind; the first one that is.
    """

    title: str
    method: str | None = None
    family: Family = Family("llama")
    stems: Mapping[str, str] = field(default_factory=dict)
    instead: str = "Give the drafter as the folder that its publisher offers."
    when: Callable[[GGUFFile], bool] = lambda file: True


_EAGLE3 = DrafterKind(
    "an EAGLE-3 drafter",
    "Eagle3",
    Family(
        "llama",
        fields={
            "vocab_size": sets("vocab_size"),
            "target_layers": sets("eagle_aux_hidden_state_layer_ids"),
            "target_hidden_size": sets("target_hidden_size"),
            "norm_before_residual": sets("norm_before_residual"),
            "norm_before_fc": sets("norm_before_fc"),
        },
        values=QK,
    ),
    _STEMS | {"enc.output_norm": "input_norm"},
)
_DFLASH = DrafterKind(
    "a DFlash drafter",
    "DFlash",
    Family(
        "qwen3",
        fields={
            "attention.causal": sets("is_causal"),
            "attention.sliding_window_pattern": _windows,
            "attention.value_scale": sets("attention_value_scale"),
            "block_size": sets("block_size"),
            "embedding_scale": _embedding_scale,
            "final_logit_softcapping": sets("final_logit_softcapping"),
            "has_confidence_head": None,
            "hidden_act": sets("hidden_act"),
            "logit_scale": sets("output_multiplier"),
            "rope.dimension_sections": _sections,
            "sample_from_anchor": sets("sample_from_anchor"),
            "target_layers": lambda value, file: {"target_layer_ids": [i - 1 for i in value]},
        },
        derive=lambda file, settings: {"mask_token_id": file.metadata.get(MASK_TOKEN)},
    ),
    _STEMS | {"enc.output_norm": "hidden_norm"},
)
_DSPARK = replace(
    _DFLASH,
    title="a DSpark drafter",
    method="DSpark",
    stems={
        **_DFLASH.stems,
        "markov_w1": "markov_head.markov_w1",
        "markov_w2": "markov_head.markov_w2",
        "conf_proj": "confidence_head.proj",
    },
    when=lambda file: "markov_w1.weight" in file.entries,
)
KINDS: dict[str, tuple[DrafterKind, ...]] = {
    "eagle3": (_EAGLE3,),
    "dflash": (
        DrafterKind(
            "a DFlash-2 drafter, with grouped convolutions and a selector",
            instead="Choose another drafter.",
            when=lambda file: any(name.startswith("selector_") for name in file.entries),
        ),
        DrafterKind(
            "a DSpark drafter with DeepSeek V4's layers",
            instead="Choose another drafter.",
            when=lambda file: bool(file.fields.get("hyper_connection.count")),
        ),
        _DSPARK,
        _DFLASH,
    ),
    "gemma4-assistant": (DrafterKind("an assistant of Gemma 4"),),
}
"""By architecture."""
_MTP = DrafterKind("a file of multi-token prediction layers without their model")


def drafter_kind(file: GGUFFile) -> DrafterKind | None:
    """What a file is that drafts for a target; None of any other file."""
    count = num_layers(file)
    if count > 0 and not any(name.startswith("blk.0.") for name in file.entries):
        if f"blk.{count}.nextn.eh_proj.weight" in file.entries:
            return _MTP
    return next((kind for kind in KINDS.get(file.architecture, ()) if kind.when(file)), None)


def check_is_model(file: GGUFFile) -> None:
    """SourceError if a file is a drafter; it says of what kind."""
    kind = drafter_kind(file)
    if kind is not None:
        use = f"give this file to the method {kind.method}" if kind.method else kind.instead
        raise SourceError(
            f"{file.path} is {_named(kind, file)}, not a target. Choose the model that it drafts "
            f"for{f', and {use}.' if kind.method else f'. {use}'}"
        )


def target_width(file: GGUFFile) -> object:
    """The hidden size of a drafter's target; None where it is not told."""
    return file.fields.get("target_hidden_size", file.fields.get("embedding_length"))


def read_drafter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter's settings as in a config.json, and its tensors by their published names.

    Raises:
        SourceError: it is not a GGUF file, or a field or a tensor is not read.
        DrafterError: it is no drafter, or of a kind that is not read.
    """
    file = GGUFFile(path)
    kind, names = _readable(file)
    settings = read_fields(file, kind.family)
    config = SimpleNamespace(**settings)
    if DIVISORS in file.entries:
        divisors = file.floats(DIVISORS).reshape(-1).tolist()
        settings["rope_parameters"] = settings["rope_parameters"] | {"divisors": divisors}
    return settings, {own: _values(file, kind, name, config) for name, own in names.items()}


def drafter_names(path: Path) -> tuple[str, ...]:
    """Published names of a drafter's tensors; raises as `read_drafter`."""
    return tuple(_readable(GGUFFile(path))[1].values())


def _readable(file: GGUFFile) -> tuple[DrafterKind, dict[str, str]]:
    """The file's kind, and the published name of each tensor but the positions'."""
    kind = drafter_kind(file)
    if kind is None:
        raise DrafterError(
            f"{file.path} is a model of the architecture {visible(file.architecture)[:80]}, not "
            "the weights of a drafting network. Use it with Draft_Target."
        )
    if kind.method is None:
        raise DrafterError(
            f"{file.path} is {_named(kind, file)}, which is not read from a GGUF file. "
            f"{kind.instead}"
        )
    names = {name: _published(name, kind) for name in file.entries if name != DIVISORS}
    unknown = [name for name, own in names.items() if own is None]
    if unknown:
        raise DrafterError(
            f"{file.path} is {_named(kind, file)} and has {name_list(unknown)}, which no such "
            "drafter has. Choose another file of it."
        )
    return kind, {name: own for name, own in names.items() if own is not None}


def _named(kind: DrafterKind, file: GGUFFile) -> str:
    name = file.metadata.get("general.name")
    return f"{kind.title} ({visible(name)[:80]})" if isinstance(name, str) else kind.title


def _published(name: str, kind: DrafterKind) -> str | None:
    if name == ID_MAP:
        return name
    stem, _, suffix = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        own = _LAYER_STEMS.get(layer[2])
        return own and f"layers.{layer[1]}.{own}.{suffix}"
    return f"{kind.stems[stem]}.{suffix}" if stem in kind.stems else None


def _values(file: GGUFFile, kind: DrafterKind, name: str, config: Any) -> Tensor:
    """A tensor's values, as in a published checkpoint."""
    ggml_type = GGML_TYPES[file.entries[name].type_id].name
    if name == ID_MAP and ggml_type == "I64":
        ids = torch.from_numpy(file.tensor(name).data.view(np.int64).reshape(-1))
        return ids - torch.arange(len(ids))
    try:
        rule = kind.family.values.get(name.split(".")[-2])
        values = file.floats(name)
        values = values if rule is None else rule.convert(config, values)
    except READ_ERRORS as error:
        raise DrafterError(f"{file.path}: {name} does not fit its fields.") from error
    dtype = _FLOATS.get(ggml_type, torch.float32)
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
