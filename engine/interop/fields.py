"""A serving engine as tables of its methods' settings, each read both ways.

An engine's file lists, for every method that it takes, rows of `Field` (our setting, the engine's
key, how a value goes there and comes back, the releases that have it) and of `Loss` (what a setting
loses there). `Writer` and `Reader` walk these rows; what no row can say is a small function of the
engine's file, called after them. A setting that has an effect, differs from its default and was
written by no row becomes a warning: nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop.handoff import File, ReadYaml, Version
from engine.tree import ChoiceTree

Values = dict[str, Any]
NO_MODEL = "DRAFTER"
"""Stands for the drafter's weights where the method names none."""
UNLIKE = ("Combined", "MTP")
"""Methods that stand for no other: they combine, or need layers of the target."""
DYNAMIC = "dynamic_tree_max_topK max_total_draft_tokens max_non_leaves_per_layer"
POOL_RULES = "is_keep_all is_use_oldest is_public_pool"
BLOCK = "Set max_draft_len, e.g. to the draft model's block size less one."
"""What to do where DFlash's length is left to the draft model, and the engine wants a number."""
IGNORED = object()
"""A value of the engine's that has no meaning here."""
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a name or path"}
_EXACT = "{title} verifies exactly: fewer tokens are accepted."
_IN_CHECKPOINT = "{title} reads it from the checkpoint."
_ONLY_TYPICAL = "It only matters with typical acceptance."
_ONLY_MIXED = "It only matters with mix_contexts."
_REASONS = {
    "acceptance": _EXACT,
    "adaptive": "It drafts the same length at every step.",
    "confidence_threshold": "{title} always drafts the full length.",
    "eagle3_layers_to_capture": "{title} reads the layers from the checkpoint.",
    "escape": _ONLY_MIXED,
    "global_pool_size": "It counts tokens; {title} counts requests.",
    "mask_token_id": _IN_CHECKPOINT,
    "num_medusa_heads": _IN_CHECKPOINT,
    "pool_from_text": "{title} also fills its pool from the prompt.",
    "posterior_alpha": _ONLY_TYPICAL,
    "posterior_threshold": _ONLY_TYPICAL,
    "target_layer_ids": _IN_CHECKPOINT,
    "text_weight": _ONLY_MIXED,
    "use_relaxed_acceptance_for_thinking": _EXACT,
    "use_tree_spec": "{title} verifies one path, not a tree.",
}
"""What to add to the warning that a setting is dropped."""


class NotTakenError(ConfigError):
    """The engine cannot take the method; `nearest` says what comes nearest."""

    def __init__(self, sentence: str, nearest: str = "") -> None:
        super().__init__(sentence)
        self.nearest = nearest


# ---- the tables


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
        needed: what to do where our setting is None and the engine cannot do without.
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
    needed: str = ""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serving engine.

    Attributes:
        versions: releases that differ, newest first; a newer one counts as the first.
        trees: what it takes of choice trees, in a few words.
        key: its key for the method's name.
        plain: what an export leaves out, so that the engine decodes plainly.
        drafters: what comes nearest to a drafter written for this playground.
        refused: per other decoding type that it does not take, why not and what comes nearest.
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
    plain: str
    drafters: str
    methods: tuple[Method, ...]
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    files: Callable[[Writer, Values], tuple[File, ...]]
    parse: Callable[[str, ReadYaml], tuple[Mapping[str, Any], str | None]]
    pick: Callable[[Reader], Method]
    known: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> str:
        return self.versions[0][0]

    def method(self, config: MethodConfig, version: Version) -> Method:
        """The method as this release takes it.

        Raises:
            NotTakenError: it does not.
        """
        cls, name, title = type(config), config.decoding_type, self.title
        if name == "Autoregressive":
            plain = f"Without {self.plain}, {title} decodes plainly."
            return Method(name, "", notes=(plain,) if self.plain else ())
        found = [method for method in self.methods if method.ours == name]
        for method in found:
            if method.is_for(version):
                return method
        if found:
            since = ".".join(map(str, found[0].since))
            later = f"{title} has {found[0].theirs or cls.title} from {since} on."
            nearest = f"Release {since} or newer; before, {self._nearest(cls, version)}."
            raise NotTakenError(*(found[0].outside or (later, nearest)))
        refused = {
            "Combined": (
                f"{title} runs one drafting method at a time.",
                "Export the method that drafts most of the accepted tokens by itself.",
            ),
            "User_Provided": (
                f"A drafter written for this playground does not run in {title}.",
                self.drafters,
            ),
        } | dict(self.refused)
        none = f"{title} has no {cls.title}.", f"{self._nearest(cls, version)}."
        raise NotTakenError(*refused.get(name, none))

    def _nearest(self, own: type[MethodConfig], version: Version) -> str:
        """What this release takes that needs weights of its own, or none, as this method."""
        known = methods()
        takes = [
            known[method.ours]
            for method in self.methods
            if method.ours not in UNLIKE and method.is_for(version)
        ]
        like = [cls.title for cls in takes if _needs_weights(cls) == _needs_weights(own)]
        if not like:
            return ", ".join(cls.title for cls in takes)
        why = "with weights of their own" if _needs_weights(own) else "without weights"
        return f"{', '.join(dict.fromkeys(like))}: {why}, too"


def _needs_weights(cls: type[MethodConfig]) -> bool:
    return "speculative_model" in cls.model_fields


def named(methods: Iterable[Method], name: str) -> Method | None:
    """The first method that the engine calls so."""
    return next((m for m in methods if m.theirs and name in (m.theirs, *m.also)), None)


def require_named(methods: Iterable[Method], key: str, name: str) -> Method:
    """The first method that the engine calls so under this key.

    Raises:
        ConfigError: none here stands for it.
    """
    methods = tuple(methods)
    found = named(methods, name)
    if found is None:
        known = dict.fromkeys(word for m in methods if m.theirs for word in (m.theirs, *m.also))
        raise ConfigError(
            f"{key} must be one of {', '.join(known)}, got {name or 'none':.40}. Others have no "
            "counterpart here."
        )
    return found


def drops_draft_probs(why: str, **releases: Any) -> Loss:
    """The warning of an engine that verifies without the drafter's probabilities."""
    sentence = f"use_draft_probs is dropped{why}"
    return Loss("use_draft_probs", sentence, lambda config: config.use_draft_probs, **releases)


# ---- writing


@dataclass
class Writer:
    """Makes an engine's values of a config, and collects what the export says.

    Attributes:
        target: as the engine can load it.
        version: the engine's release.
        resolve: what `speculative_model` names → what the engine can load.
        used: settings that were written, or whose loss was told.
    """

    engine: Engine
    config: Any
    target: str
    version: Version
    resolve: Callable[[str], str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    models: list[str] = field(default_factory=list)
    files: list[File] = field(default_factory=list)

    def at_least(self, *version: int) -> bool:
        """Whether the engine's release is this one or newer."""
        return self.version >= version

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
        self.models.append(self.resolve(named))
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
        method = self.engine.method(self.config, self.version)
        values = {self.engine.key: method.theirs} if method.theirs else {}
        for row in method.rows:
            if not row.is_for(self.version):
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

    def _write(self, row: Field, values: Values) -> None:
        if row.given and not getattr(self.config, row.given):
            return
        if row.write is not None:
            value = row.write(self)
        else:
            ours = self.take(row.ours)
            if ours is None and row.needed:
                title, method = self.engine.title, type(self.config).title
                why = f"{title} needs {row.theirs} for {method}, and {row.ours} is not set."
                raise NotTakenError(why, row.needed)
            value = None if ours is None else row.out(ours)
        if value is not None:
            values[row.theirs] = value

    def part(self, config: MethodConfig) -> Writer:
        """A writer for a method inside this one, with the same notes and warnings."""
        own = (self.engine, config, self.target, self.version, self.resolve)
        return Writer(*own, self.notes, self.warnings, models=self.models)

    def finish(self, prefix: str = "") -> None:
        """Warn of every setting that has an effect, is not at its default and was not written."""
        title = self.engine.title
        for name in sorted(self.config.live_settings() - self.used):
            value = getattr(self.config, name)
            if value == type(self.config).model_fields[name].default:
                continue
            text = json.dumps(value) if isinstance(value, bool | str) else str(value)
            text = text if len(text) <= 60 else text[:57] + "..."
            reason = self.engine.reasons.get(name) or _REASONS.get(name, "").format(title=title)
            dropped = f"{prefix}{name}={text} has no counterpart in {title} and is dropped."
            self.warnings.append(f"{dropped} {reason}".rstrip())


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
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        try:
            if isinstance(value, str):
                return adapter.validate_strings(value.strip())
            return adapter.validate_python(value, strict=True)
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
