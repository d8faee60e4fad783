"""What the Generate page begins with and takes from what is on show; browser tests do the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from engine.model.sources import TargetSpec
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.address import tab_switch
from playground.web.forms import PromptForm
from playground.web.generate import GeneratePage
from playground.web.memory import owner_of, tab_identity
from tests.playground.asks import finished, start
from tests.playground.tiny import save_tiny_llama


@pytest.fixture
def page(host: EngineHost, history: History) -> GeneratePage:
    async def build() -> GeneratePage:  # Gradio leaves event loops unclosed unless one is running
        with gr.Blocks(analytics_enabled=False):
            return GeneratePage(host, Experiments(host), history, tab_identity(), tab_switch())

    return asyncio.run(build())


def test_a_target_without_a_chat_template_is_completed(page: GeneratePage, tmp_path: Path) -> None:
    base = TargetSpec(name="base", path=str(save_tiny_llama(tmp_path / "base")))
    (tmp_path / "base" / "chat_template.jinja").unlink()
    chat = next(iter(page.catalog.targets))
    page.catalog.targets["base"] = base
    mode, ours, note = page.fit_mode("base", "chat", False)
    assert (mode, ours) == ("raw", True) and "no chat template" in note
    assert page.fit_mode(chat, "raw", ours) == ("chat", False, ""), "as it was before"
    for target in ("base", chat):
        kept = page.fit_mode(target, "raw", False)[0]
        assert kept == gr.skip(), "the user's choice"


def test_every_prompt_starts_with_an_example_that_repeats_itself() -> None:
    async def drawn() -> PromptForm:
        with gr.Blocks(analytics_enabled=False):
            form = PromptForm(Catalog.shipped(), "pg-cmp")
            form.head()
            form.body(about_system="optional", lines=2)
        return form

    assert asyncio.run(drawn()).prompt.value.startswith("Summarise this text")


@pytest.mark.parametrize("tab", [None, "", 3, {"a": 1}, "x" * 65])
def test_what_is_no_tab_is_told_apart_by_its_session(tab: object) -> None:
    request: Any = SimpleNamespace(session_hash="session")
    assert owner_of(tab, request) == "session"


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
