"""Every key of every engine's speculative section: read, listed, or refused by its name.

The keys are those of the releases' own sources and documents, as recorded. Each is put, with a
value that is not its default, into a config of every method of its engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from engine.errors import ConfigError
from playground.deploy import ENGINES
from playground.deploy.files import ImportedMethod
from playground.deploy.transformers import DRAFTING
from tests.playground.deploy import schemas
from tests.playground.deploy.schemas import recorded

VLLM = {
    "ngram": "",
    "suffix": "",
    "mtp": "",
    **dict.fromkeys(("draft_model", "medusa", "eagle", "eagle3", "dflash"), "a/b"),
}
SGLANG = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")
VALUES: dict[str, Any] = {
    "decoding_type": "Eagle3",
    "speculative_model": "c/d",
    "speculative_model_dir": "c/d",
    "draft_len_schedule": {1: 3},
    "eagle_choices": [[0], [0, 0], [0, 1]],
    "medusa_choices": [[0], [0, 0], [0, 1]],
    "eagle3_layers_to_capture": [1, 2],
    "target_layer_ids": [1, 2],
    "sa_config": {"threshold": 3},
    "greedy_sampling": False,
    "suffix_decoding_max_cached_requests": 0,
}
DEFAULTS = ("greedy", "strict")
"""Choices that change nothing."""
SWITCHES = ("use_", "enable_", "allow_", "is_", "eagle3_one", "mtp_eagle_one")
Case = tuple[dict[str, Any], str, Any]
"""A config without the key, the key, and its value."""


def sample(key: str) -> Any:
    if key in VALUES:
        return VALUES[key]
    if key.startswith(SWITCHES):
        return key not in ("is_keep_all", "is_use_oldest", "is_public_pool")
    return 5


def vllm(version: str) -> Iterator[Case]:
    kinds = {"int": (3,), "float": (0.25,), "bool": (True,), "str": ("c/d",), "any": (3,)}
    for key, kind in recorded("vllm", version).items():
        values = [VALUES[key]] if key in VALUES else kind if isinstance(kind, list) else kinds[kind]
        for method, model in VLLM.items() if key not in ("method", "model") else ():
            base: dict[str, Any]
            base = {"method": method, **({"model": model} if model else {})}
            base |= {"num_speculative_tokens": 2} if key != "num_speculative_tokens" else {}
            yield from ((base, key, value) for value in values if value not in DEFAULTS)


def sglang(version: str) -> Iterator[Case]:
    kinds = {"int": ("7",), "float": ("0.25",), "switch": ("",), "str": ("c/d",)}
    for flag, kind in recorded("sglang", version).items():
        for algorithm in SGLANG if flag not in ("--speculative-algorithm", *SIZES) else ():
            base = {"--speculative-algorithm": algorithm}
            values = kind if isinstance(kind, list) else kinds[kind]
            yield from ((base, flag, value) for value in values)


SIZES = tuple(f"--speculative-{name}" for name in ("num-steps", "eagle-topk", "num-draft-tokens"))
"""Wanted all three or none: `test_documented` reads them."""


def trtllm(version: str) -> Iterator[Case]:
    schema = recorded("trtllm", version)
    for kind, own in schema["types"].items():
        for key in (*own, *schema["common"][1:]):
            size = 63 if kind in ("Eagle", "Medusa") else 2  # the tree that is not named
            base = {"decoding_type": kind, "max_draft_len": size}
            base |= {"speculative_model": "a/b"} if kind != "MTP" else {}
            if kind == "Eagle" and version < "1.3":
                base["num_eagle_layers"] = 4
            yield base, key, sample(key)


def llamacpp(version: str) -> Iterator[Case]:
    schema = recorded("llamacpp", version)
    for flag in (*schema["flags"], *schema.get("variables", ())):
        for kind in schema["types"] if not flag.lower().endswith(("-type", "spec_type")) else ():
            small = "-p-" in flag or "_P_" in flag
            word = "probabilistic" if flag_of(flag) == "--spec-draft-sampling" else "7"
            yield {"--spec-type": kind}, flag, "0.5" if small else word


def mlx(version: str) -> Iterator[Case]:
    for flag in recorded("mlx", version)["flags"][1:]:
        yield {"--draft-model": "a/b"}, flag, "7"


def ollama(version: str) -> Iterator[Case]:
    for key in recorded("ollama", version)["parameters"]:
        for draft in ("a-mtp.gguf", "a-dflash.gguf"):
            yield {"DRAFT": draft}, key, "7"


TRITON = {
    "decoding_mode": "eagle",
    "medusa_choices": "{0}, {0, 0}",
    "eagle_choices": "{0}, {0, 0}",
    **{f"lookahead_{name}": "5" for name in ("window_size", "ngram_size", "verification_set_size")},
    "speculative_decoding_fast_logits": "1",
}
"""The engine backend's parameters that bear on drafting; `trtllm` has those of the LLM API's."""


def triton(version: str) -> Iterator[Case]:
    lookahead = {key: "3" for key in TRITON if key.startswith("lookahead")}
    for mode in ("medusa", "eagle", "lookahead", "redrafter", "top_k_top_p"):
        base = {"decoding_mode": mode, **(lookahead if mode == "lookahead" else {})}
        yield from ((base, key, value) for key, value in TRITON.items() if value != mode)


def transformers(version: str) -> Iterator[Case]:
    """Of the installed release, whose own class names every setting of a generation."""
    words = ("assist", "lookup", "lookbehind", "matching_ngram")
    keys = {key for key in vars(GenerationConfig()) if any(word in key for word in words)}
    assert len(keys) >= 9, keys
    values = {
        "num_assistant_tokens_schedule": "'heuristic'",
        "assistant_confidence_threshold": "0.25",
    }
    for base in ({"assistant_model": "small"}, {"prompt_lookup_num_tokens": "5"}):
        yield from ((base, key, values.get(key, "3")) for key in keys - {*base})


CASES = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "llamacpp": llamacpp,
    "triton": triton,
    "transformers": transformers,
    "mlx": mlx,
    "ollama": ollama,
}
SCRIPT = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("a/b")
small = AutoModelForCausalLM.from_pretrained("c/d")
{}
out = model.generate(**inputs, {})
"""


def read(engine: str, values: dict[str, Any]) -> ImportedMethod | str:
    """The method, or the sentence that refuses the values."""
    if engine in ("vllm", "trtllm"):
        text = yaml.safe_dump(values)
    elif engine == "triton":
        text = "\n".join(
            f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in values.items()
        )
    elif engine == "transformers":
        own = [key for key in values if key.startswith(DRAFTING)]
        assigned = "\n".join(f"small.generation_config.{key} = {values[key]}" for key in own)
        told = ", ".join(f"{key}={values[key]}" for key in values if key not in own)
        text = SCRIPT.format(assigned, told)
    elif engine == "ollama":
        lines = (f"{'' if key.isupper() else 'PARAMETER '}{key} {values[key]}" for key in values)
        text = "\n".join(("FROM t.gguf", *lines))
    else:
        pairs = (f"{key}{'=' if key.isupper() else ' '}{value}" for key, value in values.items())
        text = " ".join(pair.strip() for pair in pairs)
    return imported(engine, text)


@functools.lru_cache(maxsize=64)
def imported(engine: str, text: str) -> ImportedMethod | str:
    """Read once what all keys are added to."""
    try:
        return schemas.read(engine, text)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("engine", "version"),
    [(engine, version) for engine in CASES for version, _ in ENGINES[engine].versions],
)
def test_every_key_is_read_or_listed_or_refused_by_name(engine: str, version: str) -> None:
    outcomes = set()
    for base, key, value in CASES[engine](version):
        before, after = read(engine, base), read(engine, {**base, key: value})
        key = flag_of(key)
        if isinstance(before, str) and isinstance(after, str) and key not in after:
            continue  # no counterpart with or without the key
        outcomes.add(outcome(before, after, key))
        assert None not in outcomes, (base, key, value, before, after)
    if engine in ("mlx", "ollama"):
        assert outcomes == {"read"}
        return
    none_refused = engine == "triton" or version < "1.3"
    assert {"read", "listed", "refused"} <= outcomes | ({"refused"} if none_refused else set())


def flag_of(key: str) -> str:
    """The flag that a variable of the environment stands for, or the key."""
    flag = f"--{key.removeprefix('LLAMA_ARG_').lower()}".replace("_", "-")
    return flag if key.startswith("LLAMA_ARG_") else key


def outcome(before: ImportedMethod | str, after: ImportedMethod | str, key: str) -> str | None:
    """What became of a key; None if it was dropped in silence."""
    if isinstance(after, str):
        return "refused" if key in after else None
    if key in after.ignored:
        return "listed"
    if isinstance(before, str):
        return "read"
    return "read" if (before.config, before.notes) != (after.config, after.notes) else None


def test_every_documented_key_stands_on_the_generated_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text("utf-8")
    for engine, cases in CASES.items():
        for version, _ in ENGINES[engine].versions:
            for key in {key for _, key, _ in cases(version)}:
                assert f"`{flag_of(key)}`" in page, (engine, version, key)
