"""The Sweep page: choose what varies, watch the trials, take the best settings along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr
import plotly

from engine.errors import ConfigError
from playground.errors import Fault, attempt
from playground.experiments.sweep.plan import MAX_TRIALS, OBJECTIVES, SweepForm, plan_of_form
from playground.experiments.sweep.plots import plot
from playground.experiments.sweep.service import Sweeps
from playground.experiments.sweep.space import tunables_of
from playground.experiments.sweep.store import MAX_NAME
from playground.host.catalog import Catalog
from playground.host.request import DTYPES, read_count
from playground.web.benchmark import method_menu
from playground.web.components import given, static_text
from playground.web.generate import GeneratePage
from playground.web.panel_server import answer

SCRIPTS = ("dom.js", "sweep_form.js", "sweep_plots.js", "sweep_results.js", "sweep.js")
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
MAX_NUMBER = 10_000_000
Served = Callable[[Any], dict[str, Any]]


class SweepPage:
    """The page's one component; it fires `use` with a trial's target, method and settings."""

    def __init__(self, service: Sweeps) -> None:
        gr.set_static_paths([PLOTLY])
        self.service = service
        self.board = gr.HTML(
            value={"open": None},
            html_template='<div class="sweep"></div>',
            css_template=static_text("sweep.css"),
            js_on_load=given(plotly=f"gradio_api/file={PLOTLY}") + static_text(*SCRIPTS),
            apply_default_css=False,
            server_functions=[*_form_server(service.catalog), *_sweep_server(service)],
            elem_id="pg-sweep",
        )

    def listen_to_links(self, page: gr.Blocks, tabs: gr.Tabs) -> None:
        """Open the page for addresses with `sweep`."""

        def load(request: gr.Request) -> tuple[Any, Any]:
            asked = dict(request.query_params)
            if not asked.get("sweep") or asked.get("run"):
                return gr.skip(), gr.skip()
            return gr.Tabs(selected="sweep"), {"open": asked["sweep"][:MAX_NAME]}

        page.load(load, None, [tabs, self.board], queue=False, **QUIET)

    def listen(self, tabs: gr.Tabs, generate: GeneratePage) -> None:
        """Take a trial to the Generate page when `use` is fired."""

        def use(picked: gr.EventData = None) -> Any:  # type: ignore[assignment]
            data = {} if picked is None else picked._data
            filled = attempt(
                lambda: generate.take(data["target"], data["method"], data["settings"]),
                where="using a trial",
            )
            if isinstance(filled, Fault):
                raise gr.Error(filled.sentence, print_exception=False)
            return gr.Tabs(selected="generate"), *filled

        self.board.use(
            use,
            None,
            [tabs, generate.target, generate.method, generate.form.asked],
            queue=False,
            **QUIET,
        )


def _form_server(catalog: Catalog) -> list[Served]:
    """What the form asks."""

    def menus_of(asked: Any) -> dict[str, Any]:
        return answer(lambda: _menus(catalog), where="listing the choices")

    def methods_of(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            return {"methods": method_menu(catalog, _field(asked, "target"))}

        return answer(read, where="listing the methods")

    def fields_of(asked: Any) -> dict[str, Any]:
        return answer(
            lambda: _method_fields(catalog, _field(asked, "method")), where="listing the settings"
        )

    def outlook_of(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            plan = plan_of_form(catalog, asked)
            return {
                "num_points": plan.space.num_points,
                "num_trials": plan.num_trials,
                "num_pairs": plan.num_turns,
            }

        return answer(read, where="checking the sweep")

    return [menus_of, methods_of, fields_of, outlook_of]


def _menus(catalog: Catalog) -> dict[str, Any]:
    """Everything that does not depend on target and method."""
    suites = [[suite.title, name] for name, suite in catalog.suites.items()]
    defaults = {
        name: SweepForm.model_fields[name].default
        for name in ("objective", "mode", "trials", "prune", "limit", "max_new_tokens", "seed")
    }
    first = SweepForm.model_fields["suite"].default
    defaults["suite"] = first if first in catalog.suites else suites[0][1]
    return {
        "targets": [list(choice) for choice in catalog.target_choices()],
        "dtypes": list(DTYPES),
        "suites": suites,
        "objectives": [
            {"key": key, "title": title, "formula": formula}
            for key, (title, formula) in OBJECTIVES.items()
        ],
        "defaults": defaults,
    }


def _method_fields(catalog: Catalog, key: object) -> dict[str, Any]:
    """A method's settings as the form draws them."""
    method = catalog.method(key)
    return {
        "title": method.title,
        "summary": method.summary,
        "lossless": method.config.lossless,
        "fields": [{**asdict(k), "suggested": k.suggested} for k in tunables_of(method.config)],
    }


def _sweep_server(service: Sweeps) -> list[Served]:
    """What is asked of sweeps."""

    def start(asked: Any) -> dict[str, Any]:
        return answer(lambda: {"name": service.start(asked)}, where="starting a sweep")

    def resume(asked: Any) -> dict[str, Any]:
        def do() -> dict[str, Any]:
            trials = _field(asked, "trials")
            if trials is not None:
                trials = read_count("trials", trials, most=MAX_TRIALS)
            return {"name": service.resume(_name(asked), trials)}

        return answer(do, where="resuming a sweep")

    def stop(asked: Any) -> dict[str, Any]:
        def do() -> dict[str, Any]:
            service.stop(_name(asked))
            return {}

        return answer(do, where="stopping a sweep")

    def forget(asked: Any) -> dict[str, Any]:
        def do() -> dict[str, Any]:
            service.delete(_name(asked))
            return {}

        return answer(do, where="forgetting a sweep")

    def list_all(asked: Any) -> dict[str, Any]:
        return answer(lambda: {"sweeps": service.newest()}, where="listing the sweeps")

    def look(asked: Any) -> dict[str, Any]:
        return answer(
            lambda: service.look(_name(asked), _field(asked, "have")), where="reading a sweep"
        )

    def draw(asked: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            return plot(service.store.load(_name(asked)), str(_field(asked, "kind")))

        return answer(read, where="drawing a plot")

    def export(asked: Any) -> dict[str, Any]:
        return answer(lambda: service.yaml(_name(asked), _number(asked)), where="exporting a trial")

    def settings(asked: Any) -> dict[str, Any]:
        return answer(lambda: service.use(_name(asked), _number(asked)), where="using a trial")

    return [start, resume, stop, forget, list_all, look, draw, export, settings]


def _field(asked: Any, name: str) -> Any:
    if not isinstance(asked, dict):
        raise ConfigError(f"The request must have {name}, got {asked!r:.80}.")
    return asked.get(name)


def _name(asked: Any) -> str:
    name = _field(asked, "name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigError(f"name must be the name of a sweep, got {name!r:.80}.")
    return name


def _number(asked: Any) -> int | None:
    """Number of a trial; None for the best."""
    number = _field(asked, "number")
    return None if number is None else read_count("number", number, most=MAX_NUMBER)
