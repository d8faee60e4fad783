"""Forms: what an edit changes of them, and that a method within a method can be exchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import gradio as gr
import pytest

from engine.drafters import methods
from playground.host.controls import Group, group_of, state_of
from playground.web.fields import Fields
from playground.web.forms import SettingsForm

Made = TypeVar("Made")


def built(make: Callable[[], Made]) -> Made:
    """What is made within a page. Gradio leaves event loops unclosed unless one is running."""

    async def building() -> Made:
        with gr.Blocks(analytics_enabled=False):
            return make()

    return asyncio.run(building())


def drawn(kind: str) -> tuple[Group, Fields, dict[str, Any]]:
    """The form of a method, and what it holds."""
    group = Group.parse(group_of("method", "Method", methods()[kind].parse({})))
    values = group.values(None)
    state = state_of(methods()[kind], values)
    return group, built(lambda: Fields(group.fields, values, state)), values


def after(kind: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Updates of the controls once some hold something else."""
    _, fields, values = drawn(kind)
    values |= changes
    updates = fields.updates(values, state_of(methods()[kind], values))
    return dict(zip(fields.components, updates[1:], strict=False))


def test_an_edit_shows_and_hides_controls() -> None:
    found = after("Eagle", use_dynamic_tree=True)
    assert found["max_draft_len"]["visible"] is True
    assert found["eagle_choices"]["visible"] == "hidden"


def test_a_fault_takes_the_place_of_the_description_and_hides_nothing() -> None:
    found = after("NGram", max_draft_len=99)
    assert found["max_draft_len"]["info"].startswith("max_draft_len must be less than")
    assert "faulty" in found["max_draft_len"]["elem_classes"]
    assert all("visible" not in update for update in found.values())
    assert found["lookup"]["info"].endswith("`lookup`")


def test_a_fault_quotes_no_link() -> None:
    found = after("NGram", lookup="[here](//elsewhere.example)")
    assert "](" not in found["lookup"]["info"]


@pytest.fixture
def form() -> SettingsForm:
    return built(lambda: SettingsForm({"groups": []}, elem_id="f", classes=methods().values()))


def test_another_method_within_a_method_brings_its_own_controls(form: SettingsForm) -> None:
    group, _, values = drawn("Combined")
    asked = {"groups": [group.model_dump()], "values": {}, "method": "combined"}
    held = {"values": {"method": {**values, "min_match_len": 3}}}
    swapped = form._swap("method", "model", "NGram", asked, held)
    names = [control["name"] for control in swapped["groups"][0]["fields"]]
    assert "model.lookup" in names and "model.matrix_top_k" not in names
    assert swapped["method"] == "combined"
    assert swapped["values"]["method"]["min_match_len"] == 3
    assert not any(name.startswith("model.") for name in swapped["values"]["method"])


@pytest.mark.parametrize("kind", ["Combined", "nothing", None, 3])
def test_no_such_method_within_a_method_changes_nothing(form: SettingsForm, kind: Any) -> None:
    group, _, values = drawn("Combined")
    asked = {"groups": [group.model_dump()], "values": {}}
    swapped = form._swap("method", "model", kind, asked, {"values": {"method": values}})
    assert "groups" not in swapped
