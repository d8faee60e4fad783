"""Configurations besides plain decoding: a form of methods with their settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import gradio as gr

from playground.experiments.forms import first_methods
from playground.host.controls import FormSpec, FormValues, Group, Values, changed_by, spec_of
from playground.host.menu import Choices
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

    def spec(self, configurations: Iterable[tuple[str, Values]]) -> dict[str, Any]:
        """The form of configurations: each a method's key, and settings other than its own."""
        groups: list[Group] = []
        for key, settings in configurations:
            groups.append(self._group(key, groups, settings))
        return spec_of(*groups)

    def _first(self, methods: Choices) -> dict[str, Any]:
        return self.spec((key, {}) for key in first_methods(self._catalog, methods)[:NUM_FIRST])

    def _group(self, key: Any, groups: Sequence[Group], settings: Values) -> Group:
        """A method as a group of the form, under a unique name."""
        method = self._catalog.method(key)
        config, taken = changed_by(method.config, settings), {group.name for group in groups}
        weights = key.removeprefix("type:").removeprefix("local ").partition(" for ")[0]
        start = PurePath(weights).name
        names = (start if n == 1 else f"{start}-{n}" for n in range(1, len(taken) + 2))
        name = next(name for name in names if name not in taken)
        title = f"{name} · {method.title}" if name != method.title else name
        group = Group.of(name, title, config, open=False, note=method.description, method=key)
        if not self._named:
            return group
        texts = {NAME: ("name", "in tables and plots")}
        return group.replace(texts=texts, values={NAME: name, **group.values})

    @skip_on_fault("adding a method")
    def add_method(self, key: Any, spec: Any, form: Any) -> dict[str, Any]:
        """The form with one more configuration."""
        groups = FormSpec.parse(spec).groups
        added = self._group(key, groups, {})
        return spec_of(*groups, added, values=FormValues.of(form).values)

    @skip_on_fault("picking a target")
    def fit_target(self, target: Any, picked: Any, spec: Any, form: Any) -> list[Any]:
        """Updates of picker and form: methods that cannot run on the target are removed.

        If none remains, the form has the target's default ones.
        """
        menu = self._menu.drafting(target)
        adder, keys = dropdown_of(menu, picked), [key for _, key in menu]
        groups, values = FormSpec.parse(spec).groups, FormValues.of(form).values
        kept = [group for group in groups if group.method in keys]
        if kept == groups:
            return [adder, gr.skip()]
        return [adder, spec_of(*kept, values=values) if kept else self._first(menu)]


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
