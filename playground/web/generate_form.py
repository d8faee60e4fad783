"""Values of the Generate page's form: from a method, a stored run, a file, or the browser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gradio as gr

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from playground.errors import Fault, attempt
from playground.experiments.forms import closest_method
from playground.host.controls import changed_controls, group_of, settings_from
from playground.host.request import (
    DTYPES,
    MAX_PROMPT_CHARS,
    MAX_SYSTEM_CHARS,
    config_of,
    read_run_id,
)
from playground.host.runner import EngineHost
from playground.host.stream import stored_run
from playground.runs.details import request_of
from playground.web.address import link_params
from playground.web.memory import memory_choice, memory_settings, memory_text
from presets import MethodPreset
from storage import RunDetail


def method_form(
    method: MethodPreset, key: str, values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The form of a method's settings; `values` of the controls that differ from them."""
    config = method.config
    group = group_of("method", type(config).title, config, note=method.description, values=values)
    return {"groups": [group], "values": {"method": values} if values else {}, "method": key}


def run_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form of sampling and limits; `values` that differ from the defaults, by group."""
    groups = [
        group_of("sampling", "Sampling", Sampling()),
        group_of("limits", "Limits", Limits()),
    ]
    return {"groups": groups, "values": values}


def with_text_drafting(form: Any) -> Any:
    """The form's values with `vocabulary: text`, so that a draft model of any vocabulary fits."""
    match form:
        case {"values": {"method": dict(settings)} as groups}:
            names = [name for name in settings if name.rpartition(".")[2] == "vocabulary"]
            return {**form, "values": {**groups, "method": settings | dict.fromkeys(names, "text")}}
    return form


class GenerateForm:
    """Values of the components that make up the form, in this order.

    Target, method, the method's form, dtype, the form of sampling and limits, prompt format, system
    prompt, prompt.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host, self._catalog = host, host.catalog

    def initial_values(self, memory: Any, request: gr.Request) -> list[Any]:
        """Values of the URL's run, else those that the browser stored, else the initial ones."""
        memory = memory if isinstance(memory, dict) else {}
        link = link_params("generate", request.query_params)
        if link.get("run") and memory.get("foreign"):
            run = attempt(
                lambda: self.of_run(stored_run(self._host.log, read_run_id(link["run"]))),
                where="opening a run's settings",
            )
            if not isinstance(run, Fault):
                return list(run)
        picked: dict[str, Any] = {n: link[n] for n in ("target", "method") if n in link}
        return self._remembered({**memory, **picked})

    def _remembered(self, memory: Mapping[str, Any]) -> list[Any]:
        """Values that a browser stored; the initial value for what is invalid."""
        names = list(self._catalog.targets)
        target = memory_choice(memory, "target", names, names[0])
        choices = self._host.menu.choices(target)
        keys = [key for _, key in choices]
        key = memory_choice(memory, "method", keys, self._catalog.first_method(target))
        method = self._catalog.method(key)
        form = memory.get("form")
        old_key = form.get("method") if isinstance(form, dict) else None
        own = memory_settings(form, "method", partial(config_of, method)) if old_key == key else {}
        shared = {
            group: memory_settings(memory.get("run_form"), group, partial(settings_from, cls))
            for group, cls in (("sampling", Sampling), ("limits", Limits))
        }
        return [
            gr.update(choices=self._catalog.target_choices(), value=target),
            gr.update(choices=choices, value=key),
            method_form(method, key, own),
            memory_choice(memory, "dtype", DTYPES, "auto"),
            run_form(shared),
            memory_choice(memory, "mode", ("chat", "raw"), "chat"),
            memory_text(memory, "system", MAX_SYSTEM_CHARS),
            memory_text(
                {"prompt": self._catalog.first_prompt(), **memory}, "prompt", MAX_PROMPT_CHARS
            ),
        ]

    def of_run(self, run: RunDetail) -> tuple[Any, ...]:
        """Values that repeat a stored run.

        Raises ConfigError: its target or method is not offered here.
        """
        request = request_of(self._catalog, run)
        shared = {
            "sampling": changed_controls(request.sampling, Sampling()),
            "limits": changed_controls(request.limits, Limits()),
        }
        key = closest_method(self._catalog, request.config, request.target.name)
        settings = request.config.model_dump(exclude={"decoding_type"})
        picked = self.of_method(request.target.name, key, settings)
        values = request.dtype, run_form(shared), request.mode, request.system, request.prompt
        return *picked, *values

    def of_file(self, target: Any, config: MethodConfig) -> tuple[Any, Any]:
        """Values of method and form for settings from a file.

        Raises ConfigError: the target or the method is not offered here.
        """
        name = self._catalog.target(target).name
        key = closest_method(self._catalog, config, name)
        return self.of_method(name, key, config.model_dump(exclude={"decoding_type"}))[1:]

    def of_method(self, target: str, method: str, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Values of target, method and form for a method with these settings.

        Raises ConfigError: target or method is not offered here.
        """
        choices = self._host.menu.choices(self._catalog.target(target).name)
        picked = self._catalog.method(method)
        changes = changed_controls(picked.config.replace(**settings), picked.config)
        form = method_form(picked, method, changes)
        return target, gr.update(choices=choices, value=method), form
