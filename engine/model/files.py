"""Reads and validates untrusted model files before anything is built from them.

Only regular files are opened. Declared sizes are checked against the file's size and against those
of models that exist, and a pickle yields nothing but tensors. Every fault is reported as one
sentence.
"""

from __future__ import annotations

import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine import safe_text
from engine.errors import SourceError, TargetError, first_line
from engine.model.forward import decoder_layers

READ_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError),
    *(RuntimeError, MemoryError, EOFError, AssertionError, struct.error, zipfile.BadZipFile),
    *(pickle.PickleError, SafetensorError, StrictDataclassError),
)
"""What torch, transformers and safetensors raise for missing, damaged or unknown files."""
MAX_JSON_BYTES = 16 << 20
PARAMETERS_PER_BYTE = 8
"""At most: no format has weights of less than one bit."""
_RANGES = {
    "num_hidden_layers num_layers n_layer n_layers block_count decoder_layers": (1, 1024),
    "num_kv_shared_layers loop_num_passes": (0, 1024),
    "num_attention_heads num_key_value_heads n_head n_heads": (1, 4096),
    "head_count head_count_kv": (0, 4096),
    "hidden_size d_model n_embd embedding_length word_embed_proj_dim": (1, 1 << 20),
    "intermediate_size ffn_dim n_inner": (1, 1 << 22),
    "feed_forward_length": (0, 1 << 22),
    "num_experts num_local_experts n_routed_experts expert_count": (0, 1 << 14),
    "num_mtp_layers num_nextn_predict_layers": (0, 1 << 14),
    "max_position_embeddings n_positions context_length attention_chunk_size": (1, 1 << 60),
    "head_dim": (0, 1 << 20),
    "num_labels": (0, 1 << 14),  # transformers names every one of them, twice
    "sliding_window": (-1, 1 << 60),
    "model_max_length": (1, 10**40),
    "vocab_size unpadded_vocab_size": (1, 1 << 24),
}
RANGES = {name: limits for names, limits in _RANGES.items() for name in names.split()}
"""Sizes in config.json and GGUF files, and their ranges: well beyond every existing model, small
enough to try, and never narrower than transformers' own checks."""
LIST_ALLOWED = {"num_attention_heads", "num_key_value_heads", "intermediate_size"}
LIST_ALLOWED |= {"head_count", "head_count_kv", "feed_forward_length", "num_hidden_layers"}
"""Sizes that may also be a list or mapping, of a size per layer."""
FACTORS = {"rope_theta", "factor", "logits_scaling", "logit_scale", "lm_head_multiplier"}
FACTORS |= {"logits_mup_width_multiplier"}
CAPS = {"final_logit_softcapping", "logits_soft_cap"}
"""Caps of logits; 0 is none."""
NAME_LISTS = {"architectures", "attention_layers", "layer_types", "mtp_layer_types"}
"""Settings that are lists of names."""
BOOLEANS = {"alibi", "use_sliding_window"}


# ---- files


def check_file(file: Path, *, max_bytes: int | None = None) -> int:
    """Size in bytes of a regular file.

    Raises SourceError: it is not one (a folder, a pipe, a device), or larger than `max_bytes`.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise SourceError(f"{file} could not be opened: {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{file} is not a regular file. Give a copy of the original.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise SourceError(f"{file} has {status.st_size} bytes; {max_bytes} are allowed.")
    return status.st_size


def read_json(file: Path) -> Any:
    """The plain data of a JSON file.

    Raises ConfigError, SourceError: it cannot be opened, is not JSON, or nests too deeply.
    """
    check_file(file, max_bytes=MAX_JSON_BYTES)
    return safe_text.read_json(file.read_bytes(), what=str(file))


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file; raises as `read_json`."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise SourceError(f"{file} must map names to settings, got {type(values).__name__}.")
    return values


def read_tensors(
    file: Path, keep: Callable[[str], bool] = lambda name: True, *, values: bool = True
) -> dict[str, Tensor]:
    """A weight file's tensors: safetensors, or a pickle of tensors and nothing else.

    Args:
        keep: whether to read a tensor, by its name.
        values: whether to read values; without them, only the names are meaningful.

    Raises SourceError: it is damaged, or contains anything else.
    """
    if file.suffix != ".safetensors":
        tensors = read_pickle(file, torch.device("cpu" if values else "meta"))
        _check_tensors(file, tensors, values=values)
        return {name: tensor for name, tensor in tensors.items() if keep(name)}
    check_file(file)
    try:
        with safe_open(file, framework="pt", backend="pread") as stored:
            names = filter(keep, stored.keys())
            empty = torch.empty(0, device="meta")
            return {name: stored.get_tensor(name) if values else empty for name in names}
    except READ_ERRORS as error:
        raise SourceError(f"{file} could not be read as tensors: {first_line(error)}.") from error


def read_pickle(file: Path, device: torch.device) -> Any:
    """The content of a `torch.save` file: tensors, numbers, strings and their collections.

    Raises SourceError: it is damaged, or would run code; torch's own message advises to allow that.
    """
    size = check_file(file)
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if sum(part.file_size for part in archive.infolist()) > size:
                    raise ValueError("torch.save compresses nothing")
        return torch.load(file, map_location=device, weights_only=True)
    except READ_ERRORS as error:
        raise SourceError(
            f"{file} is damaged, or holds more than tensors, and code in a file is never run. "
            "Copy it again, or use its .safetensors."
        ) from error


def _check_tensors(file: Path, tensors: Any, *, values: bool) -> None:
    """SourceError unless it is a dict of plain tensors, none larger than its storage."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise SourceError(f"{file} is not a plain dict of tensors.")
    for name, tensor in tensors.items():
        is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_plain = is_plain and not tensor.is_quantized and tensor.is_meta != values
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise SourceError(f"{file}: {safe_text.short(name)} is not a plain tensor with values.")


# ---- a model's folder


def check_folder(folder: Path) -> int | None:
    """Validate the files in a model's folder; return the bytes of its weights.

    None where no weight file has one of transformers' standard names.

    Raises ConfigError, SourceError: a file cannot be read, or is invalid.
    """
    settings = ("config.json", "generation_config.json", "tokenizer_config.json")
    for file in (folder / name for name in settings):
        if file.exists():
            check_sizes(read_settings(file), str(file))
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        check_file(tokenizer)
        with tokenizer.open("rb") as stream:
            # transformers will parse it; parsing it here, too, would double the time.
            if not stream.read(1000).lstrip().startswith(b"{"):
                raise SourceError(f"{tokenizer} is damaged: it holds no tokenizer.")
    files = _weight_files(folder)
    for file in files:
        read_tensors(file, values=False)
    return sum(file.stat().st_size for file in files) or None


def _weight_files(folder: Path) -> list[Path]:
    """Where transformers looks for weights, in its order; SourceError if an index is invalid."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            names = read_settings(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise SourceError(f"{index} must map tensors to files by weight_map.")
            for file in names.values():
                if not (isinstance(file, str) and Path(file).name == file):
                    raise SourceError(f"{index} names {safe_text.short(file)}, no file beside it.")
            return [folder / file for file in sorted(set(names.values()))]
    return []


def check_sizes(values: Mapping[str, Any], where: str, *, least: int | None = None) -> None:
    """Check a model's settings against `RANGES` and their types, nested settings included.

    Args:
        least: the smallest size allowed, 0 for parts that may be missing; None = as in `RANGES`.

    Raises SourceError: a setting has another type, or is out of range; it is named.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in {*RANGES, *NAME_LISTS, *BOOLEANS}:
            check_sizes(value, where, least=least if key == "text_config" else 0)
            continue
        rule = None if value is None else _violated_rule(key.rpartition(".")[2], value, least)
        if rule is not None:
            raise SourceError(f"{where}: {key} must be {rule}, got {safe_text.short(value)}.")


def _violated_rule(key: str, value: Any, least: int | None) -> str | None:
    """What a setting must be, if it is not; None if it is valid."""
    if key in RANGES:
        low, high = RANGES[key]
        items = value.values() if isinstance(value, Mapping) else value
        is_list = key in LIST_ALLOWED and isinstance(value, list | Mapping)
        low = min(low, 0 if is_list or least is not None else low)
        ok = all(_is_int(item, low, high) for item in (items if is_list else [value]))
        return None if ok and value not in ([], {}) else f"a number in [{low}, {high}]"
    if key in NAME_LISTS:
        ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return None if ok else "a list of names"
    if key in BOOLEANS:
        return None if isinstance(value, bool) else "true or false"
    if key in ("dtype", "torch_dtype"):
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
        return None if is_dtype else "the name of a dtype"
    if key == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        ok = all(_is_int(token_id, -1, (1 << 31) - 1) for token_id in ids)
        return None if ok else "a token id, or a list of them"
    if key in FACTORS:
        ok = isinstance(value, int | float) and 0 < value < float("inf")
        return None if ok else "a number above 0"
    if key in CAPS:
        ok = isinstance(value, int | float) and 0 <= value < float("inf")
        return None if ok else "a number of at least 0"
    if key.endswith(("_eps", "_epsilon")):
        ok = isinstance(value, int | float) and 0 <= value <= 1
        return None if ok else "a number in [0, 1]"
    return None


def _is_int(value: Any, low: int, high: int) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool) and low <= value <= high


# ---- a loaded model


def check_complete(model: transformers.PreTrainedModel, info: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose tensors do not match those of its checkpoint one to one.

    transformers initialises missing tensors randomly and skips those that the config has no place
    for; either model still generates plausible text. Tied weights may be missing.

    Args:
        info: `from_pretrained`'s loading info.

    Raises TargetError: naming the tensors.
    """
    kind = model.config.get_text_config().model_type
    advice = f"Give a complete checkpoint of this model ({kind}), with its own config.json."
    missing = info["missing_keys"]
    if missing:
        raise TargetError(f"{name} lacks {name_list(missing)}. {advice}")
    if info["mismatched_keys"]:
        tensor, *shapes = min(info["mismatched_keys"], key=lambda entry: str(entry[0]))
        got, want = ("×".join(map(str, shape)) for shape in shapes)
        raise TargetError(
            f"{name}: {tensor} is {got}, but by its config it must be {want}. {advice}"
        )
    unused = [tensor for tensor in info["unexpected_keys"] if _is_required(model, tensor)]
    if unused:
        raise TargetError(f"{name} has {name_list(unused)}, which its config leaves out. {advice}")


def _is_required(model: transformers.PreTrainedModel, tensor: str) -> bool:
    """Whether a tensor that was not loaded is part of the language model.

    Weights of its modules are, and further decoder layers; additional heads are not, nor are the
    layers for multi-token prediction that follow its own.
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
    mtp = (getattr(config, key, 0) for key in ("num_mtp_layers", "num_nextn_predict_layers"))
    return numbered is not None and int(numbered[1]) >= len(layers) + max(n or 0 for n in mtp)


def name_list(names: Collection[str], most: int = 4) -> str:
    """The first few names, and the number of others."""
    first: Iterable[str] = (name[:100] for name in sorted(names)[:most])
    more = len(names) - most
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
