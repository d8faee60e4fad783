"""Controls come from the settings class alone, and what they hold parses back to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from engine.config import Limits, Sampling, Settings
from engine.drafters import methods
from engine.errors import ConfigError
from playground.host.controls import controls_of, settings_from


class Everything(Settings):
    """One field per kind of control."""

    steps: int = Field(3, ge=1, le=16, description="a slider")
    share: float = Field(0.5, ge=0.0, le=1.0)
    seed: int = Field(0, ge=0, le=2**63 - 1)
    maybe: int | None = Field(None, ge=0)
    mode: Literal["fast", "slow"] = "fast"
    on: bool = False
    weights: str | None = None
    words: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), strict=False)
    tree: list[list[int]] = Field([[0]], strict=False)


def by_name(settings: Settings) -> dict[str, dict[str, Any]]:
    return {control["name"]: control for control in controls_of(settings)}


def test_each_kind_of_field_gets_its_control() -> None:
    kinds = {name: control["kind"] for name, control in by_name(Everything()).items()}
    assert kinds == {
        "steps": "slider",
        "share": "slider",
        "seed": "text",
        "maybe": "text",
        "mode": "choice",
        "on": "flag",
        "weights": "text",
        "words": "lines",
        "tree": "lines",
    }


def test_slider_has_the_fields_bounds() -> None:
    steps = by_name(Everything())["steps"]
    assert (steps["min"], steps["max"], steps["step"], steps["value"]) == (1, 16, 1, 3)


def test_constant_fields_get_no_control() -> None:
    for cls in methods().values():
        assert "decoding_type" not in by_name(cls())


@pytest.mark.parametrize("cls", [*methods().values(), Sampling, Limits])
def test_what_controls_show_parses_back_to_the_settings(cls: type[Settings]) -> None:
    raw = {c["name"]: c["value"] for c in controls_of(cls())}
    as_text = {
        k: str(v) if isinstance(v, int | float) and v is not True and v is not False else v
        for k, v in raw.items()
    }
    assert settings_from(cls, raw) == cls()
    assert settings_from(cls, as_text) == cls()


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("steps", "7", 7),
        ("share", "0.25", 0.25),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("maybe", "", None),
        ("maybe", "4", 4),
        ("on", True, True),
        ("weights", " ", None),
        ("words", "###\n\nStop.", ("###", "Stop.")),
        ("words", '["a\\nb"]', ("a\nb",)),
        ("tree", "[[0], [0, 1]]", [[0], [0, 1]]),
    ],
)
def test_raw_values_become_the_fields_types(name: str, raw: Any, value: Any) -> None:
    assert getattr(settings_from(Everything, {name: raw}), name) == value


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"steps": "0"}, "steps"),
        ({"steps": "three"}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"share": "nan"}, "share"),
        ({"share": "inf"}, "share"),
        ({"mode": "faster"}, "mode"),
        ({"on": "yes"}, "on"),
        ({"tree": "[[0], "}, "tree"),
        ({"tree": "[" * 5000}, "tree"),
        ({"stepz": 1}, "steps"),
        ({"words": ["x", 3]}, "words"),
        ({"weights": "x" * 300_000}, "weights"),
    ],
)
def test_bad_values_are_refused_by_name(raw: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        settings_from(Everything, raw)


@pytest.mark.parametrize("raw", [None, [], "x", 3])
def test_no_mapping_is_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        settings_from(Everything, raw)
