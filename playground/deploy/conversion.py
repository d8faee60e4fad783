"""Converts methods to an engine's values and back, by the rows of its table.

A setting that has an effect, differs from its default and is written by no row causes a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, did_you_mean
from engine.tree import ChoiceTree
from playground.deploy import table
from playground.deploy.files import Version
from playground.deploy.table import IGNORED, PLACEHOLDER, Engine, Field, Method, Values

REASONS = {
    "acceptance use_relaxed_acceptance_for_thinking": "{title} verifies exactly: fewer tokens are "
    "accepted.",
    "drafting": "It always drafts as much as is set; here that is the maximum.",
    "confidence_threshold": "{title} always drafts the full length.",
    "eagle3_layers_to_capture": "{title} reads the layers from the checkpoint.",
    "global_pool_size": "It counts tokens; {title} counts requests.",
    "mask_token_id num_medusa_heads target_layer_ids": "{title} reads it from the checkpoint.",
    "pool_from_text": "{title} also fills its pool from the prompt.",
    "posterior_alpha posterior_threshold": "It only matters with typical acceptance.",
    "vocabulary": "{title} wants a draft model of the target's vocabulary.",
    "use_dynamic_tree": "{title} drafts the most probable token at each position.",
    "use_tree_spec": "{title} verifies one path, not a tree.",
}
"""By settings, separated by blanks, the reason added to the warning that they are dropped."""


@dataclass
class Writer:
    """Converts a config to an engine's values, and collects notes and warnings.

    Attributes:
        target: a name or path that the engine can load.
        version: the engine's release.
        resolve: `speculative_model` → a name or path that the engine can load.
        used: settings that were written, or reported as dropped.
    """

    engine: Engine
    config: Any
    target: str
    version: Version
    resolve: Callable[[str], str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        """A setting's value; marks it as written."""
        self.used.add(name)
        return getattr(self.config, name)

    def model(self) -> str:
        """A name or path of the drafter's weights that the engine can load."""
        name = self.take("speculative_model")
        if name is None:
            self.warnings.append(
                f"speculative_model is not set. Put the drafter's path in place of {PLACEHOLDER}."
            )
            return PLACEHOLDER
        return self.resolve(name)

    def chain_of_tree(self, name: str, who: str) -> int:
        """Draft length for an engine without choice trees; warns if the tree is not a chain."""
        tree = ChoiceTree(self.take(name))
        if tree != ChoiceTree.chain(tree.depth):
            self.warnings.append(
                f"{who} as a chain: the tree of {len(tree)} nodes is dropped and only the first "
                f"choice of each of its {tree.depth} depths is drafted; measured MAT falls."
            )
        return tree.depth

    def values(self) -> Values:
        """The engine's keys and values for the config.

        Raises:
            UnsupportedError: this release cannot run the method.
        """
        method = self.engine.method(self.config, self.version)
        values = {self.engine.key: method.name} if method.name else {}
        for row in method.rows:
            if row.is_for(self.version):
                self._write(row, values)
        self.notes.extend(method.notes)
        for codec in method.codecs:
            codec.write(self, values)
        return values

    def _write(self, row: table.Row, values: Values) -> None:
        if isinstance(row, table.DroppedSetting):
            self.used.update(row.settings.split())
            if row.when(self.config):
                self.warnings.append(row.sentence.format(c=self.config))
        elif isinstance(row, Field) and not (row.switch and not getattr(self.config, row.switch)):
            value = row.build(self) if row.build else self._encoded(row)
            if value is not None:
                values[row.key] = value

    def _encoded(self, row: Field) -> Any:
        value = self.take(row.setting)
        if value is None and row.requirement:
            title, method = self.engine.title, type(self.config).title
            reason = f"{title} needs {row.key} for {method}, and {row.setting} is not set."
            raise table.UnsupportedError(reason, row.requirement)
        return None if value is None else row.encode(value)

    def nested(self, config: MethodConfig) -> Writer:
        """A writer for a method inside this one, which shares its notes and warnings."""
        return replace(self, config=config, used=set())

    def finish(self, prefix: str = "") -> None:
        """Warn of every unwritten setting that has an effect and differs from its default."""
        title = self.engine.title
        for name in sorted(self.config.live_settings() - self.used):
            value = getattr(self.config, name)
            if value == type(self.config).model_fields[name].default:
                continue
            text = json.dumps(value) if isinstance(value, bool | str) else str(value)
            text = text if len(text) <= 60 else text[:57] + "..."
            reasons = {**self.engine.reasons, **REASONS}.items()
            reason = next((text for names, text in reasons if name in names.split()), "")
            dropped = f"{prefix}{name}={text} has no counterpart in {title} and is dropped."
            self.warnings.append(f"{dropped} {reason.format(title=title)}".rstrip())


@dataclass
class Reader:
    """Converts an engine's values to settings; a key whose value is None is absent.

    Attributes:
        used: keys that were read.
        methods: the engine's methods that were read.
    """

    engine: Engine
    values: Mapping[str, Any]
    settings: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    methods: list[Method] = field(default_factory=list)

    def find(self, *keys: str) -> str | None:
        """The first of these keys that has a value."""
        return next((key for key in keys if self.values.get(key) is not None), None)

    def typed(self, key: str, kind: type) -> Any:
        """A value of this type, parsed if it is text of a command line.

        Raises:
            ConfigError: it has another type.
        """
        value = self.values[key]
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        try:
            if isinstance(value, str):
                return adapter.validate_strings(value.strip())
            return adapter.validate_python(value, strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].partition(" should ")[2].partition(",")[0]
            raise ConfigError(f"{key} must {rule}, got {value!r:.80}.") from error

    def read(self, method: Method) -> Values:
        """The settings of one of the engine's methods, `decoding_type` included."""
        self.settings = dict(method.implied)
        self.notes.extend(method.read_notes)
        self.methods.append(method)
        for row in method.fields:
            self._read(row, method.decoding_type)
        for row in method.fields:
            if row.default is not None:
                self.settings.setdefault(row.setting, row.default)
        for codec in method.codecs:
            codec.read(self)
        return {"decoding_type": method.decoding_type, **self.settings}

    def ignored(self) -> tuple[str, ...]:
        """The keys that were not read and do not affect drafting.

        Raises:
            ConfigError: an unread key affects drafting, or is unknown to the engine.
        """
        engine = self.engine
        refusals = table.refusal_by_key(row for method in self.methods for row in method.rows)
        for key, value in self.values.items():
            if key in refusals:
                refusals[key].check(engine.title, key, value)
        unread = [key for key in self.values if key not in (*self.used, engine.key)]
        unknown = [key for key in unread if key not in engine.keys]
        if unknown:
            hint = did_you_mean(unknown[0], sorted(engine.keys))
            raise ConfigError(
                f"{engine.title} has no setting {', '.join(unknown):.200}. "
                f"{hint or 'Correct or remove it.'}"
            )
        return tuple(unread)

    def _read(self, row: Field, decoding_type: str) -> None:
        if row.switch and not self.settings.get(row.switch):
            return
        key = self.find(*row.keys)
        if key is None:
            self.notes += [row.note] if row.note and row.setting else []
        elif row.decode is not None:
            kind = row.kind or _setting_type(decoding_type, row.setting)
            value = row.decode(self.values[key] if kind is None else self.typed(key, kind))
            if value is not IGNORED:
                self.used.update(row.keys)
                self._set(row, key, value)
                self.notes += [row.read_note] if row.read_note and value else []
            elif row.note and not row.setting:
                self.notes.append(f"{key} is ignored: {row.note}")
                self.used.add(key)

    def _set(self, row: Field, key: str, value: Any) -> None:
        """Raises ConfigError: another key gives the setting another value."""
        others = [k for k in row.keys if self.values.get(k) not in (None, self.values[key])]
        if row.setting and self.settings.setdefault(row.setting, value) != value:
            others.append(f"another key for {row.setting}")
        if others:
            raise ConfigError(f"{key} contradicts {others[0]}. Keep one of them.")


def _setting_type(decoding_type: str, name: str) -> type | None:
    """The plain type of a setting, if it has one."""
    setting = methods()[decoding_type].model_fields.get(name)
    annotation = setting.annotation if setting else None
    union = get_origin(annotation) in (Union, UnionType)
    kinds = {int, float, bool, str, dict}.intersection(
        get_args(annotation) if union else (annotation,)
    )
    return kinds.pop() if kinds else None
