"""The Runs page: the log as a table, and any run of it in the same panel as when it streamed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.host.live import LiveRun
from playground.host.request import read_run_id
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, follow, refusal
from playground.runs.again import GenerateFields, fields_of, request_again
from playground.runs.link import read_link
from playground.web.components import token_panels
from playground.web.controls import controls_of
from playground.web.generate import GeneratePage, run_form, session_of
from playground.web.panel_server import panel_server
from playground.web.runs_board import runs_board
from storage import RunDetail

PLACEHOLDER = "Open a run of the table to read its text and walk its steps."
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


class RunsPage:
    """Components and listeners of the page."""

    def __init__(self, host: EngineHost, history: History) -> None:
        self.host = host
        self.history = history
        self.table = runs_board(host.log, host.catalog.types, elem_id="pg-runs")
        since, step = panel_server(history)
        self.panel = token_panels(
            since=since, step=step, placeholder=PLACEHOLDER, elem_id="pg-run-panel"
        )
        self.table.open(self.open_row, None, self.panel, queue=False, **QUIET)
        self.table.again(
            self.run_again, None, [self.panel, self.table], concurrency_limit=None, **QUIET
        )
        self.table.stop(self.stop_runs, None, None, queue=False, **QUIET)

    def open_row(self, picked: gr.EventData = None) -> dict[str, Any]:  # type: ignore[assignment]
        return self.open_run(_id_of(picked))

    def open_run(self, run_id: object) -> dict[str, Any]:
        """The panel's message for a run, or the sentence that says why there is none."""

        def read() -> dict[str, Any]:
            if run_id is None:
                raise ConfigError("No run was picked.")
            return self.history.opened(read_run_id(run_id))

        message = attempt(read, where="opening a run")
        return refusal(message.sentence, None) if isinstance(message, Fault) else message

    async def run_again(
        self,
        request: gr.Request,
        picked: gr.EventData = None,  # type: ignore[assignment]
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Stream a stored run once more. Leaving the page closes this generator."""
        started = attempt(
            lambda: self.start_again(_id_of(picked), owner=session_of(request)),
            where="running a run again",
        )
        if isinstance(started, Fault):
            yield refusal(started.sentence, None), _fresh({})
            return
        try:
            async for message in follow(RunStream([started], self.host.ahead_of)):
                yield message, gr.skip()
        finally:
            started.cancel()
        yield gr.skip(), _fresh({"opened": started.log_id})

    def start_again(self, run_id: object, *, owner: str) -> LiveRun:
        """Queue a stored run once more.

        Raises:
            ConfigError, PromptError: it cannot be run again here.
            QueueFullError: too many are waiting.
        """
        return self.host.generate(
            request_again(self.host.catalog, self.stored(run_id)), owner=owner
        )

    def stored(self, run_id: object) -> RunDetail:
        """Raises ConfigError: there is no such run."""
        checked = read_run_id(run_id)
        run = self.host.log.get(checked)
        if run is None:
            raise ConfigError(f"No run {checked} is in the log. It may be in another one.")
        return run

    def stop_runs(self, request: gr.Request) -> None:
        self.host.cancel_owner(session_of(request))

    # ---- links, and the way to the Generate page

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """`?run=ID` opens that run, `?runs=…` that table; other links leave the page as it is."""
        page.load(
            self.follow_link,
            None,
            [tabs, self.panel, self.table],
            queue=False,
            **QUIET,
        )

    def follow_link(self, request: gr.Request) -> tuple[Any, Any, Any]:
        """What a link makes of tabs, panel and table."""
        params = dict(request.query_params)
        run_id, link = params.get("run"), params.get("runs")
        if not run_id and not link:
            return gr.skip(), gr.skip(), gr.skip()
        value: dict[str, Any] = {"opened": run_id or None}
        if link:
            query = attempt(lambda: read_link(link), where="following a link")
            value |= {"fault": query.sentence} if isinstance(query, Fault) else {"query": query}
        panel = self.open_run(run_id) if run_id else gr.skip()
        return gr.Tabs(selected="runs"), panel, _fresh(value)

    def listen_to_generate(self, tabs: gr.Tabs, generate: GeneratePage) -> None:
        """Take a run's settings and prompt to the Generate page."""

        def take(picked: gr.EventData = None) -> tuple[Any, ...]:  # type: ignore[assignment]
            asked = attempt(
                lambda: fields_of(self.host.catalog, self.stored(_id_of(picked))),
                where="opening a run in Generate",
            )
            if isinstance(asked, Fault):
                return _fresh({"fault": asked.sentence}), *[gr.skip()] * len(outputs[1:])
            return gr.skip(), gr.Tabs(selected="generate"), *_held(generate, asked)

        outputs = [
            self.table,
            tabs,
            generate.target,
            generate.method,
            generate.form,
            generate.dtype,
            generate.run_form,
            generate.mode,
            generate.system,
            generate.prompt,
        ]
        self.table.generate(take, None, outputs, queue=False, **QUIET)


def _held(generate: GeneratePage, asked: GenerateFields) -> tuple[Any, ...]:
    """What the Generate page's components hold: target, method, forms, prompt."""
    form = run_form()
    form["values"] = {
        name: {control["name"]: control["value"] for control in controls_of(chosen)}
        for name, chosen in (("sampling", asked.sampling), ("limits", asked.limits))
    }
    target, method, settings = generate.take(asked.target, asked.method, dict(asked.settings))
    return (
        target,
        method,
        settings,
        asked.dtype,
        form,
        asked.mode,
        asked.system,
        asked.prompt,
    )


def _fresh(value: dict[str, Any]) -> dict[str, Any]:
    """A value that the board takes up even if it is as the one before."""
    return {**value, "rev": secrets.token_urlsafe(6)}


def _id_of(picked: gr.EventData | None) -> Any:
    data = None if picked is None else picked._data
    return data.get("id") if isinstance(data, dict) else None
