"""Opening a target by path or hub id: facts and drafters of a target before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from engine.model.facts import TargetFacts, facts_of
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from playground.host.local_drafters import draft_models_of, heads_of, size_text
from playground.host.request import read_dtype
from playground.host.runner import EngineHost
from playground.web.forms import RAW, Updates
from playground.web.results import definitions_html, sentence_html, show_fault_in, state_html
from presets import same_model

MAX_DRAFTERS = 6


class TargetOpener:
    """The form under the target picker; hidden on a page that may not open targets."""

    def __init__(self, host: EngineHost) -> None:
        self._host, self._catalog = host, host.catalog
        with gr.Accordion(
            "Open a folder, a GGUF or a hub id …", open=False, visible=self._catalog.may_open
        ):
            self.place = gr.Textbox(
                label="folder, .gguf file or hub id",
                placeholder="/models/my-model, ~/model.gguf or owner/model",
                elem_id="pg-open-place",
            )
            self.open = gr.Button("Open", variant="primary", elem_id="pg-open")
            self.facts = gr.HTML(elem_id="pg-open-facts")

    def listen(self, dtype: gr.Dropdown, target: gr.Dropdown, others: Sequence[Any]) -> None:
        """Show a target's facts and pick it, unless they say why it cannot be loaded.

        Args:
            others: target pickers of other pages, which then list it, too.
        """

        @show_fault_in(self.facts, where="opening a target")
        def open_target(place: Any, dtype: Any) -> Updates:
            spec, host = self._catalog.find_target(place), self._host
            kind = read_dtype(dtype)
            facts = facts_of(spec, dtype=kind, device=host.device, cache_dir=host.cache_dir)
            html = definitions_html(rows_of(self._catalog, spec, facts))
            if facts.fault is not None:
                return {self.facts: html + state_html("", "", error=facts.fault)}
            self._catalog.open(place)
            picked = gr.update(choices=self._catalog.target_choices(), value=spec.name)
            return {self.facts: html, **self.menus(others), target: picked}

        events = [self.open.click, self.place.submit]
        # A request to the hub may take seconds to fail.
        gr.on(events, lambda: sentence_html("Looking …"), None, self.facts, **RAW).then(
            open_target, [self.place, dtype], [self.facts, target, *others], **RAW
        )
        target.input(lambda: "", None, self.facts, **RAW)  # they are another target's

    def menus(self, pickers: Sequence[Any]) -> Updates:
        """Updates of target pickers with all current targets."""
        return dict.fromkeys(pickers, gr.update(choices=self._catalog.target_choices()))


def rows_of(catalog: Catalog, spec: TargetSpec, facts: TargetFacts) -> list[tuple[str, str]]:
    """Names of facts, and the facts as text."""
    free = "" if facts.free_bytes is None else f", {size_text(facts.free_bytes)} free"
    if facts.shares:
        free = f": {', '.join(facts.shares)}"
    context = "not stated" if facts.context_len is None else f"{facts.context_len:,} tokens"
    return [
        ("model", spec.title or spec.name),
        ("architecture", facts.architecture),
        ("parameters", millions(facts.num_parameters)),
        ("memory", f"{size_text(facts.num_bytes)} for its weights, loaded as {facts.dtype}{free}"),
        *([("quantization", ", ".join(facts.quantization))] if facts.quantization else []),
        *([("speed", f"Slow: {facts.slow}.")] if facts.slow else []),
        ("context", context),
        *([("licence", facts.licence)] if facts.licence else []),
        ("drafters", drafters_of(catalog, spec)),
    ]


def drafters_of(catalog: Catalog, spec: TargetSpec) -> str:
    """A sentence on the drafters that were made for a target, and what works on any target."""
    names_of_model = same_model(spec)
    shipped = [p for p in catalog.presets.values() if p.target in names_of_model]
    local = (*heads_of(spec), *draft_models_of(spec, catalog.targets.values()))
    made = list(dict.fromkeys(preset.title for preset in (*local, *shipped)))
    more = len(made) - MAX_DRAFTERS
    names = ", ".join(made[:MAX_DRAFTERS]) + (f" and {more} more" if more > 0 else "")
    return (
        f"{names or 'none made for it'}; methods without weights work on any target, any small "
        "model can draft for it (by text where its vocabulary is another), and Train makes one"
    )


def millions(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1e7 else f"{count:,}"
