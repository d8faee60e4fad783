"""Configurations besides plain decoding: a form of methods with their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import gradio as gr

from playground.experiments.forms import first_methods
from playground.host.controls import Control, FormSpec, group_of
from playground.host.menu import Choices
from playground.host.request import FormValues
from playground.host.runner import EngineHost
from playground.web.forms import RAW, SettingsForm, dropdown_of, skip_on_fault

NAME = "name"
"""Control of a configuration's name, beside those of its settings."""
NUM_FIRST = 2
"""Number of configurations at the start: the fastest so far, and one of another kind."""


class ConfigurationPicker:
    """A picker of methods, and a group of settings per added method.

    Attributes:
        form: its groups carry the keys of their methods; `read_configurations` reads its values.
    """

    def __init__(
        self, host: EngineHost, target: gr.Dropdown, prefix: str, *, named: bool = False
    ) -> None:
        """Draw picker and form, which is adapted to the picked target.

        Args:
            prefix: prefix of the components' ids.
            named: whether configurations have a name that the user can change.
        """
        self._catalog, self._menu, self._named = host.catalog, host.menu, named
        methods = self._menu.drafting(target.value)
        with gr.Group():
            self.adder = gr.Dropdown(
                methods, label="Configurations besides plain decoding", elem_id=f"{prefix}-method"
            )
            add = gr.Button("Add", size="sm", elem_id=f"{prefix}-add")
        types = self._catalog.types.values()
        self.form = SettingsForm(self._first(methods), elem_id=f"{prefix}-form", classes=types)
        form = [self.form.spec, self.form.values]
        target.change(
            self.fit_target, [target, self.adder, *form], [self.adder, self.form.spec], **RAW
        )
        add.click(self.add_method, [self.adder, *form], self.form.spec, **RAW)

    def spec(self, configurations: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """The form of configurations: each a method's key, and values that differ from its own."""
        groups: list[dict[str, Any]] = []
        values = {}
        for key, changed in configurations:
            groups.append(self._group(key, groups, changed))
            values[groups[-1]["name"]] = dict(changed)
        return {"groups": groups, "values": values}

    def _first(self, methods: Choices) -> dict[str, Any]:
        return self.spec((key, {}) for key in first_methods(self._catalog, methods)[:NUM_FIRST])

    def _group(
        self, key: Any, groups: Sequence[Mapping[str, Any]], changed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A method as a group of the form, under a unique name."""
        method = self._catalog.method(key)
        taken = {group["name"] for group in groups}
        weights = key.removeprefix("type:").removeprefix("local ").partition(" for ")[0]
        start = PurePath(weights).name
        names = (start if n == 1 else f"{start}-{n}" for n in range(1, len(taken) + 2))
        name = next(name for name in names if name not in taken)
        title = f"{name} · {method.title}" if name != method.title else name
        note = method.description
        group = group_of(name, title, method.config, is_open=False, note=note, values=changed)
        if self._named:
            named = Control(NAME, "name", "in tables and plots", "text", name)
            group["fields"].insert(0, asdict(named))
        return {**group, "method": key}

    @skip_on_fault("adding a method")
    def add_method(self, key: Any, spec: Any, form: Any) -> dict[str, Any]:
        """The form with one more configuration."""
        groups = [group.model_dump() for group in FormSpec.parse(spec).groups]
        groups.append(self._group(key, groups, {}))
        return {"groups": groups, "values": FormValues.of(form).values}

    @skip_on_fault("picking a target")
    def fit_target(self, target: Any, picked: Any, spec: Any, form: Any) -> list[Any]:
        """Updates of picker and form: methods that cannot run on the target are removed.

        If none remains, the form has the target's default ones.
        """
        menu = self._menu.drafting(target)
        adder, keys = dropdown_of(menu, picked), [key for _, key in menu]
        groups = [group.model_dump() for group in FormSpec.parse(spec).groups]
        kept = [group for group in groups if group["method"] in keys]
        if kept == groups:
            return [adder, gr.skip()]
        values = FormValues.of(form).values
        return [adder, {"groups": kept, "values": values} if kept else self._first(menu)]


def read_configurations(form: object) -> list[dict[str, Any]]:
    """Fields of a `ConfigurationForm` per configuration in the form's values.

    Raises ConfigError: these are not values of such a form.
    """
    values, configurations = FormValues.of(form), []
    for group, method in values.groups:
        settings = dict(values.values.get(group, {}))
        name = {NAME: settings.pop(NAME)} if NAME in settings else {}
        configurations.append({"method": method, "settings": settings, **name})
    return configurations
