"""What people write is refused with a sentence that names key, value and rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError

METHODS = sorted(methods().items())


def message(cls: Any, values: Any, **where: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cls.parse(values, **where)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cls", "values", "parts"),
    [
        (Sampling, {"temprature": 1.0}, ["temprature", "did you mean temperature?"]),
        (Sampling, {"xyzzy": 1}, ["xyzzy", "allowed:", "top_k"]),
        (Sampling, {"temperature": -0.1}, ["temperature", "-0.1", "greater than or equal to 0"]),
        (Sampling, {"temperature": math.nan}, ["temperature", "nan"]),
        (Sampling, {"top_p": math.nan}, ["top_p", "nan"]),
        (Sampling, {"top_p": 0.0}, ["top_p", "0.0"]),
        (Sampling, {"temperature": "0.7"}, ["temperature", "number", "'0.7'"]),
        (Sampling, {"top_k": True}, ["top_k", "integer", "True"]),
        (Sampling, {"seed": -1}, ["seed", "-1"]),
        (Limits, {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        (Limits, {"stop": [""]}, ["stop.0", "''"]),
        (Limits, {"stop": "x"}, ["stop"]),
        (Limits, {"ignore_eos": "yes"}, ["ignore_eos", "'yes'"]),
        (Limits, [1], ["mapping", "list"]),
        (Sampling, {"temperature": -1.0, "top_k": -1}, ["temperature", "top_k"]),
        (Sampling, {"temperature": "9" * 10_000}, ["temperature must be"]),
    ],
)
def test_a_bad_setting_is_named_with_value_and_rule(
    cls: Any, values: Any, parts: list[str]
) -> None:
    text = message(cls, values, where="file.yaml")
    for part in [*parts, "(in file.yaml)"]:
        assert part in text
    assert "\n" not in text and "pydantic" not in text and len(text) < 300


def test_settings_are_frozen_and_copies_are_checked() -> None:
    sampling = Sampling()
    with pytest.raises(ValueError, match="frozen"):
        sampling.top_k = 3  # type: ignore[misc]
    assert sampling.replace(top_k=3).top_k == 3
    with pytest.raises(ConfigError, match="top_k"):
        sampling.replace(top_k=-3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"decoding_type": "NGrm"}, "Did you mean NGram?"),
        ({"decoding_type": "???"}, "Allowed: Autoregressive"),
        ({"decoding_type": 3}, "got 3"),
        ([], "mapping"),
        ({"decoding_type": "NGram", "max_draft": 3}, "did you mean max_draft_len?"),
    ],
)
def test_a_method_that_is_not_one_is_refused(values: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_method(values, where="m.yaml")
    assert says in str(caught.value) and "m.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "stored", "settings"),
    [
        ("Suffix", {"mix_contexts": True, "escape": 0.5, "text_weight": 2.0}, {}),
        ("Token_Recycling", {"keep_matrix": False, "recycle_prompt": False}, {}),
        ("NGram", {"adaptive": True, "size": "set"}, {"drafting": "auto"}),
        ("NGram", {"adaptive": False, "size": "fit"}, {"drafting": "auto"}),
        ("NGram", {"adaptive": False, "size": "set"}, {"drafting": "as set"}),
        ("NGram", {"drafting": "as_set"}, {"drafting": "as set"}),
    ],
)
def test_settings_of_earlier_versions_are_read_or_ignored(
    kind: str, stored: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert parse_method({"decoding_type": kind, **stored}) == methods()[kind].parse(settings)


def test_plain_decoding_comes_first() -> None:
    assert next(iter(methods())) == "Autoregressive"


@pytest.mark.parametrize(("name", "cls"), METHODS)
def test_every_setting_of_every_method_has_a_default_and_a_description(
    name: str, cls: type[MethodConfig]
) -> None:
    assert cls.title and cls.summary
    config = cls.parse({})
    assert config.decoding_type == name
    for key, field in cls.model_fields.items():
        if key != "decoding_type":
            assert field.description, f"{name}.{key} has no description"
    assert parse_method(config.model_dump(mode="json")) == config
