"""The thinking switch of the Generate page, in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from tests.browser.pages import GeneratePage
from tests.playground.serving import serving_tiny
from tests.playground.tiny import save_tiny_llama

pytestmark = pytest.mark.browser
TEMPLATE = (
    "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
    "{% if reasoning_effort == 'max' %}<max>{% endif %}{{ messages[-1].content }}"
)


def test_thinking_is_switched_off_kept_and_stored(
    chromium: Any, tmp_path: Path, shots: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "thinker")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    thinker = TargetSpec(name="thinker", title="Thinker", path=str(folder))

    def adapt(tiny: Catalog) -> Catalog:
        return replace(tiny, targets={**tiny.targets, "thinker": thinker})

    with (
        serving_tiny(tmp_path, adapt=adapt) as served,
        GeneratePage.opened(chromium, served.url) as page,
    ):
        tab = page.tab
        assert not tab.locator("#pg-thinking").is_visible()
        page.pick("target", "Thinker")
        tab.locator("#pg-thinking").wait_for()
        page.pick("thinking", "Thinking: off")
        page.pick("effort", "Reasoning effort: max")
        for scheme in ("light", "dark"):
            tab.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
            tab.screenshot(path=shots / f"thinking-{scheme}.png")
        tab.wait_for_function(
            "JSON.parse(localStorage.getItem('pg-generate'))?.run_form?.values?.sampling"
            "?.chat_template_kwargs?.includes('max')"
        )
        page.short(4)
        page.generate("Hello.")
        run = served.log.get(served.host.runs.all()[-1].log_id or "")
        assert run is not None and served.host.loaded is not None
        kwargs = {"enable_thinking": False, "reasoning_effort": "max"}
        assert run.sampling["chat_template_kwargs"] == kwargs
        prompt = served.host.loaded.tokenizer.decode(list(run.prompt_ids))  # type: ignore[union-attr]
        assert prompt == "<off><max>Hello."
        page.reload()
        tab.wait_for_function(
            "document.querySelector('#pg-thinking input')?.value === 'Thinking: off'"
        )
        page.pick("thinking", "Thinking: default")
        page.pick("effort", "Reasoning effort: default")
        page.pick("target", "Tiny")
        tab.locator("#pg-thinking").wait_for(state="hidden")
        page.check_clean()
