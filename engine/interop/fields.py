"""A serving engine as tables of its methods' settings, each read both ways.

An engine's file lists, for every method that it takes, rows of `Field` (our setting, the engine's
key, how a value goes there and comes back, the releases that have it) and of `Loss` (what a setting
loses there). `export` and `import_` walk these rows; what no row can say is a small function of the
engine's file, called after them. A setting that has an effect, differs from its default and was
written by no row becomes a warning: nothing is dropped in silence.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop.handoff import Context, Export, File, Imported, ReadYaml, Version
from engine.tree import ChoiceTree

Values = dict[str, Any]
NO_MODEL = "DRAFTER"
"""Stands for the drafter's weights where the method names none."""
UNLIKE = ("Autoregressive", "Combined", "MTP")
"""Methods that stand for no other: they draft nothing, combine, or need layers of the target."""
ONE_AT_A_TIME = "Export the method that drafts most of the accepted tokens by itself."
DYNAMIC = "dynamic_tree_max_topK max_total_draft_tokens max_non_leaves_per_layer"
POOL_RULES = "is_keep_all is_use_oldest is_public_pool"
RELAXED = "relaxed_topk relaxed_delta begin_thinking_phase_token end_thinking_phase_token"
IGNORED = object()
"""A value of the engine's that has no meaning here."""
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a name or path"}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


class NotTakenError(ConfigError):
    """The engine cannot take the method; `nearest` says what comes nearest."""

    def __init__(self, sentence: str, nearest: str = "") -> None:
        super().__init__(sentence)
        self.nearest = nearest


# ---- the tables


_REASONS = {
    "acceptance": "{title} verifies exactly: fewer tokens are accepted.",
    "adaptive": "It drafts the same length at every step.",
    "confidence_threshold": "{title} always drafts the full length.",
    "eagle3_layers_to_capture": "{title} reads the layers from the checkpoint.",
    "escape": "It only matters with mix_contexts.",
    "global_pool_size": "It counts tokens; {title} counts requests.",
    "mask_token_id": "{title} reads it from the checkpoint.",
    "num_medusa_heads": "{title} reads it from the checkpoint.",
    "pool_from_text": "{title} also fills its pool from the prompt.",
    "posterior_alpha": "It only matters with typical acceptance.",
    "posterior_threshold": "It only matters with typical acceptance.",
    "target_layer_ids": "{title} reads it from the checkpoint.",
    "text_weight": "It only matters with mix_contexts.",
    "use_relaxed_acceptance_for_thinking": "{title} verifies exactly: fewer tokens are accepted.",
    "use_tree_spec": "{title} verifies one path, not a tree.",
}
"""What to add to the warning that a setting is dropped."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Releases that a row is for: from `since` to before `until`."""

    since: Version = ()
    until: Version | None = None

    def is_for(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)


@dataclass(frozen=True, slots=True)
class Field(_Row):
    """Our setting and the engine's key.

    Attributes:
        ours: empty for a key that stands for no setting here.
        also: other spellings of the key, read only.
        out: our value → the engine's; None leaves the key out.
        back: the engine's value → ours, or `IGNORED`; without it the key is written only.
        write: makes the engine's value where more than our setting goes into it.
        kind: type of the engine's value, where it is not that of our setting.
        given: our switch without which the key is neither written nor read.
        needed: whether the engine cannot do without, so that our setting must not be None.
        absent: our value where the key is absent, told by `note`; None = the method's default.
    """

    ours: str
    theirs: str
    also: tuple[str, ...] = ()
    out: Callable[[Any], Any] = _same
    back: Callable[[Any], Any] | None = _same
    write: Callable[[Writer], Any] | None = None
    kind: type | None = None
    given: str = ""
    needed: bool = False
    absent: Any = None
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return self.theirs, *self.also


@dataclass(frozen=True, slots=True)
class Loss(_Row):
    """A warning, `{c}` in it being the config, given where `when` holds.

    It stands for the warnings that its settings (`ours`, separated by blanks) are dropped.
    """

    ours: str
    sentence: str
    when: Callable[[Any], bool] = lambda config: True


def same(*names: str, given: str = "") -> tuple[Field, ...]:
    """Settings that have our names there."""
    return tuple(Field(name, name, given=given) for name in names)


def const(theirs: str, value: Any, **rest: Any) -> Field:
    """A key that always has this value; another one is ignored on reading, told by `note`."""

    def back(given: Any) -> Any:
        return None if str(given) == str(value) else IGNORED

    return Field("", theirs, write=lambda writer: value, back=back, **rest)


def weights(theirs: str, *also: str, **rest: Any) -> Field:
    """The drafter's weights."""

    def back(model: str) -> str | None:
        return None if model == NO_MODEL else model

    return Field("speculative_model", theirs, also, write=Writer.model, back=back, **rest)


@dataclass(frozen=True, slots=True)
class Method(_Row):
    """A method of ours as an engine takes it.

    Attributes:
        ours: our decoding type.
        theirs: the engine's name for it, under the engine's `key`; empty if nothing names it.
        also: other names that are read as this method.
        fixed: our settings that the engine's method implies.
        outside: why later releases do not take it, and what comes nearest.
        notes: what to know on writing; `read_notes` on reading.
        known: further keys of the engine's method that mean nothing here.
    """

    ours: str
    theirs: str
    rows: tuple[Field | Loss, ...] = ()
    also: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    outside: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    read_notes: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    write: Callable[[Writer, Values], None] | None = None
    read: Callable[[Reader], None] | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine.

    Attributes:
        versions: releases that differ, newest first; a newer one counts as the first.
        trees: what it takes of choice trees, in a few words.
        key: its key for the method's name.
        refused: per decoding type that it does not take, why not and what comes nearest.
        files: the values as files.
        parse: a text as values, and the target if the text names it.
        pick: which of its methods the values are.
        known: keys of any method and release.
        reasons: why a setting of ours has no counterpart, where it is not what `_REASONS` says.
    """

    name: str
    title: str
    versions: tuple[tuple[str, str], ...]
    trees: str
    key: str
    methods: tuple[Method, ...]
    refused: Mapping[str, tuple[str, str]]
    files: Callable[[Writer, Values], tuple[File, ...]]
    parse: Callable[[str, ReadYaml], tuple[Mapping[str, Any], str | None]]
    pick: Callable[[Reader], Method]
    known: frozenset[str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> str:
        return self.versions[0][0]


def named(methods: Iterable[Method], name: str) -> Method | None:
    """The first method that the engine calls so."""
    return next((m for m in methods if m.theirs and name in (m.theirs, *m.also)), None)


# ---- writing


@dataclass
class Writer:
    """Collects what an export says while its values are made."""

    engine: Engine
    config: Any
    context: Context
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    models: list[str] = field(default_factory=list)
    files: list[File] = field(default_factory=list)

    def at_least(self, *version: int) -> bool:
        """Whether the engine's release is this one or newer."""
        return self.context.version >= version

    def take(self, name: str) -> Any:
        """A setting's value, from now on counted as written."""
        self.used.add(name)
        return getattr(self.config, name)

    def model(self) -> str:
        """The drafter's weights as the engine can load them."""
        named = self.take("speculative_model")
        if named is None:
            self.warnings.append(
                f"speculative_model is not set. Put the drafter's path in place of {NO_MODEL}."
            )
            return NO_MODEL
        self.models.append(self.context.resolve(named))
        return self.models[-1]

    def chain_of_levels(self, who: str) -> int:
        """Draft length of an engine without dynamic trees; warns where the method grows one."""
        levels = int(self.take("max_draft_len"))
        if self.take("use_dynamic_tree"):
            nodes = self.config.max_total_draft_tokens
            self.used.update(DYNAMIC.split())
            self.warnings.append(
                f"{who} a chain: the dynamic tree of {nodes} nodes (use_dynamic_tree, "
                f"{', '.join(DYNAMIC.split())}) is dropped and only the likeliest token of each of "
                f"its {levels} levels is drafted; measured MAT falls."
            )
        return levels

    def chain_of_tree(self, name: str, who: str) -> int:
        """Draft length of an engine without choice trees; warns where the tree is no chain."""
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
            NotTakenError: this release cannot take it.
        """
        method = self._method()
        values = {self.engine.key: method.theirs} if method.theirs else {}
        for row in method.rows:
            if not row.is_for(self.context.version):
                continue
            if isinstance(row, Field):
                self._write(row, values)
            else:
                self.used.update(row.ours.split())
                if row.when(self.config):
                    self.warnings.append(row.sentence.format(c=self.config))
        self.notes.extend(method.notes)
        if method.write:
            method.write(self, values)
        return values

    def part(self, config: MethodConfig) -> Writer:
        """A writer for a method inside this one, with the same notes and warnings."""
        return Writer(
            self.engine, config, self.context, self.notes, self.warnings, models=self.models
        )

    def _method(self) -> Method:
        cls, title = type(self.config), self.engine.title
        found = [m for m in self.engine.methods if m.ours == self.config.decoding_type]
        for method in found:
            if method.is_for(self.context.version):
                return method
        if not found:
            none = f"{title} has no {cls.title}.", f"{self._nearest()}."
            raise NotTakenError(*self.engine.refused.get(self.config.decoding_type, none))
        since = ".".join(map(str, found[0].since))
        later = f"{title} has {found[0].theirs or cls.title} from {since} on."
        nearest = f"Release {since} or newer; before, {self._nearest()}."
        raise NotTakenError(*(found[0].outside or (later, nearest)))

    def _nearest(self) -> str:
        """What this release takes that needs weights of its own, or none, as this method."""
        own, known = type(self.config), methods()
        takes = [
            known[method.ours]
            for method in self.engine.methods
            if method.ours not in UNLIKE and method.is_for(self.context.version)
        ]
        like = [cls.title for cls in takes if _needs_weights(cls) == _needs_weights(own)]
        if not like:
            return ", ".join(cls.title for cls in takes)
        why = "with weights of their own" if _needs_weights(own) else "without weights"
        return f"{', '.join(dict.fromkeys(like))}: {why}, too"

    def _write(self, row: Field, values: Values) -> None:
        if row.given and not getattr(self.config, row.given):
            return
        if row.write is not None:
            value = row.write(self)
        else:
            ours = self.take(row.ours)
            if ours is None and row.needed:
                title, method = self.engine.title, type(self.config).title
                raise NotTakenError(
                    f"{title} needs {row.theirs} for {method}, and {row.ours} is not set.",
                    f"Set {row.ours}, e.g. to the draft model's block size less one.",
                )
            value = None if ours is None else row.out(ours)
        if value is not None:
            values[row.theirs] = value

    def finish(self, prefix: str = "") -> None:
        """Warn of every setting that has an effect, is not at its default and was not written."""
        title = self.engine.title
        for name in sorted(self.config.live_settings() - self.used):
            value = getattr(self.config, name)
            if value == type(self.config).model_fields[name].default:
                continue
            dropped = (
                f"{prefix}{name}={_short(value)} has no counterpart in {title} and is dropped."
            )
            reason = self.engine.reasons.get(name) or _REASONS.get(name, "").format(title=title)
            self.warnings.append(f"{dropped} {reason}".rstrip())


def _needs_weights(cls: type[MethodConfig]) -> bool:
    return "speculative_model" in cls.model_fields


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def export(engine: Engine, config: MethodConfig, context: Context, version: str) -> Export:
    """A method as an engine takes it, or why it does not."""
    writer = Writer(engine, config, context, list(context.notes))
    try:
        files = engine.files(writer, writer.values())
    except NotTakenError as error:
        return Export(engine.name, version, refusal=str(error), nearest=error.nearest)
    writer.finish()
    files = (*files, *writer.files)
    return Export(engine.name, version, files, tuple(writer.notes), tuple(writer.warnings))


# ---- reading


@dataclass
class Reader:
    """An engine's values while they are read as settings of ours; keys with None are absent."""

    values: Mapping[str, Any]
    settings: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    def find(self, *keys: str) -> str | None:
        """The first of these keys that is there."""
        return next((key for key in keys if self.values.get(key) is not None), None)

    def typed(self, key: str, kind: type) -> Any:
        """A value of this type; from a command line it comes as text.

        Raises:
            ConfigError: it is of another one.
        """
        value = self.values[key]
        try:
            if isinstance(value, str):
                return _ADAPTERS[kind].validate_strings(value.strip())
            return _ADAPTERS[kind].validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{key} must be {_KINDS[kind]}, got {value!r:.80}.") from error

    def read(self, method: Method) -> Values:
        """Our settings for one of the engine's methods, `decoding_type` included."""
        self.settings = dict(method.fixed)
        self.notes.extend(method.read_notes)
        self.known |= method.known
        fields = [row for row in method.rows if isinstance(row, Field)]
        for row in fields:
            self.known.update(row.keys)
            self._read(row, method.ours)
        for row in fields:
            if row.absent is not None:
                self.settings.setdefault(row.ours, row.absent)
        if method.read:
            method.read(self)
        return {"decoding_type": method.ours, **self.settings}

    def _read(self, row: Field, ours: str) -> None:
        if row.given and not self.settings.get(row.given):
            return
        key = self.find(*row.keys)
        if key is None:
            self.notes += [row.note] if row.note and row.ours else []
        elif row.back is None or row.ours in self.settings:
            self.used.update(row.keys)
        else:
            kind = row.kind or _kind_of(ours, row.ours)
            value = row.back(self.values[key] if kind is None else self.typed(key, kind))
            if value is not IGNORED:
                self.used.update(row.keys)
                self.settings |= {row.ours: value} if row.ours else {}
            elif row.note and not row.ours:
                self.notes.append(f"{key} is ignored: {row.note}")
                self.used.add(key)


def _kind_of(decoding_type: str, name: str) -> type | None:
    """The plain type of a setting, if it has one."""
    setting = methods()[decoding_type].model_fields.get(name)
    annotation = setting.annotation if setting else None
    union = get_origin(annotation) in (Union, UnionType)
    kinds = set(get_args(annotation) if union else (annotation,)) & set(_KINDS)
    return kinds.pop() if kinds else None


def import_(engine: Engine, text: str, read_yaml: ReadYaml) -> Imported:
    """An engine's config as a method here.

    Raises:
        ConfigError: it is not one, or has no counterpart here.
    """
    values, target = engine.parse(text, read_yaml)
    reader = Reader(values, known=set(engine.known), used={engine.key})
    config = parse_method(reader.read(engine.pick(reader)))
    left = [key for key in values if key not in reader.used]
    ignored = tuple(key for key in left if key in reader.known)
    unknown = tuple(_with_nearest(key, reader.known) for key in left if key not in reader.known)
    return Imported(config, target, tuple(reader.notes), ignored, unknown)


def _with_nearest(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return f"{key} (did you mean {near[0]}?)" if near else key
