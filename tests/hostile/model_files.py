"""Damaged and hostile model files, as data: valid tiny ones, and what is done to each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import random_heads
from engine.model.target import Target
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.engine.methods import save_head
from tests.hostile.damages import (
    JSON_TEXTS,
    MISSING,
    Case,
    as_folder,
    as_pipe,
    change,
    gone,
    json_cases,
    reshaped,
    rewrite,
    setting,
    with_tensor,
    without,
)
from tests.hostile.weight_files import gguf_cases, pickle_cases, weight_cases
from tests.models import save_tiny

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


def save_eagle3(folder: Path, target: Target) -> None:
    """EAGLE-3 that lists its layers, since this target has fewer than its default reads."""
    save_head("Eagle3", folder, target)
    setting("config.json", "eagle_config.eagle_aux_hidden_state_layer_ids", [0, 1, 2])(folder)


OPTIONAL = ("embed_tokens.weight", "t2d")
"""Tensors that the target has, or that follow from others."""
CORPUS = {"target": "tiny", "weights": None}
LENGTH = 40


def save_corpus(folder: Path, target: Target) -> None:
    """Three dialogues."""
    folder.mkdir(parents=True)
    sizes = {name: getattr(target, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    (folder / "corpus.json").write_text(json.dumps(CORPUS | sizes))
    ids = np.random.default_rng(0).integers(0, target.vocab_size, (3, LENGTH)).tolist()
    lines = [
        {"n": n, "category": "qa", "answers": [[9, LENGTH]], "tokens": tokens}
        for n, tokens in enumerate(ids)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "dialogues.jsonl").write_text(text)


TARGETS: dict[str, Callable[[Path], None]] = {
    "target": save_target,
    "bin": save_bin,
    "gguf": save_gguf,
}
DRAFTERS: dict[str, tuple[dict[str, Any], Callable[[Path, Target], object]]] = {
    "Medusa": ({"medusa_choices": ((0,), (0, 0))}, random_heads.medusa),
    "Medusa as a pickle": ({"medusa_choices": ((0,), (0, 0))}, partial(save_head, "Medusa")),
    "ReDrafter": ({"beam_width": 2, "beam_length": 3}, random_heads.redrafter),
    "Eagle": ({"eagle_choices": ((0,), (0, 0))}, partial(save_head, "Eagle")),
    "Eagle3": ({"max_draft_len": 2}, save_eagle3),
    "DFlash": ({}, partial(save_head, "DFlash")),
    "Draft_Target": ({}, lambda folder, target: save_target(folder, seed=1)),
    "Suffix": ({}, save_corpus),
}
"""Per method: settings, and what writes its files. `Draft_Target` and `Suffix` name theirs
otherwise."""


ABSURD: tuple[Any, ...] = (0, -1, 10**6, 10**9, 10**18, "many", 2.5, [], {}, None, True)
CONFIG_KEYS = """
attention_bias attention_dropout attn_implementation _attn_implementation bos_token_id
chunk_size_feed_forward initializer_range is_encoder_decoder loop_num_passes mlp_bias
max_position_embeddings num_kv_shared_layers pad_token_id pretraining_tp sliding_window
tie_word_embeddings unpadded_vocab_size use_cache
"""
CONFIG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(CONFIG_KEYS.split(), ABSURD),
    "num_hidden_layers": (*ABSURD, 2, 4, [3], "3"),
    "hidden_size": (*ABSURD, 33, 64),
    "num_attention_heads": (*ABSURD, 5, 3, 64),
    "num_key_value_heads": (*ABSURD, 3, 8),
    "head_dim": (*ABSURD, 7, 16),
    "intermediate_size": (*ABSURD, 47),
    "vocab_size": (*ABSURD, 287, 300),
    "num_labels": (10**6, "x"),
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
    "layer_types": (["nonsense"] * 3, 5, "x", ["full_attention"] * 2, [5, 5, 5], {"a": 1}),
    "quantization_config": ({}, "x", 5, [], {"quant_method": "nonsense"})
    + ({"quant_method": "gptq", "bits": 4}, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "eos_token_id": ("x", {"a": 1}, [[1]], -5, 10**9, [10**30], 2.5, [None]),
    "auto_map": ({"AutoConfig": "own.Config"}, 5, "x"),
    "vision_config": ({"num_hidden_layers": 10**6}, {"hidden_size": "x"}, 5),
    "text_config": ({}, 5, {"model_type": "nonsense"}, {"model_type": "llama"}),
    "pruned_heads": ({"0": [1]}, "x", {"x": 1}),
    "transformers_weights": ("../../etc/passwd", 5),
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


def _instead(other: Tensor, _: Tensor) -> Tensor:
    return other


def tokenizer_cases() -> Iterator[Case]:
    yield from json_cases("target", "tokenizer.json", TOKENIZER_TEXTS)
    for key in ("tokenizer_class", "eos_token", "model_max_length", "added_tokens_decoder"):
        values: tuple[Any, ...] = (5, [], {}, "nonsense", {"a": "b"}, None)
        for value in values:
            damage = setting("tokenizer_config.json", key, value)
            yield Case("target", f"{key} is {value}", damage, another=key == "eos_token")
    for what, template in TEMPLATES.items():
        damage = rewrite("chat_template.jinja", template.encode())
        yield Case("target", f"its chat template {what}", damage, another=True)
    odd = rewrite("chat_template.jinja", b"\xff\xfe")
    yield Case("target", "its chat template is no utf-8", odd)
    yield Case("target", "its chat template is a folder", as_folder("chat_template.jinja"))


# ---- drafters

ODD = (*ABSURD, ["a"], [-1, 0], [0, 99], [0.5, 1], {"a": 1})
HEAD_KEYS = """
architectures draft_vocab_size eagle_config head_dim hidden_act intermediate_size
num_attention_heads num_key_value_heads partial_rotary_factor quantization_config rms_norm_eps
rope_theta transformer_layer_config use_sliding_window vocab_size
"""
HEAD_CONFIG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(HEAD_KEYS.split(), ODD),
    "a key with \x1b[2J": (1,),
    "rope_parameters": (*ODD, {"partial_rotary_factor": "x"}, {"partial_rotary_factor": -1}),
    "rope_scaling": (*ODD, {"type": "nonsense"}, {"type": "linear"}, {"type": "yarn"}),
    "speculators_config": (*ODD, {"verifier": 5}, {"verifier": {"name_or_path": []}}),
}
"""Of every head with a layer."""
OWN_KEYS = {
    "Eagle": ["bias"],
    "Eagle3": ["eagle_config.eagle_aux_hidden_state_layer_ids", "norm_before_residual"],
    "DFlash": ["block_size", "num_hidden_layers", "hidden_size", "layer_types", "sliding_window"]
    + ["dflash_config", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"],
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
            yield Case(method, f"it lacks {name}", without(name), refused=name not in OPTIONAL)
            if method != "Draft_Target":
                yield Case(method, f"{name} has another shape", reshaped(name))
                wild = torch.full_like(tensor, 2**40 if tensor.dtype == torch.int64 else torch.nan)
                yield Case(method, f"{name} is wild", with_tensor(name, partial(_instead, wild)))
        yield from json_cases(method, "config.json")
        yield Case(method, "its weights are empty", rewrite(file.name, b""))
        cut = change(file.name, lambda data: data[: len(data) // 2])
        yield Case(method, "its weights are halved", cut)
        own = dict.fromkeys(OWN_KEYS.get(method, ()), ODD)
        for key, values in {**own, **HEAD_CONFIG}.items() if own else ():
            for value in values:
                damage = setting("config.json", key, value)
                yield Case(method, f"{key} is {json.dumps(value)}", damage)
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
    yield from corpus_cases()


def corpus_cases() -> Iterator[Case]:
    method, manifest, file = "Suffix", "corpus.json", "dialogues.jsonl"
    yield from json_cases(method, manifest)
    for key, values in {
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
        "dialogues are empty": rewrite(file, b""),
        "dialogues are gone": gone(file),
        "dialogues are a folder": as_folder(file),
        "dialogues are a pipe": as_pipe(file),
        "dialogues are no JSON": rewrite(file, b"{\n"),
        "dialogues are null": rewrite(file, b"null\n"),
        "dialogues are deep": rewrite(file, b"[" * 100_000 + b"\n"),
        "dialogues are no utf-8": rewrite(file, b"\xff\xff\n"),
        "dialogues have other keys": rewrite(file, b'{"a": 1}\n'),
        "tokens are beyond the vocabulary": change(file, tokens_as(b"[99999]")),
        "tokens are negative": change(file, tokens_as(b"[-1]")),
        "tokens are text": change(file, tokens_as(b'["0"]')),
        "tokens are none": change(file, tokens_as(b"null")),
        "answers are no pairs": change(file, lambda d: d.replace(b"[[9, 40]]", b"[[9]]")),
        "answers are beyond the dialogue": change(
            file, lambda d: d.replace(b"[[9, 40]]", b"[[9, 41]]")
        ),
        "answers end before they begin": change(
            file, lambda d: d.replace(b"[[9, 40]]", b"[[9, 5]]")
        ),
    }.items():
        yield Case(method, f"its {what}", damage)


def tokens_as(value: bytes) -> Callable[[bytes], bytes]:
    """Every dialogue with these tokens."""
    return lambda lines: re.sub(rb'"tokens": \[[^\]]*\]', b'"tokens": ' + value, lines)


def target_cases() -> Iterator[Case]:
    yield from config_cases()
    yield from tokenizer_cases()
    yield from weight_cases()
    yield from pickle_cases("bin", "pytorch_model.bin")
    yield from gguf_cases()
