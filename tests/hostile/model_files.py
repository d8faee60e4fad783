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

from engine.model.random_weights import add_tensors
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


def save_random(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    add_tensors(folder, shapes, seed=0)


def save_heads(folder: Path, target: Target) -> None:
    """Medusa: two heads with an output matrix each."""
    size, vocab = target.hidden_size, target.vocab_size
    shapes = {"{0,1}.0.linear.weight": (size, size), "{0,1}.0.linear.bias": (size,)}
    save_random(folder, {"medusa_num_heads": 2}, {**shapes, "{0,1}.1.weight": (vocab, size)})


def save_recurrent(folder: Path, target: Target) -> None:
    """ReDrafter with all parts."""
    size, vocab = target.hidden_size, target.vocab_size
    shapes = {
        "{rnn_w,rnn_u,lm_head.0.linear}.weight": (size, size),
        "{rnn_u,input_proj,lm_head.0.linear}.bias": (size,),
        "input_proj.weight": (size, 2 * size),
        "lm_head.1.weight": (vocab, size),
    }
    save_random(folder, {"rnn": True}, shapes)


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
    "Medusa": ({"medusa_choices": ((0,), (0, 0))}, save_heads),
    "Medusa as a pickle": ({"medusa_choices": ((0,), (0, 0))}, partial(save_head, "Medusa")),
    "ReDrafter": ({"beam_width": 2, "beam_length": 3}, save_recurrent),
    "Eagle": ({"eagle_choices": ((0,), (0, 0))}, partial(save_head, "Eagle")),
    "Eagle3": ({"max_draft_len": 2}, save_eagle3),
    "DFlash": ({}, partial(save_head, "DFlash")),
    "Draft_Target": ({}, lambda folder, target: save_target(folder, seed=1)),
    "Suffix": ({}, save_corpus),
}
"""Per method: settings, and what writes its files. `Draft_Target` and `Suffix` name theirs
otherwise."""


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
    "num_kv_shared_layers": ("x", -1, 10**9, [], {}, 2.5, True),
    "loop_num_passes": ("x", -1, 10**9, [], {}),
    "attention_layers": (5, "x", [5], {"a": 1}),
    "unpadded_vocab_size": ("x", 0, [], 10**12),
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
    "partial_rotary_factor": (0, 2, "x", [], 0.01),
    "rope_parameters": ({"partial_rotary_factor": "x"}, {"partial_rotary_factor": -1}, 5),
    "use_sliding_window": ("x", False),
    "draft_vocab_size": ("x", 0, 10**12),
    "architectures": (5, [5], "DominoDraftModel", {"a": 1}),
    "a key with \x1b[2J": (1,),
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
            yield Case(method, f"it lacks {name}", without(name), refused=name not in OPTIONAL)
            if method != "Draft_Target":
                yield Case(method, f"{name} has another shape", reshaped(name))
                wild = torch.full_like(tensor, 2**40 if tensor.dtype == torch.int64 else torch.nan)
                yield Case(method, f"{name} is wild", with_tensor(name, partial(_instead, wild)))
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
