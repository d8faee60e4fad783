"""What a page finds again: runs whose page was left, forms that a browser kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from engine.config import Limits
from engine.model.sources import TargetSpec
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, adopt, follow
from playground.web.address import tab_switch
from playground.web.forms import PromptForm
from playground.web.generate import GeneratePage
from playground.web.memory import memory_settings, owner_of, tab_identity
from tests.playground.asks import finished, start
from tests.playground.test_http import held
from tests.playground.tiny import save_tiny_llama

SLOW: dict[str, Any] = {"settings": {"delay_ms": "20"}, "limits": {"max_new_tokens": "40"}}


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


def asked(**params: str) -> Any:
    """A request of the browser at an address."""
    return SimpleNamespace(query_params=params, session_hash="session")


async def first_of(messages: AsyncIterator[Any]) -> Any:
    """The first message; then the page is left, as Gradio leaves a generator."""
    async for message in messages:
        await messages.aclose()  # type: ignore[attr-defined]
        return message


def followed(page: GeneratePage, *known: str | None, **params: str) -> list[Any]:
    """All messages to a page that opens at an address."""

    async def all_of() -> list[Any]:
        return [message async for message in page.follow_link(*known, asked(**params))]

    return asyncio.run(all_of())


def test_a_run_goes_on_when_its_page_is_left(page: GeneratePage, host: EngineHost) -> None:
    limits = {"values": {"limits": {"max_new_tokens": "12", "ignore_eos": True}}}
    run_of = page.run()(asked(), *held(run_form=limits, tab="tab"))
    (meta,) = asyncio.run(first_of(run_of))["runs"]
    run = host.runs.get(meta["id"])
    assert run is not None and not run.watchers
    assert finished(run).state == "completed"


def test_a_page_that_finds_a_run_follows_it_to_its_end(
    page: GeneratePage, host: EngineHost
) -> None:
    run = start(host, owner="gone", **SLOW)
    messages = followed(page, "mine", None, None, tab="generate", run=run.id)
    assert all(message["resync"] for message in messages), "the first may not be seen"
    assert messages[-1]["ends"][run.id]["n"] == run.num_events
    assert run.owner == "mine", "nobody else watched it"
    opened = followed(page, "mine", None, None, tab="generate", run=run.log_id or "")
    assert [m["chat"] for m in opened] == [run.log_id], "over: from the log, and its chat goes on"


def test_a_run_that_is_watched_stays_its_page_s(host: EngineHost) -> None:
    run = start(host, owner="first", **SLOW)
    watching = follow(RunStream([run], host.ahead_of))

    async def find_meanwhile() -> None:
        await anext(watching)
        adopt(run, "second")
        await watching.aclose()  # type: ignore[attr-defined]

    asyncio.run(find_meanwhile())
    assert run.owner == "first" and run.watchers == 0
    finished(run)


def test_without_an_address_only_what_goes_on_is_found(
    page: GeneratePage, host: EngineHost
) -> None:
    over = finished(start(host))
    (nothing,) = followed(page, "tab", None, over.log_id)
    assert nothing == gr.skip()
    (shown,) = followed(page, "tab", over.log_id, None)
    assert shown["chat"] == over.log_id, "a reload"
    goes_on = start(host, **SLOW)
    assert len(followed(page, "tab", None, goes_on.id)) > 2


def test_stop_ends_what_is_on_show_whoever_began_it(page: GeneratePage, host: EngineHost) -> None:
    run = start(host, owner="another tab", settings={"delay_ms": "20"})
    page.stop_runs("mine", {"chat": run.id}, asked())
    assert finished(run).state == "cancelled"


def test_a_kept_form_loses_only_what_does_not_fit_any_more() -> None:
    form = {"values": {"limits": {"max_new_tokens": -1, "gone": 2, "ignore_eos": True}}}
    kept = memory_settings(form, "limits", partial(settings_from, Limits))
    assert kept == {"ignore_eos": True}


def test_the_form_comes_back_as_it_was_kept_or_as_the_address_s_run_had_it(
    page: GeneratePage, host: EngineHost
) -> None:
    kept = {
        "target": "gone",
        "method": "scripted",
        "form": {"method": "scripted", "values": {"method": {"max_draft_len": 3}}},
        "mode": "raw",
        "prompt": "Unsent.",
    }
    target, method, form, dtype, _, mode, system, prompt = page.form_values.initial_values(kept, {})
    picked = (target["value"], method["value"], dtype, mode)
    assert picked == ("tiny", "scripted", "auto", "raw")
    assert form["values"] == {"method": {"max_draft_len": 3}}
    assert (system, prompt) == ("", "Unsent.")
    run = finished(start(host, prompt="Asked.", limits={"max_new_tokens": "7"}))
    address = {"tab": "generate", "run": run.log_id or ""}
    *_, run_form, mode, system, prompt = page.form_values.initial_values(
        {**kept, "foreign": True}, address
    )
    assert run_form["values"]["limits"]["max_new_tokens"] == 7
    assert (mode, prompt) == ("chat", "Asked.")
    assert page.form_values.initial_values(kept, address)[-1] == "Unsent.", (
        "a reload: what was typed since"
    )


@pytest.mark.parametrize("tab", [None, "", 3, {"a": 1}, "x" * 65])
def test_what_is_no_tab_is_told_apart_by_its_session(tab: object) -> None:
    assert owner_of(tab, asked()) == "session"


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
