"""Damaged and hostile model files, as data: valid tiny ones, and what is done to each."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.drafters.blocks.dflash import BlockShape, DFlashModel
from engine.drafters.heads.layer import HeadSpec
from engine.model.target import Target
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.drafters.eagle_heads import config_of, layer_tensors, write
from tests.models import save_tiny, tiny_model

Damage = Callable[[Path], None]
MISSING = object()


@dataclass(frozen=True, slots=True)
class Case:
    """One damage to a copy of a valid folder.

    Attributes:
        base: which folder, as `BASES` names them.
        another: what is left may be another valid model, whose text is its own.
        refused: what is left must not load, even if it writes the same text.
    """

    base: str
    name: str
    damage: Damage
    another: bool = False
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.base}: {self.name}"


# ---- valid files


def save_target(folder: Path, **settings: Any) -> None:
    save_tiny(folder, **settings)


def save_bin(folder: Path) -> None:
    save_tiny(folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def save_gguf(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "tiny.gguf")


def random(*shape: int, scale: float = 0.2) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def save_heads(folder: Path, target: Target) -> None:
    """Medusa: two heads with an output matrix each."""
    size, vocab = target.hidden_size, target.vocab_size
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = random(size, size)
        tensors[f"{head}.0.linear.bias"] = random(size)
        tensors[f"{head}.1.weight"] = random(vocab, size)
    write(folder, tensors, {"medusa_num_heads": 2})


def save_heads_as_pickle(folder: Path, target: Target) -> None:
    save_heads(folder, target)
    torch.save(load_file(folder / "m.safetensors"), folder / "medusa_lm_head.pt")
    (folder / "m.safetensors").unlink()


def save_recurrent(folder: Path, target: Target) -> None:
    """ReDrafter with all parts."""
    size, vocab = target.hidden_size, target.vocab_size
    tensors = {
        "rnn_w.weight": random(size, size),
        "rnn_u.weight": random(size, size),
        "rnn_u.bias": random(size),
        "input_proj.weight": random(size, 2 * size),
        "input_proj.bias": random(size),
        "lm_head.0.linear.weight": random(size, size),
        "lm_head.0.linear.bias": random(size),
        "lm_head.1.weight": random(vocab, size),
    }
    write(folder, tensors, {"rnn": True})


def save_eagle(folder: Path, target: Target) -> None:
    size = target.hidden_size
    tensors = layer_tensors(size, size, "layers.0") | {"fc.weight": random(size, 2 * size)}
    write(folder, tensors, config_of(target, bias=False))


def save_eagle3(folder: Path, target: Target) -> None:
    size, kept = target.hidden_size, torch.arange(0, 200, 2)
    tensors = layer_tensors(size, 2 * size, "midlayer") | {
        "fc.weight": random(size, 3 * size),
        "lm_head.weight": random(len(kept), size),
        "norm.weight": torch.ones(size),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "d2t": kept - torch.arange(len(kept)),
    }
    more = {"draft_vocab_size": len(kept)}
    listed = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    write(folder, tensors, config_of(target, eagle_config=listed, **more))


def save_dflash(folder: Path, target: Target) -> None:
    size = target.hidden_size
    spec = HeadSpec(size, 24, 4, 2, size // 4, 1e-5)
    tensors = {
        "fc.weight": random(size, 2 * size),
        "hidden_norm.weight": torch.ones(size),
        "norm.weight": torch.ones(size),
        "layers.0.input_layernorm.weight": torch.ones(size),
        **layer_tensors(size, size, "layers.0"),
    }
    assert len(DFlashModel(BlockShape(spec, 2, (None,))).layers) == 1
    config = config_of(target, num_hidden_layers=1, block_size=4)
    config |= {"dflash_config": {"mask_token_id": 11, "target_layer_ids": [0, 1]}}
    write(folder, tensors, config)


CORPUS = {"token_dtype": "<u2", "target": "tiny", "weights": None}
LENGTH = 40


def save_corpus(folder: Path, target: Target) -> None:
    """Three dialogues in one shard."""
    folder.mkdir(parents=True)
    sizes = {name: getattr(target, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    (folder / "corpus.json").write_text(json.dumps(CORPUS | sizes))
    ids = np.random.default_rng(0).integers(0, target.vocab_size, 3 * LENGTH)
    ids.astype("<u2").tofile(folder / "shard-00000.bin")
    lines = [
        {"n": n, "category": "qa", "start": n * LENGTH, "length": LENGTH, "answers": [[9, LENGTH]]}
        for n in range(3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "shard-00000.jsonl").write_text(text)


TARGETS: dict[str, Callable[[Path], None]] = {
    "target": save_target,
    "bin": save_bin,
    "gguf": save_gguf,
}
DRAFTERS: dict[str, tuple[dict[str, Any], Callable[[Path, Target], None]]] = {
    "Medusa": ({"medusa_choices": ((0,), (0, 0))}, save_heads),
    "Medusa as a pickle": ({"medusa_choices": ((0,), (0, 0))}, save_heads_as_pickle),
    "ReDrafter": ({"beam_width": 2, "beam_length": 3}, save_recurrent),
    "Eagle": ({"eagle_choices": ((0,), (0, 0))}, save_eagle),
    "Eagle3": ({"max_draft_len": 2}, save_eagle3),
    "DFlash": ({}, save_dflash),
    "Draft_Target": ({}, lambda folder, target: save_target(folder, seed=1)),
    "Suffix": ({}, save_corpus),
}
"""Per method: settings, and what writes its files. `Draft_Target` and `Suffix` name theirs
otherwise."""


# ---- what is done to them


def rewrite(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def change(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes())) and None


def setting(name: str, key: str, value: Any) -> Damage:
    """A key of a JSON file, dots between its levels."""

    def edit(data: bytes) -> bytes:
        values = json.loads(data)
        *path, last = key.split(".")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {})
        if value is MISSING:
            inner.pop(last, None)
        else:
            inner[last] = value
        return json.dumps(values).encode()

    return change(name, edit)


def tensors(edit: Callable[[dict[str, Tensor]], Mapping[str, Any]], name: str = "") -> Damage:
    """Another set of tensors in the weight file of a folder."""

    def damage(folder: Path) -> None:
        file = next(f for f in sorted(folder.iterdir()) if f.suffix in (".safetensors", ".bin"))
        if file.suffix == ".bin":
            torch.save(dict(edit(torch.load(file))), file)
        else:
            save_file(dict(edit(load_file(file))), file, metadata={"format": "pt"})

    return damage


def without(*names: str) -> Damage:
    return tensors(lambda found: {k: v for k, v in found.items() if k not in names})


def reshaped(name: str) -> Damage:
    return tensors(lambda found: {**found, name: found[name].flatten()[:-1].clone()})


def as_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def linked(name: str, to: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return damage


def as_pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


JSON_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a list of lists": b"[[1, 2], [3]]",
    "a number": b"7",
    "a text": b'"model"',
    "deep lists": b"[" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "deep and closed": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deep within": b'{"model_type": "llama", "x": ' + b"[" * 600 + b"]" * 600 + b"}",
    "no utf-8": b"\xff\xfe{\x00}\x00",
    "zeros": bytes(1000),
    "5,000 digits": b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"model_type": "\\ud800"}',
    "spaces by the million": b" " * (20 << 20),
    "a terminal's commands": b'{"model_type": "\\u001b[2J\\u0007\\r\\n"}',
}


def json_cases(base: str, name: str, names: Mapping[str, bytes] = JSON_TEXTS) -> Iterator[Case]:
    for what, text in names.items():
        yield Case(base, f"{name} is {what}", rewrite(name, text))
    yield Case(base, f"{name} is cut", change(name, lambda data: data[: len(data) // 2]))
    yield Case(base, f"{name} is a folder", as_folder(name))
    yield Case(base, f"{name} is a pipe", as_pipe(name))
    yield Case(base, f"{name} is endless", linked(name, "/dev/zero"))
    yield Case(base, f"{name} is a link to itself", linked(name, name))


ABSURD: tuple[Any, ...] = (0, -1, 10**6, 10**9, 10**18, "many", 2.5, [], {}, None, True)
CONFIG: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (*ABSURD, 2, 4, [3], "3"),
    "hidden_size": (*ABSURD, 33, 64),
    "num_attention_heads": (*ABSURD, 5, 3, 64),
    "num_key_value_heads": (*ABSURD, 3, 8),
    "head_dim": (*ABSURD, 7, 16),
    "intermediate_size": (*ABSURD, 47),
    "vocab_size": (*ABSURD, 287, 300),
    "max_position_embeddings": ABSURD,
    "num_labels": (10**9, "x"),
    "id2label": (5, [], {"a": 1}),
    "rms_norm_eps": ("x", [], float("nan"), float("inf"), 10**400),
    "rope_parameters": (
        *(5, [], "x", {"rope_type": "nonsense"}, {"rope_type": "yarn"}, {"rope_theta": 0}),
        *({"rope_theta": "x"}, {"rope_type": 5}, {"rope_type": "linear", "factor": "x"}),
        *({"rope_type": "linear", "factor": 0}, {"rope_type": "llama3", "factor": 8}),
        {"rope_type": "longrope", "short_factor": [1], "long_factor": [1], "rope_theta": 1e4},
    ),
    "hidden_act": ("nonsense", 5, [], None, {}),
    "dtype": ("nonsense", 5, [], {}, "int8", "complex64", "torch", "load", "__class__", "float64"),
    "torch_dtype": ("nonsense", 5, "Tensor", "uint8"),
    "model_type": ("gpt2", "qwen2", "qwen3", "opt", "phi", "gpt_neox", "gemma2", "t5", "bert")
    + ("nonsense", 5, [], {}, "", None, MISSING, "llama\x00", "../llama", "clip", "whisper"),
    "architectures": ("x", [], ["T5Model"], 5, [5], {}),
    "tie_word_embeddings": ("yes", 5, [], True),
    "layer_types": (["nonsense"] * 3, 5, "x", ["full_attention"] * 2, [5, 5, 5], {"a": 1}),
    "sliding_window": (0, -1, "x", [], 10**18),
    "attention_bias": (True, "x", 5),
    "mlp_bias": (True,),
    "quantization_config": ({}, "x", 5, [], {"quant_method": "nonsense"})
    + ({"quant_method": "gptq", "bits": 4}, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "eos_token_id": ("x", {"a": 1}, [[1]], -5, 10**9, [10**30], 2.5, [None]),
    "bos_token_id": ("x", [], 10**9),
    "pad_token_id": ("x", -1, 288, 10**9, []),
    "initializer_range": ("x", -1),
    "pretraining_tp": (0, -1, "x", 2),
    "attention_dropout": ("x", 2.0),
    "_attn_implementation": ("nonsense", 5),
    "attn_implementation": ("nonsense",),
    "auto_map": ({"AutoConfig": "own.Config"}, 5, "x"),
    "vision_config": ({"num_hidden_layers": 10**6}, {"hidden_size": "x"}, 5),
    "text_config": ({}, 5, {"model_type": "nonsense"}, {"model_type": "llama"}),
    "pruned_heads": ({"0": [1]}, "x", {"x": 1}),
    "is_encoder_decoder": (True,),
    "use_cache": ("x", False),
    "transformers_weights": ("../../etc/passwd", 5),
    "chunk_size_feed_forward": ("x", -1),
}
ANOTHER = {
    ("attention_bias", "x"),
    ("max_position_embeddings", 10**6),
    ("max_position_embeddings", 10**9),
    ("head_dim", None),
}
"""Settings that make another valid model of the same tensors."""


def bpe(vocab: dict[str, int] | None = None, merges: list[str] | None = None, **more: Any) -> bytes:
    words = {"a": 0} if vocab is None else vocab
    model = {"type": "BPE", "vocab": words, "merges": merges or []}
    return json.dumps({"version": "1.0", "model": model, **more}).encode()


TOKENIZER_TEXTS = {
    **{k: v for k, v in JSON_TEXTS.items() if k != "spaces by the million"},
    "no model": b'{"version": "1.0"}',
    "of an unknown model": b'{"version": "1.0", "model": {"type": "nonsense"}}',
    "without words": bpe(vocab={}),
    "a merge of nothing": bpe(merges=["b c"]),
    "an id beyond 32 bits": bpe(vocab={"a": 99999999999}),
    "a negative id": bpe(vocab={"a": -1}),
    "a wild regex": bpe(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a+)+$("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "an added token of no kind": bpe(added_tokens=[{"id": 0, "content": "", "special": True}]),
}
TEMPLATES: dict[str, str] = {
    "divides by zero": "{{ 1 / 0 }}",
    "is cut": "{% for m in messages %}",
    "asks for what is not there": "{{ nothing.at.all }}",
    "adds text and numbers": "{{ 'a' + 1 }}",
    "calls a number": "{{ 5() }}",
    "asks beyond the end": "{{ messages[99].content.x }}",
    "refuses": "{{ raise_exception('no\n\x1b[2Jthanks') }}",
    "reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "imports": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "counts for ever": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "counts far": "{% for i in range(10**9) %}x{% endfor %}",
    "calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "is nothing but brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "writes half a surrogate pair": "{{ '\\ud800' }}",
    "writes nothing": "",
}


def config_cases() -> Iterator[Case]:
    yield from json_cases("target", "config.json")
    for key, values in CONFIG.items():
        for value in values:
            said = "missing" if value is MISSING else json.dumps(value)
            another = any(key == k and value == v and type(value) is type(v) for k, v in ANOTHER)
            damage = setting("config.json", key, value)
            yield Case("target", f"{key} is {said:.60}", damage, another)
    for name in ("generation_config.json", "tokenizer_config.json"):
        yield from json_cases("target", name)
    for value in ("x", {"a": 1}, [[1]], 2.5, 10**30):
        damage = setting("generation_config.json", "eos_token_id", value)
        yield Case("target", f"generation_config's eos_token_id is {value}", damage)


def tokenizer_cases() -> Iterator[Case]:
    yield from json_cases("target", "tokenizer.json", TOKENIZER_TEXTS)
    for key in ("tokenizer_class", "eos_token", "model_max_length", "added_tokens_decoder"):
        for value in (5, [], {}, "nonsense", {"a": "b"}, None):
            damage = setting("tokenizer_config.json", key, value)
            yield Case("target", f"{key} is {value}", damage, another=key == "eos_token")
    for what, template in TEMPLATES.items():
        damage = rewrite("chat_template.jinja", template.encode())
        yield Case("target", f"its chat template {what}", damage, another=True)
    odd = rewrite("chat_template.jinja", b"\xff\xfe")
    yield Case("target", "its chat template is no utf-8", odd)
    yield Case("target", "its chat template is a folder", as_folder("chat_template.jinja"))


WEIGHTS = "model.safetensors"


def header(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another header of a safetensors file."""

    def change_header(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + size])
        text = edit(values)
        text = text if isinstance(text, bytes) else json.dumps(text or values).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return change(WEIGHTS, change_header)


def entry(**fields: Any) -> Damage:
    name = "model.norm.weight"
    return header(lambda values: {**values, name: {**values[name], **fields}})


def weight_cases() -> Iterator[Case]:
    names = tuple(tiny_model().state_dict())
    for name in names:
        yield Case("target", f"it lacks {name}", without(name), refused=True)
    for name in names[:4] + names[-2:]:
        yield Case("target", f"{name} has another shape", reshaped(name))
    yield Case("target", "it has no tensors", tensors(lambda found: {}))
    yield Case(
        "target", "all names are others", tensors(lambda f: {f"x.{k}": v for k, v in f.items()})
    )
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    damage = tensors(lambda f: f | extra)
    yield Case("target", "it has a bias that is not added", damage, refused=True)
    yield Case(
        "target",
        "it has a layer more",
        tensors(lambda f: f | {"model.layers.3.mlp.up_proj.weight": torch.ones(48, 32)}),
        refused=True,
    )
    for kind in (torch.int64, torch.bool, torch.complex64, torch.float64):
        yield Case(
            "target",
            f"a matrix is {kind}",
            tensors(lambda f, kind=kind: f | {"lm_head.weight": f["lm_head.weight"].to(kind)}),
            another=True,
        )
    for value in (float("nan"), float("inf"), float("-inf")):
        for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
            yield Case(
                "target",
                f"{name} is {value}",
                tensors(lambda f, n=name, v=value: f | {n: torch.full_like(f[n], v)}),
                refused=True,
            )
    for what, damage in {
        "empty": rewrite(WEIGHTS, b""),
        "eight bytes": rewrite(WEIGHTS, bytes(8)),
        "a header of 2^63 bytes": change(WEIGHTS, lambda d: struct.pack("<Q", 1 << 63) + d[8:]),
        "a header of 2^27 bytes": change(WEIGHTS, lambda d: struct.pack("<Q", 1 << 27) + d[8:]),
        "halved": change(WEIGHTS, lambda d: d[: len(d) // 2]),
        "one byte short": change(WEIGHTS, lambda d: d[:-1]),
        "one byte long": change(WEIGHTS, lambda d: d + b"\0"),
        "text": rewrite(WEIGHTS, b"no weights at all " * 100),
        "a pickle": lambda folder: torch.save({"a": torch.ones(2)}, folder / WEIGHTS),
        "a list for a header": header(lambda values: b"[]"),
        "a deep header": header(lambda values: b'{"a":' * 50_000),
        "a header with a deep value": header(
            lambda values: (
                b'{"x":' + b"[" * 9000 + b"]" * 9000 + b"," + json.dumps(values).encode()[1:]
            )
        ),
        "offsets that overlap": entry(data_offsets=[0, 128]),
        "offsets that go back": entry(data_offsets=[128, 0]),
        "offsets beyond the end": entry(data_offsets=[1 << 60, (1 << 60) + 128]),
        "a shape that overflows": entry(shape=[1 << 32, 1 << 32, 2]),
        "a negative shape": entry(shape=[-32]),
        "a shape of texts": entry(shape=["32"]),
        "a dtype that is not": entry(dtype="F7"),
        "a folder": as_folder(WEIGHTS),
        "a pipe": as_pipe(WEIGHTS),
        "endless": linked(WEIGHTS, "/dev/zero"),
        "gone": gone(WEIGHTS),
    }.items():
        yield Case("target", f"its weights are {what}", damage)
    index = "model.safetensors.index.json"
    for what, text in {
        "names no file": b'{"weight_map": {}}',
        "names a file that is not": b'{"weight_map": {"lm_head.weight": "gone.safetensors"}}',
        "names a file outside": b'{"weight_map": {"lm_head.weight": "../../../etc/passwd"}}',
        "names numbers": b'{"weight_map": {"lm_head.weight": 5}}',
        "has no map": b"{}",
        "is null": b"null",
        "is a list": b"[]",
        "is cut": b'{"weight_map": {',
        "is deep": b"[" * 100_000,
    }.items():

        def damage(folder: Path, text: bytes = text) -> None:
            (folder / WEIGHTS).rename(folder / "other.safetensors")
            (folder / index).write_bytes(text)

        yield Case("target", f"its index {what}", damage)


class Runs:
    """Runs a command when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class Allocates:
    """Takes a terabyte when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


def pickled(name: str, value: Any) -> Damage:
    return lambda folder: torch.save(value, folder / name)


def bomb(name: str) -> Damage:
    """An archive whose parts are compressed a thousandfold."""

    def damage(folder: Path) -> None:
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (50 << 20))
            archive.writestr("archive/version", b"3\n")

    return damage


def expanded(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that say to be huge over a storage of one number."""
    return {name: torch.zeros(1).expand(1 << 20, 1 << 20) for name in found}


def pickle_cases(base: str, name: str) -> Iterator[Case]:
    for what, damage in {
        "runs a command": pickled(name, {"a": Runs()}),
        "takes a terabyte": pickled(name, {"a": Allocates()}),
        "is a list": pickled(name, [1, 2]),
        "is a tensor": pickled(name, torch.ones(2)),
        "is null": pickled(name, None),
        "has numbers for names": pickled(name, {1: torch.ones(2)}),
        "has no tensors": pickled(name, {"a": 1, "b": "c"}),
        "has lists among tensors": pickled(name, {"a": torch.ones(2), "b": [1]}),
        "is expanded": lambda folder: torch.save(
            expanded(torch.load(folder / name)), folder / name
        ),
        "is on no device": pickled(name, {"a": torch.empty(4, device="meta")}),
        "is sparse": pickled(name, {"a": torch.eye(4).to_sparse()}),
        "is a bomb": bomb(name),
        "is empty": rewrite(name, b""),
        "is zeros": rewrite(name, bytes(5000)),
        "is text": rewrite(name, b"no weights " * 50),
        "is half an archive": change(name, lambda data: data[: len(data) // 2]),
        "is an archive with nothing": rewrite(name, b"PK\x05\x06" + bytes(18)),
        "is a plain pickle": lambda folder: (
            (folder / name).write_bytes(pickle.dumps({"a": Runs()})) and None
        ),
        "is deep": lambda folder: (
            (folder / name).write_bytes(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
            and None
        ),
        "is an old pickle": lambda folder: torch.save(
            {"a": Runs()}, folder / name, _use_new_zipfile_serialization=False
        ),
        "is endless": linked(name, "/dev/zero"),
        "is a pipe": as_pipe(name),
        "is a folder": as_folder(name),
    }.items():
        yield Case(base, f"{name} {what}", damage)
    every = 997
    for at in range(every, 12 * every, every):

        def flip(data: bytes, at: int = at) -> bytes:
            place = at % len(data)
            return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]

        yield Case(base, f"{name} has another byte at {at}", change(name, flip), another=True)


# ---- GGUF


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def gguf(*fields: bytes, tensors: int = 0, count: int | None = None, rest: bytes = b"") -> Damage:
    head = b"GGUF" + u32(3) + u64(tensors) + u64(len(fields) if count is None else count)
    return rewrite("tiny.gguf", head + b"".join(fields) + rest)


def with_field(field: bytes) -> Damage:
    """One more field, the first."""

    def edit(data: bytes) -> bytes:
        (count,) = struct.unpack_from("<Q", data, 16)
        return data[:16] + u64(count + 1) + field + data[24:]

    return change("tiny.gguf", edit)


def number(key: str, value: int) -> Damage:
    """Another value of a field of 32 bits."""

    def edit(data: bytes) -> bytes:
        at = data.index(text(key.encode())) + 8 + len(key) + 4
        return data[:at] + u32(value) + data[at + 4 :]

    return change("tiny.gguf", edit)


def tensor_field(offset: int, value: bytes) -> Damage:
    """Something else behind the name of the second tensor; 0 = its number of dimensions."""

    def edit(data: bytes) -> bytes:
        name = text(b"output_norm.weight")
        at = data.index(name) + len(name) + offset
        return data[:at] + value + data[at + len(value) :]

    return change("tiny.gguf", edit)


def renamed(old: bytes, new: bytes) -> Damage:
    assert len(old) == len(new)
    return change("tiny.gguf", lambda data: data.replace(old, new))


ARRAY, STRING = 9, 8
KEY = text(b"key")


def gguf_cases() -> Iterator[Case]:
    nested = KEY + u32(ARRAY) + (u32(ARRAY) + u64(1)) * 50_000
    for what, damage in {
        "is empty": rewrite("tiny.gguf", b""),
        "is four bytes": rewrite("tiny.gguf", b"GGUF"),
        "is zeros": rewrite("tiny.gguf", bytes(4096)),
        "is text": rewrite("tiny.gguf", b"no gguf at all" * 50),
        "is of version 1": change("tiny.gguf", lambda d: d[:4] + u32(1) + d[8:]),
        "is of version 2^32 - 1": change("tiny.gguf", lambda d: d[:4] + b"\xff" * 4 + d[8:]),
        "is big-endian": change("tiny.gguf", lambda d: d[:4] + struct.pack(">I", 3) + d[8:]),
        "is halved": change("tiny.gguf", lambda d: d[: len(d) // 2]),
        "is one block short": change("tiny.gguf", lambda d: d[:-32]),
        "has 2^64 - 1 tensors": change("tiny.gguf", lambda d: d[:8] + b"\xff" * 8 + d[16:]),
        "has 2^64 - 1 fields": change("tiny.gguf", lambda d: d[:16] + b"\xff" * 8 + d[24:]),
        "has no tensors": gguf(),
        "has a name of 2^63 bytes": gguf(u64(1 << 63) + b"key"),
        "has a name of 2^64 - 1 bytes": gguf(b"\xff" * 8 + b"key" + bytes(100)),
        "has a text of 2^63 bytes": gguf(KEY + u32(STRING) + u64(1 << 63) + b"x"),
        "has a name that is no utf-8": with_field(text(b"\xff\xfe") + u32(4) + u32(1)),
        "has an unknown type": gguf(KEY + u32(99) + bytes(100)),
        "has an array of 2^60 bytes": gguf(KEY + u32(ARRAY) + u32(0) + u64(1 << 60)),
        "has an array of 2^61 numbers": gguf(KEY + u32(ARRAY) + u32(10) + u64(1 << 61)),
        "has an array of 2^60 texts": gguf(KEY + u32(ARRAY) + u32(STRING) + u64(1 << 60)),
        "has an array of an unknown type": gguf(KEY + u32(ARRAY) + u32(77) + u64(5)),
        "has an array of 2^60 empty arrays": with_field(
            KEY + u32(ARRAY) + u32(ARRAY) + u64(1 << 60) + (u32(0) + u64(0)) * 1000
        ),
        "is nested 50,000 deep": gguf(nested),
        "is nested and goes on": with_field(nested + u32(0) + u64(0)),
        "has alignment 0": with_field(text(b"general.alignment") + u32(4) + u32(0)),
        "has alignment 3": with_field(text(b"general.alignment") + u32(4) + u32(3)),
        "has alignment 2^31": with_field(text(b"general.alignment") + u32(4) + u32(1 << 31)),
        "has a text for alignment": with_field(text(b"general.alignment") + u32(8) + text(b"32")),
        "has -1 for alignment": with_field(text(b"general.alignment") + u32(5) + b"\xff" * 4),
        "has a field twice": with_field(text(b"llama.block_count") + u32(4) + u32(3)),
        "has 0 layers": number("llama.block_count", 0),
        "has 2 layers of 3": number("llama.block_count", 2),
        "has 4 layers of 3": number("llama.block_count", 4),
        "has 10^6 layers": number("llama.block_count", 10**6),
        "has 2^32 - 1 layers": number("llama.block_count", 2**32 - 1),
        "has 0 heads": number("llama.attention.head_count", 0),
        "has 5 heads": number("llama.attention.head_count", 5),
        "has 0 key heads": number("llama.attention.head_count_kv", 0),
        "has 3 key heads": number("llama.attention.head_count_kv", 3),
        "is 0 wide": number("llama.embedding_length", 0),
        "is 128 wide": number("llama.embedding_length", 128),
        "is 2^31 wide": number("llama.embedding_length", 1 << 31),
        "has an MLP of width 0": number("llama.feed_forward_length", 0),
        "has an MLP of width 2^31": number("llama.feed_forward_length", 1 << 31),
        "has a context of 0": number("llama.context_length", 0),
        "has a vocabulary of 0": number("llama.vocab_size", 0),
        "has a vocabulary of 2^31": number("llama.vocab_size", 1 << 31),
        "is of no architecture": renamed(b"general.architecture", b"general.architectura"),
        "is of an unknown architecture": renamed(text(b"llama"), text(b"lalma")),
        "has no tokenizer": renamed(b"tokenizer.ggml.", b"tokenizer.ggnl."),
        "has an unknown tokenizer": renamed(text(b"gpt2"), text(b"gpt9")),
        "has no merges": renamed(b"ggml.merges", b"ggml.margas"),
        "lacks a norm": renamed(b"output_norm.weight", b"output_narm.weight"),
        "lacks a matrix": renamed(b"blk.1.ffn_up.weight", b"blk.1.ffn_ub.weight"),
        "lacks a layer": renamed(b"blk.2.", b"blk.7."),
        "has a tensor twice": renamed(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
        "has a tensor of 0 dimensions": tensor_field(0, u32(0)),
        "has a tensor of 2^32 - 1 dimensions": tensor_field(0, b"\xff" * 4),
        "has a tensor of 2^63 numbers": tensor_field(4, u64(1 << 63)),
        "has a tensor of 2^61 numbers": tensor_field(4, u64(1 << 61)),
        "has a tensor of 0 numbers": tensor_field(4, u64(0)),
        "has a tensor of 63 numbers": tensor_field(4, u64(63)),
        "has a tensor of an unknown type": tensor_field(12, u32(9999)),
        "has a tensor of another type": tensor_field(12, u32(2)),
        "has a tensor beyond the end": tensor_field(16, u64(1 << 40)),
        "has a tensor before the beginning": tensor_field(16, u64((1 << 64) - 64)),
        "has a tensor that is not aligned": tensor_field(16, u64(7)),
        "is a folder": as_folder("tiny.gguf"),
        "is a pipe": as_pipe("tiny.gguf"),
        "is endless": linked("tiny.gguf", "/dev/zero"),
    }.items():
        yield Case("gguf", what, damage)
    yield Case("gguf", "is half zeros", change("tiny.gguf", _half_zeros), another=True)


def _half_zeros(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


# ---- drafters

HEAD_CONFIG: dict[str, tuple[Any, ...]] = {
    "num_attention_heads": (*ABSURD, 5, MISSING),
    "num_key_value_heads": (*ABSURD, 3),
    "head_dim": (*ABSURD, 7),
    "intermediate_size": (*ABSURD, 23),
    "rms_norm_eps": ("x", [], None, -1),
    "rope_theta": ("x", [], 0, -1),
    "rope_scaling": (5, [1], "x", {"type": "nonsense"}, {"type": "linear"}, {"type": "yarn"}),
    "hidden_act": ("nonsense", [], 5),
    "vocab_size": (0, 7, 10**12, "x", []),
    "quantization_config": ("x", {"bits": 4}, []),
    "transformer_layer_config": ({}, 5, []),
    "eagle_config": (5, [], "x", {"use_aux_hidden_state": False}),
    "speculators_config": (5, [], {"verifier": 5}, {"verifier": {"name_or_path": []}}),
}
OWN_CONFIG: dict[str, dict[str, tuple[Any, ...]]] = {
    "Eagle": {"bias": (True, "x"), **HEAD_CONFIG},
    "Eagle3": {
        "eagle_config.eagle_aux_hidden_state_layer_ids": (
            *(5, "x", [], [1], ["a", "b", "c"], [0, 1, 99], [-1, 0, 1], [0, 0, 10**30]),
            *([[0], [1], [2]], {"a": 1}, [0.5, 1, 2]),
        ),
        "norm_before_residual": ("x", []),
        **HEAD_CONFIG,
    },
    "DFlash": {
        "block_size": (*ABSURD, 65),
        "num_hidden_layers": (*ABSURD, 2),
        "hidden_size": (*ABSURD, 64),
        "dflash_config.mask_token_id": (-1, 10**9, "x", [], None, 2.5),
        "dflash_config.target_layer_ids": (5, "x", [], [1], [-1, 0], [0, 99], ["a"], [0.5, 1]),
        "dflash_config": (5, [], "x"),
        "layer_types": (5, [], ["nonsense"], ["full_attention"] * 2, [[]]),
        "sliding_window": ("x", -1, 0, []),
        **HEAD_CONFIG,
    },
}


def drafter_cases(folder: Path) -> Iterator[Case]:
    """What is done to each drafter's files; `folder` holds valid ones by the names of methods."""
    for method in DRAFTERS:
        if method == "Suffix":
            continue
        file = next(
            f for f in sorted((folder / method).iterdir()) if f.suffix in (".safetensors", ".pt")
        )
        if file.suffix == ".pt":
            yield from pickle_cases(method, file.name)
            continue
        for name, tensor in load_file(file).items():
            yield Case(method, f"it lacks {name}", without(name), refused=True)
            if method != "Draft_Target":
                yield Case(method, f"{name} has another shape", reshaped(name))
                wild = torch.full_like(tensor, 2**40 if tensor.dtype == torch.int64 else torch.nan)
                yield Case(
                    method, f"{name} is wild", tensors(lambda f, n=name, w=wild: {**f, n: w})
                )
        yield from json_cases(method, "config.json")
        yield Case(method, "its weights are empty", rewrite(file.name, b""))
        cut = change(file.name, lambda data: data[: len(data) // 2])
        yield Case(method, "its weights are halved", cut)
        for key, values in OWN_CONFIG.get(method, {}).items():
            for value in values:
                said = "missing" if value is MISSING else json.dumps(value)
                yield Case(method, f"{key} is {said:.60}", setting("config.json", key, value))
        for what, content in {
            "empty": b"",
            "a mapping": b"{}",
            "texts": b'["a"]',
            "beyond the vocabulary": b"[100000]",
            "beyond 64 bits": b"[1" + b"0" * 30 + b"]",
            "negative": b"[-1]",
            "deep": b"[" * 100_000,
            "twice": b"[" + b"1," * 20 + b"1]",
            "null": b"null",
            "ragged": b"[[1],[2,3]]",
            "no utf-8": b"\xff\xff",
        }.items():
            if method in ("Medusa", "ReDrafter", "Eagle"):
                damage = rewrite("draft_vocab.json", content)
                yield Case(method, f"its draft_vocab.json is {what}", damage)
        for other in DRAFTERS:
            if other not in (method, "Suffix", "Medusa as a pickle"):

                def swap(to: Path, other: str = other) -> None:
                    for mine in to.iterdir():
                        mine.unlink()
                    for theirs in (folder / other).iterdir():
                        (to / theirs.name).write_bytes(theirs.read_bytes())

                yield Case(method, f"it is a checkpoint for {other}", swap)
    yield from corpus_cases()


def corpus_cases() -> Iterator[Case]:
    method, manifest, shard = "Suffix", "corpus.json", "shard-00000"
    yield from json_cases(method, manifest)
    for key, values in {
        "token_dtype": ("x", 5, None, [], "<f4", "O", "<u2,<u2", "V8", "<i8", MISSING, "S9"),
        "vocab_size": (*ABSURD, MISSING, 287),
        "hidden_size": ("x", 33, None, MISSING),
        "num_layers": (4, None, [], MISSING),
        "target": (5, None, MISSING),
        "weights": (5, [], {}),
    }.items():
        for value in values:
            said = "missing" if value is MISSING else json.dumps(value)
            yield Case(method, f"{key} is {said}", setting(manifest, key, value))
    for what, damage in {
        "tokens are empty": rewrite(f"{shard}.bin", b""),
        "tokens are halved": change(f"{shard}.bin", lambda d: d[: len(d) // 2]),
        "tokens are one byte short": change(f"{shard}.bin", lambda d: d[:-1]),
        "tokens are gone": gone(f"{shard}.bin"),
        "tokens are beyond the vocabulary": change(f"{shard}.bin", lambda d: b"\xff" * len(d)),
        "tokens are a folder": as_folder(f"{shard}.bin"),
        "tokens are a pipe": as_pipe(f"{shard}.bin"),
        "index is empty": rewrite(f"{shard}.jsonl", b""),
        "index is gone": gone(f"{shard}.jsonl"),
        "index is no JSON": rewrite(f"{shard}.jsonl", b"{\n"),
        "index is null": rewrite(f"{shard}.jsonl", b"null\n"),
        "index is a list": rewrite(f"{shard}.jsonl", b"[]\n"),
        "index is deep": rewrite(f"{shard}.jsonl", b"[" * 100_000 + b"\n"),
        "index is no utf-8": rewrite(f"{shard}.jsonl", b"\xff\xff\n"),
        "index has other keys": rewrite(f"{shard}.jsonl", b'{"a": 1}\n'),
        "index starts before the beginning": change(
            f"{shard}.jsonl", lambda d: d.replace(b'"start": 0', b'"start": -9')
        ),
        "index has a length below 0": change(
            f"{shard}.jsonl", lambda d: d.replace(b'"length": 40', b'"length": -4')
        ),
        "index has a length of 10^18": change(
            f"{shard}.jsonl", lambda d: d.replace(b'"length": 40', b'"length": %d' % 10**18)
        ),
        "index has texts for numbers": change(
            f"{shard}.jsonl", lambda d: d.replace(b'"start": 0', b'"start": "0"')
        ),
        "index has answers that are none": change(
            f"{shard}.jsonl", lambda d: d.replace(b"[[9, 40]]", b"[[9]]")
        ),
        "shard has an odd name": lambda folder: (
            (folder / f"{shard}.jsonl").rename(folder / "shard-x.jsonl") and None
        ),
        "shard has a number of 5,000 digits": lambda folder: (
            (folder / f"{shard}.jsonl").rename(folder / ("shard-" + "9" * 200 + ".jsonl")) and None
        ),
    }.items():
        yield Case(method, f"its {what}", damage)


def target_cases() -> Iterator[Case]:
    yield from config_cases()
    yield from tokenizer_cases()
    yield from weight_cases()
    yield from pickle_cases("bin", "pytorch_model.bin")
    yield from gguf_cases()
