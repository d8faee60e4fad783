"""Valid tiny model files, and what is done to each."""

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
    FEW_TEXTS,
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


ABSURD: tuple[Any, ...] = (-1, 10**9, "many", [], None)
CONFIG_KEYS = """
attention_bias _attn_implementation bos_token_id is_encoder_decoder loop_num_passes
max_position_embeddings num_kv_shared_layers pretraining_tp sliding_window tie_word_embeddings
"""
CONFIG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(CONFIG_KEYS.split(), ABSURD),
    "num_hidden_layers": (*ABSURD, 0, 2, 4, 10**6, 2.5),
    "hidden_size": (*ABSURD, 33, 64),
    "num_attention_heads": (*ABSURD, 0, 5, 3, 64),
    "num_key_value_heads": (*ABSURD, 0, 3, 8),
    "head_dim": (*ABSURD, 7, 16),
    "intermediate_size": (47, 10**18),
    "vocab_size": (*ABSURD, 287, 300),
    "rms_norm_eps": ("x", [], float("nan"), 10**400),
    "rope_parameters": (
        *(5, {"rope_type": "nonsense"}, {"rope_type": "yarn"}, {"rope_theta": "x"}),
        *({"rope_type": "linear", "factor": 0}, {"rope_type": "llama3", "factor": 8}),
        {"rope_type": "longrope", "short_factor": [1], "long_factor": [1], "rope_theta": 1e4},
    ),
    "hidden_act": ("nonsense", 5, {}),
    "dtype": ("nonsense", 5, "int8", "complex64", "load", "__class__"),
    "model_type": ("gpt2", "qwen2", "gemma2", "t5", "bert", "nonsense", 5, "", None, MISSING)
    + ("llama\x00", "../llama", "clip", "whisper"),
    "architectures": ("x", ["T5Model"], [5]),
    "layer_types": (["nonsense"] * 3, 5, ["full_attention"] * 2),
    "quantization_config": ({}, 5, {"quant_method": "nonsense"}, {"quant_method": "gptq"}),
    "eos_token_id": ("x", {"a": 1}, [[1]], -5, [10**30], 2.5),
    "auto_map": ({"AutoConfig": "own.Config"}, 5),
    "vision_config": ({"num_hidden_layers": 10**6}, 5),
    "text_config": ({}, 5, {"model_type": "nonsense"}),
    "transformers_weights": ("../../etc/passwd", 5),
}
ANOTHER = {
    ("max_position_embeddings", 10**9),
    ("head_dim", None),
}
"""Settings that make another valid model of the same tensors."""


def bpe(vocab: dict[str, int] | None = None, merges: list[str] | None = None, **more: Any) -> bytes:
    words = {"a": 0} if vocab is None else vocab
    model = {"type": "BPE", "vocab": words, "merges": merges or []}
    return json.dumps({"version": "1.0", "model": model, **more}).encode()


TOKENIZER_TEXTS = {
    **FEW_TEXTS,
    "no model": b'{"version": "1.0"}',
    "of an unknown model": b'{"version": "1.0", "model": {"type": "nonsense"}}',
    "without words": bpe(vocab={}),
    "a merge of nothing": bpe(merges=["b c"]),
    "an id beyond 32 bits": bpe(vocab={"a": 99999999999}),
    "a negative id": bpe(vocab={"a": -1}),
    "an added token of no kind": bpe(added_tokens=[{"id": 0, "content": "", "special": True}]),
}
TEMPLATES: dict[str, str] = {
    "divides by zero": "{{ 1 / 0 }}",
    "is cut": "{% for m in messages %}",
    "asks for what is not there": "{{ nothing.at.all }}",
    "refuses": "{{ raise_exception('no\n\x1b[2Jthanks') }}",
    "reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "imports": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "counts for ever": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "counts far": "{% for i in range(10**9) %}x{% endfor %}",
    "calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "is nothing but brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "writes half a surrogate pair": "{{ '\\ud800' }}",
    "writes nothing": "",
}


def config_cases() -> Iterator[Case]:
    yield from json_cases("target", "config.json", JSON_TEXTS)
    for key, values in CONFIG.items():
        for value in values:
            said = "missing" if value is MISSING else json.dumps(value)
            another = any(key == k and value == v and type(value) is type(v) for k, v in ANOTHER)
            damage = setting("config.json", key, value)
            yield Case("target", f"{key} is {said:.60}", damage, another)
    for name in ("generation_config.json", "tokenizer_config.json"):
        yield from json_cases("target", name)
    for value in ("x", {"a": 1}, [[1]], 10**30):
        damage = setting("generation_config.json", "eos_token_id", value)
        yield Case("target", f"generation_config's eos_token_id is {value}", damage)


def _instead(other: Tensor, _: Tensor) -> Tensor:
    return other


def tokenizer_cases() -> Iterator[Case]:
    yield from json_cases("target", "tokenizer.json", TOKENIZER_TEXTS)
    for key in ("tokenizer_class", "eos_token", "model_max_length", "added_tokens_decoder"):
        values: tuple[Any, ...] = (5, {}, "nonsense", None)
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

ODD = (*ABSURD, [-1, 0], [0, 99], [0.5, 1], {"a": 1})
HEAD_KEYS = """
draft_vocab_size eagle_config head_dim hidden_act intermediate_size num_attention_heads
num_key_value_heads partial_rotary_factor rms_norm_eps rope_theta transformer_layer_config
"""
HEAD_CONFIG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(HEAD_KEYS.split(), ODD),
    "a key with \x1b[2J": (1,),
    "rope_parameters": (*ODD, {"partial_rotary_factor": "x"}),
    "rope_scaling": ({"type": "nonsense"}, {"type": "linear"}),
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
        for content in (b"", b"{}", b'["a"]', b"[100000]", b"[-1]", b"[" * 100_000, b"\xff\xff"):
            if method in ("Medusa", "ReDrafter", "Eagle"):
                damage = rewrite("draft_vocab.json", content)
                yield Case(method, f"its draft_vocab.json is {content[:9]!r}", damage)
    yield from corpus_cases()


def corpus_cases() -> Iterator[Case]:
    method, manifest, file = "Suffix", "corpus.json", "dialogues.jsonl"
    yield from json_cases(method, manifest)
    for key, value in (("vocab_size", 287), ("hidden_size", 33), ("num_layers", 4), ("target", 5)):
        for odd in (value, "x", MISSING):
            said = "missing" if odd is MISSING else json.dumps(odd)
            yield Case(method, f"{key} is {said}", setting(manifest, key, odd))
    ends = {"no pairs": b"[[9]]", "beyond the text": b"[[9, 41]]", "reversed": b"[[9, 5]]"}
    for what, answers in ends.items():
        yield Case(method, f"its answers are {what}", change(file, answers_as(answers)))
    for tokens in (b"[99999]", b"[-1]", b'["0"]'):
        yield Case(method, f"its tokens are {tokens!r}", change(file, tokens_as(tokens)))
    for line in (b"", b"{\n", b"[" * 100_000 + b"\n", b"\xff\xff\n", b'{"a": 1}\n'):
        yield Case(method, f"its dialogues are {line[:9]!r}", rewrite(file, line))
    for what, damage in (("gone", gone(file)), ("a pipe", as_pipe(file))):
        yield Case(method, f"its dialogues are {what}", damage)


def answers_as(answers: bytes) -> Callable[[bytes], bytes]:
    """Put these answers into a dialogue."""
    return lambda dialogue: dialogue.replace(b"[[9, 40]]", answers)


def tokens_as(value: bytes) -> Callable[[bytes], bytes]:
    """Every dialogue with these tokens."""
    return lambda lines: re.sub(rb'"tokens": \[[^\]]*\]', b'"tokens": ' + value, lines)


def target_cases() -> Iterator[Case]:
    yield from config_cases()
    yield from tokenizer_cases()
    yield from weight_cases()
    yield from pickle_cases("bin", "pytorch_model.bin")
    yield from gguf_cases()
