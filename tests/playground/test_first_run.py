"""What a newcomer finds: a method that pays on any machine, and an example on which it shows."""

from __future__ import annotations

import asyncio

import gradio as gr

from playground.experiments.forms import first_methods
from playground.host.catalog import Catalog
from playground.host.menu import RECOMMENDED, MethodMenu
from playground.web.forms import PromptForm
from storage import RunLog

EMBEDDED = "smollm2-135m-instruct"


def test_start_is_the_fastest_for_the_target_else_needs_no_weights(log: RunLog) -> None:
    catalog = Catalog.shipped()
    assert catalog.first_method(EMBEDDED) == "suffix-draft-smollm2-135m"
    assert catalog.first_method(EMBEDDED, alone=True) == "suffix-smollm2-135m"
    assert catalog.first_method("vicuna-7b-v1.3") == "ngram"
    label, key = MethodMenu(catalog, log).choices(EMBEDDED)[0]
    assert key == "suffix-draft-smollm2-135m" and label.endswith(RECOMMENDED)
    assert first_methods(catalog, catalog.method_choices(EMBEDDED))[0] == key


def test_every_prompt_starts_with_an_example_that_repeats_itself() -> None:
    async def drawn() -> PromptForm:  # Gradio leaves event loops unclosed unless one is running
        with gr.Blocks(analytics_enabled=False):
            form = PromptForm(Catalog.shipped(), "pg-cmp")
            form.head()
            form.body(about_system="optional", lines=2)
        return form

    assert asyncio.run(drawn()).prompt.value.startswith("Summarise this text")
