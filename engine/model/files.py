"""Model files, whoever made them: opened and checked here, before anything is built from them.

Only plain files are opened. What a file declares is held against its size and against the sizes of
models that exist, and nothing but tensors comes out of a pickle. Whatever is wrong with a file is
one sentence.
"""

from __future__ import annotations

import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine import safe_text
from engine.errors import SourceError, TargetError, first_line
from engine.model.forward import decoder_layers

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError),
    *(RuntimeError, MemoryError, EOFError, AssertionError, struct.error, zipfile.BadZipFile),
    *(pickle.PickleError, SafetensorError, StrictDataclassError),
)
"""What torch, transformers and safetensors raise over missing, damaged or unknown files."""
MAX_JSON_BYTES = 16 << 20
PARAMETERS_PER_BYTE = 8
"""Weights of one bit each are the smallest there are."""
_LAYERS, _HEADS, _WIDTH, _INNER = (1, 1024), (1, 4096), (1, 1 << 20), (1, 1 << 22)
_EXPERTS, _LENGTH = (0, 1 << 14), (1, 1 << 60)
RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("block_count", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), _HEADS),
    **dict.fromkeys(("head_count", "head_count_kv"), _HEADS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_length"), _WIDTH),
    **dict.fromkeys(("num_kv_shared_layers", "loop_num_passes"), (0, 1024)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "feed_forward_length"), _INNER),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("expert_count", "num_mtp_layers", "num_nextn_predict_layers"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), _LENGTH),
    "attention_chunk_size": _LENGTH,
    "head_dim": (0, 1 << 20),
    "sliding_window": (-1, 1 << 60),
    "unpadded_vocab_size": (1, 1 << 24),
    "model_max_length": (1, 10**40),
    "vocab_size": (1, 1 << 24),
    "num_labels": (0, 1 << 20),
}
"""Sizes of models as config.json and GGUF files name them, and between what they may lie: well
beyond every model that there is, small enough to try, and never narrower than transformers."""
PER_LAYER = {"num_attention_heads", "num_key_value_heads", "intermediate_size"}
PER_LAYER |= {"head_count", "head_count_kv", "feed_forward_length", "num_hidden_layers"}
"""Sizes that may also be a list, or a mapping."""
NAMES = {"architectures", "attention_layers", "layer_types", "mtp_layer_types"}
"""Settings that are lists of names."""
SWITCHES = {"alibi", "use_sliding_window"}


# ---- files


def check_file(file: Path, *, most_bytes: int | None = None) -> int:
    """Size of a plain file.

    Raises SourceError: it is none (a folder, a pipe, a device), or larger than `most_bytes`.
    """
    try:
        about = file.stat()
    except OSError as error:
        raise SourceError(f"{file} could not be opened: {error.strerror}.") from error
    if not stat.S_ISREG(about.st_mode):
        raise SourceError(f"{file} is not a regular file. Give a copy of the original.")
    if most_bytes is not None and about.st_size > most_bytes:
        raise SourceError(f"{file} has {about.st_size} bytes; {most_bytes} are allowed.")
    return about.st_size


def read_json(file: Path) -> Any:
    """Plain data of a JSON file.

    Raises ConfigError, SourceError: it cannot be opened, is no JSON, or is nested too deeply.
    """
    check_file(file, most_bytes=MAX_JSON_BYTES)
    return safe_text.read_json(file.read_bytes(), what=str(file))


def read_settings(file: Path) -> dict[str, Any]:
    """The settings that a JSON file maps names to; raises as `read_json`."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise SourceError(f"{file} must map names to settings, got {type(values).__name__}.")
    return values


def read_tensors(
    file: Path, keep: Callable[[str], bool] = lambda name: True, *, values: bool = True
) -> dict[str, Tensor]:
    """A weight file's tensors: safetensors, or a pickle of tensors and nothing else.

    Args:
        keep: which to read, by name.
        values: whether their values are wanted; without, only the names mean anything.

    Raises SourceError: it is damaged, or holds anything else.
    """
    if file.suffix != ".safetensors":
        tensors = read_pickle(file, torch.device("cpu" if values else "meta"))
        _check_tensors(file, tensors, values=values)
        return {name: tensor for name, tensor in tensors.items() if keep(name)}
    check_file(file)
    try:
        with safe_open(file, framework="pt") as stored:
            names = filter(keep, stored.keys())
            nothing = torch.empty(0, device="meta")
            return {name: stored.get_tensor(name) if values else nothing for name in names}
    except UNREADABLE as error:
        raise SourceError(f"{file} could not be read as tensors: {first_line(error)}.") from error


def read_pickle(file: Path, device: torch.device) -> Any:
    """What a file of `torch.save` holds: tensors, numbers, texts and their collections.

    Raises SourceError: it is damaged, or would run code; torch's own messages advise to let it.
    """
    size = check_file(file)
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if sum(part.file_size for part in archive.infolist()) > size:
                    raise ValueError("torch.save compresses nothing")
        return torch.load(file, map_location=device, weights_only=True)
    except UNREADABLE as error:
        raise SourceError(
            f"{file} is damaged, or holds more than tensors, and code in a file is never run. "
            "Copy it again, or use its .safetensors."
        ) from error


def _check_tensors(file: Path, tensors: Any, *, values: bool) -> None:
    """SourceError unless it is a dict of plain tensors, each as large as its storage at most."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise SourceError(f"{file} is not a plain dict of tensors.")
    for name, tensor in tensors.items():
        is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_plain = is_plain and not tensor.is_quantized and tensor.is_meta != values
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise SourceError(f"{file}: {safe_text.short(name)} is not a plain tensor with values.")


# ---- a model's folder


def check_folder(folder: Path) -> int | None:
    """Bytes of the weights in a model's folder, whose files could be read and make sense so far.

    None where transformers finds weights by other names than its own.

    Raises ConfigError, SourceError: one could not.
    """
    settings = ("config.json", "generation_config.json", "tokenizer_config.json")
    for file in (folder / name for name in settings):
        if file.exists():
            check_sizes(read_settings(file), str(file))
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        check_file(tokenizer)
        with tokenizer.open("rb") as stream:
            # transformers reads the whole of it; to do so here would take as long again.
            if not stream.read(1000).lstrip().startswith(b"{"):
                raise SourceError(f"{tokenizer} is damaged: it holds no tokenizer.")
    files = _weight_files(folder)
    for file in files:
        read_tensors(file, values=False)
    return sum(file.stat().st_size for file in files) or None


def _weight_files(folder: Path) -> list[Path]:
    """Where transformers looks for weights, in its order; SourceError for a damaged index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            names = read_settings(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise SourceError(f"{index} must map tensors to files by weight_map.")
            for one in names.values():
                if not (isinstance(one, str) and Path(one).name == one):
                    raise SourceError(f"{index} names {safe_text.short(one)}, no file beside it.")
            return [folder / one for one in sorted(set(names.values()))]
    return []


def check_sizes(values: Mapping[str, Any], where: str, *, least: int | None = None) -> None:
    """Hold a model's settings against what models can have, nested settings included.

    Args:
        least: the least a size may be; None = as `RANGES` says. Parts of a model may be missing.

    Raises SourceError: one is of another kind, or out of its range; it is named.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in {*RANGES, *NAMES, *SWITCHES}:
            check_sizes(value, where, least=least if key == "text_config" else 0)
            continue
        fault = None if value is None else _fault(key.rpartition(".")[2], value, least)
        if fault is not None:
            raise SourceError(f"{where}: {key} must be {fault}, got {safe_text.short(value)}.")


def _fault(key: str, value: Any, least: int | None) -> str | None:
    """What a setting would have to be; None if there is nothing against it."""
    if key in RANGES:
        low, most = RANGES[key]
        parts = value.values() if isinstance(value, Mapping) else value
        several = key in PER_LAYER and isinstance(value, list | Mapping)
        low = min(low, 0 if several or least is not None else low)
        ok = all(_is_int(one, low, most) for one in (parts if several else [value]))
        return None if ok and value not in ([], {}) else f"a number in [{low}, {most}]"
    if key in NAMES:
        ok = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return None if ok else "a list of names"
    if key in SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if key in ("dtype", "torch_dtype"):
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        known = isinstance(getattr(torch, name, None), torch.dtype)
        return None if known else "the name of a dtype"
    if key == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        ok = all(_is_int(one, -1, (1 << 31) - 1) for one in ids)
        return None if ok else "a token id, or a list of them"
    if key in ("rope_theta", "factor"):
        ok = isinstance(value, int | float) and 0 < value < float("inf")
        return None if ok else "a number above 0"
    if key.endswith(("_eps", "_epsilon")):
        ok = isinstance(value, int | float) and 0 <= value <= 1
        return None if ok else "a number in [0, 1]"
    return None


def _is_int(value: Any, least: int, most: int) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and least <= value <= most


# ---- a model that was read


def check_complete(model: PreTrainedModel, info: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose tensors are not those of its checkpoint, one for one.

    transformers fills up with random numbers what a checkpoint lacks, and leaves out what a config
    has no place for; both write texts that look like some model's. Tied weights may be missing.

    Args:
        info: what `from_pretrained` found out about its tensors.

    Raises TargetError: naming the tensors.
    """
    kind = model.config.get_text_config().model_type
    advice = f"Give a complete checkpoint of this model ({kind}), with its own config.json."
    missing = info["missing_keys"]
    if missing:
        raise TargetError(f"{name} lacks {listed(missing)}. {advice}")
    if info["mismatched_keys"]:
        tensor, *shapes = min(info["mismatched_keys"], key=lambda one: str(one[0]))
        got, want = ("×".join(map(str, shape)) for shape in shapes)
        raise TargetError(
            f"{name}: {tensor} is {got}, but by its config it must be {want}. {advice}"
        )
    left = [tensor for tensor in info["unexpected_keys"] if _belongs(model, tensor)]
    if left:
        raise TargetError(f"{name} has {listed(left)}, which its config leaves out. {advice}")


def _belongs(model: PreTrainedModel, tensor: str) -> bool:
    """Whether a tensor that found no place is part of what the model computes.

    Weights of modules that it has are, and layers after its last one; heads beside it are not, nor
    are layers for multi-token prediction, which come after its own.
    """
    owner, _, kind = tensor.rpartition(".")
    modules = dict(model.named_modules())
    if kind in ("weight", "bias") and isinstance(
        getattr(modules.get(owner), "weight", None), nn.Parameter
    ):
        return True
    layers, config = decoder_layers(model), model.config.get_text_config()
    path = next((name for name, module in modules.items() if module is layers), "no layers")
    numbered = re.match(rf"{re.escape(path)}\.(\d+)\.", tensor)
    further = (getattr(config, key, 0) for key in ("num_mtp_layers", "num_nextn_predict_layers"))
    return numbered is not None and int(numbered[1]) >= len(layers) + max(n or 0 for n in further)


def check_parameters(count: int, num_bytes: int | None, name: str) -> None:
    """TargetError if a config describes more parameters than so many bytes of weights can hold."""
    if num_bytes is not None and count > PARAMETERS_PER_BYTE * num_bytes:
        raise TargetError(
            f"{name}'s config describes {count:,} parameters, but its weights have {num_bytes:,} "
            "bytes. Give a complete checkpoint, with its own config.json."
        )


def listed(names: Collection[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    first: Iterable[str] = (name[:100] for name in sorted(names)[:most])
    more = len(names) - most
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
