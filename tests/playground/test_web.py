"""Parts of the pages that need no browser: addresses, forms, owners, what Generate begins with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from starlette.datastructures import QueryParams

from engine.config import Limits, Sampling
from engine.drafters import methods
from engine.model.sources import TargetSpec
from playground.experiments.service import Experiments
from playground.host.controls import Group, spec_of, state_of
from playground.host.request import read_request
from playground.host.runner import EngineHost
from playground.runs.reading import History
from playground.web.address import link_params, tab_of
from playground.web.fields import Fields
from playground.web.forms import SettingsForm
from playground.web.generate import GeneratePage
from playground.web.generate_form import run_form
from playground.web.memory import owner_of, tab_identity
from playground.web.navigator import Navigator
from tests.playground.asks import finished, start
from tests.playground.serving import built
from tests.playground.tiny import save_tiny_llama

ADDRESSES = json.loads((Path(__file__).parents[1] / "scripts/addresses.json").read_text())


@pytest.mark.parametrize(("query", "tab"), ADDRESSES.items())
def test_an_address_opens_one_tab(query: str, tab: str) -> None:
    params = QueryParams(query)
    assert tab_of(params) == tab
    others = {*ADDRESSES.values()} - {tab}
    assert all(link_params(other, params) == {} for other in others)


def test_a_link_has_the_parameters_of_its_tab() -> None:
    params = QueryParams("tab=generate&run=abc&__theme=dark")
    assert link_params("generate", params) == {"run": "abc"}


@pytest.mark.parametrize("tab", [None, "", 3, {"a": 1}, "x" * 65])
def test_what_is_no_tab_is_told_apart_by_its_session(tab: object) -> None:
    request: Any = SimpleNamespace(session_hash="session")
    assert owner_of(tab, request) == "session"


# ---- forms


def drawn(kind: str) -> tuple[Group, Fields, dict[str, Any]]:
    """The form of a method, and what it holds."""
    group = Group.of("method", "Method", methods()[kind].parse({}))
    controls, state = group.controls(methods()[kind]), state_of(methods()[kind], group.values)
    return group, built(lambda: Fields(controls, group.values, state)), {**group.values}


def after(kind: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Updates of the controls once some hold something else."""
    _, fields, values = drawn(kind)
    values |= changes
    updates = fields.updates(values, state_of(methods()[kind], values))
    by_part = dict(zip(fields.outputs, updates, strict=True))
    return {name: by_part[part] for name, part in fields.components.items()}


def test_an_edit_shows_and_hides_controls() -> None:
    found = after("Eagle", use_dynamic_tree=True)
    assert found["max_draft_len"]["visible"] is True
    assert found["eagle_choices"]["visible"] == "hidden"


def test_a_fault_takes_the_place_of_the_description_and_hides_nothing() -> None:
    found = after("NGram", max_draft_len=99, lookup="[here](//elsewhere.example)")
    assert found["max_draft_len"]["info"].startswith("max_draft_len must be less than")
    assert "faulty" in found["max_draft_len"]["elem_classes"]
    assert all("visible" not in update for update in found.values())
    assert "](" not in found["lookup"]["info"], "a link"
    assert found["max_matching_ngram_size"]["info"].endswith("`max_matching_ngram_size`")


@pytest.fixture
def form() -> SettingsForm:
    return built(lambda: SettingsForm({"groups": []}, elem_id="f", classes=methods().values()))


def test_another_method_within_a_method_brings_its_own_controls(form: SettingsForm) -> None:
    group, _, values = drawn("Combined")
    asked = spec_of(group, method="combined")
    held = {"values": {"method": {**values, "min_match_len": 3}}}
    swapped = form._swap("method", "model", "NGram", asked, held)
    names = [*swapped["groups"][0]["values"]]
    assert "model.lookup" in names and "model.matrix_top_k" not in names
    assert swapped["method"] == "combined"
    assert swapped["values"]["method"]["min_match_len"] == 3
    assert not any(name.startswith("model.") for name in swapped["values"]["method"])
    for kind in ("Combined", "nothing", None, 3):
        assert "groups" not in form._swap("method", "model", kind, asked, held)


# ---- the Generate page


@pytest.fixture
def page(host: EngineHost, history: History) -> GeneratePage:
    return built(
        lambda: GeneratePage(host, Experiments(host), history, tab_identity(), Navigator())
    )


def test_a_target_without_a_chat_template_is_completed(page: GeneratePage, tmp_path: Path) -> None:
    base = TargetSpec(name="base", path=str(save_tiny_llama(tmp_path / "base")))
    (tmp_path / "base" / "chat_template.jinja").unlink()
    chat = next(iter(page.catalog.targets))
    page.catalog.targets["base"] = base
    mode, note = page.fit_mode("base", "chat", "")
    assert mode == "raw" and "no chat template" in note
    assert page.fit_mode(chat, "raw", note) == ("chat", ""), "as it was before"
    for target in ("base", chat):
        kept = page.fit_mode(target, "raw", "")[0]
        assert kept == gr.skip(), "the user's choice"


def test_a_thinking_switch_appears_where_the_chat_template_asks(
    page: GeneratePage, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "thinker")
    template = "{{ enable_thinking }}{% if reasoning_effort == 'max' %}{% endif %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    page.catalog.targets["thinker"] = TargetSpec(name="thinker", path=str(folder))
    spec = run_form(Sampling(), Limits())

    def shown(target: str, mode: str, form: Any) -> list[tuple[bool, str]]:
        updates = page.fit_switch(target, mode, form)
        return [(update["visible"], update["value"]) for update in updates]

    form: dict[str, Any] = {"values": {}}
    assert shown("tiny", "chat", form) == [(False, ""), (False, "")]
    assert shown("thinker", "raw", form) == [(False, ""), (False, "")]
    assert shown("thinker", "chat", form) == [(True, ""), (True, "")]
    effort = page.fit_switch("thinker", "chat", form)[1]
    assert [value for _, value in effort["choices"]] == ["", "max"]
    chosen = {"values": page.switch.choose("off", "max", spec, form)["values"]}
    assert shown("thinker", "chat", chosen) == [(True, "off"), (True, "max")]
    assert shown("tiny", "chat", chosen) == [(True, "off"), (True, "max")], "it can be taken back"
    raw = {"target": "tiny", "dtype": "auto", "method": "plain", "mode": "chat", "prompt": "Hi."}
    request = read_request(page.catalog, {**raw, "run_form": chosen})
    kwargs = {"enable_thinking": False, "reasoning_effort": "max"}
    assert request.sampling.chat_template_kwargs == kwargs
    assert "enable_thinking false" in request.sampling.words
    back = page.switch.choose("", "", spec, chosen)
    assert back["values"]["sampling"]["chat_template_kwargs"] == ""


def test_search_after_a_chat_answer_is_for_its_question(page: GeneratePage) -> None:
    run = finished(start(page.host, prompt="The question that was asked."))

    def prompt(typed: str, panel: object) -> object:
        forms: list[dict[str, Any]] = [{"values": {}}] * 2
        fields = ["tiny", "auto", "plain", "chat", "", typed]
        return page._search_request(*fields, *forms, panel)["prompt"]

    for shown in (run.log_id, run.id):  # the latter while and after a run streams into the panel
        assert prompt("", {"chat": shown}) == "The question that was asked."
    assert prompt("Another one.", {"chat": run.log_id}) == "Another one."
    assert prompt("", None) == ""
