"""Controls come from the settings class alone, and what they hold parses back to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from engine.config import Limits, Sampling, Settings
from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.training.methods import METHODS
from engine.training.session import SessionSettings
from playground.host.controls import (
    Control,
    Group,
    changed_by,
    controls_of,
    settings_from,
    state_of,
    values_of,
)
from playground.training.plan import Budget


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


def controls(settings: Settings) -> list[Control]:
    return controls_of(type(settings), values_of(settings))


def test_each_kind_of_field_gets_its_control() -> None:
    kinds = [control.kind for control in controls(Everything())]
    assert kinds == "slider slider text text choice flag text lines lines".split()


ALL = [*methods().values(), Sampling, Limits]


@pytest.mark.parametrize("cls", ALL)
def test_what_controls_show_parses_back_to_the_settings(cls: type[Settings]) -> None:
    raw = values_of(cls.parse({}))
    assert {control.name for control in controls(cls.parse({}))} == {*raw}
    as_text = {k: str(v) if type(v) in (int, float) else v for k, v in raw.items()}
    assert settings_from(cls, raw) == settings_from(cls, as_text) == cls()


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
    ("name", "values"),
    [
        ("steps", ["0", "three", 2.5, True]),
        ("share", ["nan", "inf"]),
        ("mode", ["faster"]),
        ("on", ["yes"]),
        ("tree", ["[[0], ", "[" * 5000]),
        ("words", [["x", 3]]),
        ("weights", ["x" * 300_000]),
    ],
)
def test_bad_values_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=name):
            settings_from(Everything, {name: value})
    with pytest.raises(ConfigError, match="steps"):
        settings_from(Everything, {"stepz": 1})


LOSSY = {("Medusa", "acceptance", "typical"), ("MTP", "use_relaxed_acceptance_for_thinking", True)}
"""Settings that make a method lossy."""


@pytest.mark.parametrize("cls", ALL)
def test_rules_name_settings_and_values_that_exist(cls: type[Settings]) -> None:
    fields = cls.model_fields
    named = cls.main_settings.split()
    for values, without_effect in cls.without_effect:
        assert getattr(cls.parse({**values}), next(iter(values))) == next(iter(values.values()))
        named += [*values, *without_effect.split()]
    assert set(named) <= set(fields)


@pytest.mark.parametrize("cls", [*ALL, *METHODS.values(), SessionSettings, Budget])
def test_every_control_has_a_title_that_is_not_made_from_its_name(cls: type[Settings]) -> None:
    names = {name for name in cls.model_fields if name != "decoding_type"}
    assert {name for name in names if not cls.model_fields[name].title} == set()


@pytest.mark.parametrize("cls", ALL)
def test_at_most_four_settings_stand_before_the_rest(cls: type[Settings]) -> None:
    shown = [c.name for c in controls(cls.parse({})) if c.main and not c.section]
    hidden = state_of(cls, {}).hidden
    assert hidden is not None and len(set(shown) - hidden) <= 4


@pytest.mark.parametrize(
    ("name", "values", "hidden", "live"),
    [
        ("Autoregressive", {}, {"drafting"}, set()),
        ("Eagle", {"use_dynamic_tree": True}, {"eagle_choices"}, {"max_total_draft_tokens"}),
        ("Medusa", {}, {"posterior_alpha"}, {"medusa_choices"}),
        (
            "Combined",
            {"model.decoding_type": "Medusa"},
            {"model.posterior_alpha"},
            {"model.acceptance", "model.decoding_type"},
        ),
    ],
)
def test_settings_without_effect_are_hidden(
    name: str, values: dict[str, Any], hidden: set[str], live: set[str]
) -> None:
    found = state_of(methods()[name], values).hidden
    assert found is not None and hidden <= found and not live & found


def test_sampling_shows_what_is_read_and_reads_a_grammar_at_once() -> None:
    assert state_of(Sampling, {"temperature": 0}).hidden == frozenset(
        {"top_k", "top_p", "min_p", "verification", "grammar"}
    )
    assert state_of(Sampling, {"temperature": 0.7}).hidden == frozenset({"grammar"})
    held = {"structured_output": "json_schema", "grammar": '{"type": "objec"}'}
    assert "objec" in state_of(Sampling, held).faults["grammar"]
    shown = state_of(Sampling, {**held, "grammar": '{"type": "object"}'})
    assert shown.faults == {} and "grammar" not in (shown.hidden or ())


@pytest.mark.parametrize("cls", methods().values())
def test_every_acceptance_setting_says_whether_it_is_lossless(cls: type[MethodConfig]) -> None:
    kind = cls.model_fields["decoding_type"].default
    for control in controls(cls.parse({})):
        choices = (False, True) if control.kind == "flag" else control.choices
        for value in choices:
            state = state_of(cls, {control.name: value})
            if state.hidden is not None:
                known = (kind, control.name, value) in LOSSY
                assert (state.badge == "lossy") is known, (control.name, value)


def test_a_lossy_method_within_another_makes_it_lossy() -> None:
    combined = methods()["Combined"]
    lossy = {"model.decoding_type": "Medusa", "model.acceptance": "typical"}
    assert state_of(combined, lossy).badge == "lossy"
    assert state_of(combined, {**lossy, "model.acceptance": "lossless"}).badge == "lossless"


@pytest.mark.parametrize(
    ("name", "raw", "at"),
    [
        ("NGram", {"max_draft_len": 99, "lookup": "x"}, {"max_draft_len", "lookup"}),
        (
            "Eagle",
            {"use_dynamic_tree": True, "max_total_draft_tokens": 900, "max_draft_len": 2},
            {"max_total_draft_tokens"},
        ),
        ("Medusa", {"medusa_choices": "[[0], [0"}, {"medusa_choices"}),
        ("Combined", {"model.matrix_top_k": 99}, {"model.matrix_top_k"}),
    ],
)
def test_a_fault_stands_at_its_control(name: str, raw: dict[str, Any], at: set[str]) -> None:
    state = state_of(methods()[name], raw)
    assert set(state.faults) == at and state.hidden is None and not state.badge


def test_a_form_of_another_method_within_has_that_methods_controls() -> None:
    combined = methods()["Combined"].parse({})
    other = combined.replace(model={"decoding_type": "NGram", "max_draft_len": 3})
    group = Group.of("method", "Method", other)
    names = {control.name for control in group.controls(type(combined))}
    assert "model.lookup" in names and "model.matrix_top_k" not in names
    assert changed_by(combined, group.values) == other
    with pytest.raises(ConfigError, match="retrieval.decoding_type must be one of NGram, Suffix"):
        settings_from(type(combined), {"retrieval.decoding_type": "Medusa"})


def test_numbers_of_a_list_are_written_with_commas() -> None:
    eagle3 = methods()["Eagle3"]
    found = settings_from(eagle3, {"eagle3_layers_to_capture": "2, 14, 27"})
    assert values_of(found)["eagle3_layers_to_capture"] == "2, 14, 27"
    assert found.model_dump()["eagle3_layers_to_capture"] == (2, 14, 27)
    with pytest.raises(ConfigError, match="eagle3_layers_to_capture"):
        settings_from(eagle3, {"eagle3_layers_to_capture": "2, x"})
