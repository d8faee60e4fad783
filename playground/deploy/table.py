"""A serving engine as one table: per method, rows for export and import.

A `Field` pairs a setting here with a key of the engine, in the releases that have it; a
`DroppedSetting` warns of what an export loses; a `Codec` converts several keys together; `Refusal`
and `Ignored` classify keys without a setting here. `conversion` evaluates the rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.deploy.files import ReadYaml, Version

Values = dict[str, Any]
PLACEHOLDER = "DRAFTER"
"""Placeholder for the drafter's weights where the method names none."""
NO_ALTERNATIVE = ("Combined", "MTP", "MTP_Assistant")
"""Methods never suggested as alternatives: they combine others, or need layers of the target."""
POOL_RULES = "is_keep_all is_use_oldest is_public_pool"
DYNAMIC = "dynamic_tree_max_topK max_total_draft_tokens max_non_leaves_per_layer"
BLOCK = "Set max_draft_len, e.g. to the draft model's block size less one."
"""Advice where DFlash takes its length from the draft model and the engine needs a number."""
EXPORT_ONE = "Export the method that drafts most of the accepted tokens by itself."
IGNORED = object()
"""The decoded form of a value without meaning here."""


class UnsupportedError(ConfigError):
    """The engine cannot run the method; `nearest` names the closest alternative."""

    def __init__(self, sentence: str, nearest: str = "") -> None:
        super().__init__(sentence)
        self.nearest = nearest


# ---- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Applies to releases from `since` to before `until`."""

    since: Version = ()
    until: Version | None = None

    def is_for(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)


@dataclass(frozen=True, slots=True)
class Field(Row):
    """A setting here and a key of the engine.

    Attributes:
        setting: empty for a key without a setting here.
        aliases: other spellings of the key, read only.
        encode: our value → the engine's; None leaves the key out.
        decode: the engine's value → ours, or `IGNORED`; None for a key that is written only.
        build: computes the engine's value from the whole method, in place of `encode`.
        kind: type of the engine's value, where it is not the setting's.
        switch: our setting that must be on for the key to be written or read.
        requirement: advice where our setting is None and the engine needs a value.
        default: our value where the key is absent, explained by `note`; None = the method's own.
        read_note: a remark where our value is read and is not False.
    """

    setting: str
    key: str
    aliases: tuple[str, ...] = ()
    encode: Callable[[Any], Any] = lambda value: value
    decode: Callable[[Any], Any] | None = lambda value: value
    build: Callable[[Any], Any] | None = None
    kind: type | None = None
    switch: str = ""
    requirement: str = ""
    default: Any = None
    note: str = ""
    read_note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.aliases)


@dataclass(frozen=True, slots=True)
class DroppedSetting(Row):
    """One warning in place of those for dropping `settings` (separated by blanks).

    It is issued where `when(config)` holds; the config is `{c}` in the sentence.
    """

    settings: str
    sentence: str
    when: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True, slots=True)
class Codec(Row):
    """Keys that depend on several settings."""

    keys: tuple[str, ...]
    write: Callable[[Any, Values], None] = lambda writer, values: None
    read: Callable[[Any], None] = lambda reader: None


@dataclass(frozen=True, slots=True)
class Refusal(Row):
    """Keys, separated by blanks, that make the engine draft or accept as no method here does.

    Attributes:
        why: what they do, in a few words.
        neutral: values without effect, in lower case.
    """

    keys: str
    why: str
    neutral: tuple[str, ...] = ("false", "none")

    def check(self, title: str, key: str, value: Any) -> None:
        """Raises ConfigError: the value has an effect."""
        if str(value).strip().lower() not in self.neutral:
            entry = f"{key}={value}"[:80] if str(value) else key
            why = f"{entry} has no counterpart here: in {title}, {self.why}."
            raise ConfigError(f"{why} Remove it to read the rest.")


@dataclass(frozen=True, slots=True)
class Ignored(Row):
    """Keys, separated by blanks, that do not affect drafting; `note` continues "KEY …"."""

    keys: str
    note: str = ""


def refusals(reasons: Mapping[str, str]) -> tuple[Refusal, ...]:
    """Refusals by their keys; values without effect follow `=`: `{"--n-min --min=0|1": "…"}`."""
    parts = ((*keys.partition("="), why) for keys, why in reasons.items())
    return tuple(
        Refusal(keys, why, tuple(neutral.split("|"))) if neutral else Refusal(keys, why)
        for keys, _, neutral, why in parts
    )


def same_name(*names: str, switch: str = "") -> tuple[Field, ...]:
    """Fields whose keys are named as the settings."""
    return tuple(Field(name, name, switch=switch) for name in names)


def read_only(setting: str, key: str, **rest: Any) -> Field:
    """A field that is never written."""
    return Field(setting, key, build=lambda writer: None, **rest)


def const(key: str, value: Any, **rest: Any) -> Field:
    """A key that is always written with this value; others are ignored, explained by `note`."""
    decode = {str(value): None}.get
    rest["decode"] = lambda other: decode(str(other), IGNORED)
    return Field("", key, build=lambda writer: value, **rest)


def weights(key: str, *aliases: str, **rest: Any) -> Field:
    """The drafter's weights."""
    rest |= {"decode": lambda model: None if model == PLACEHOLDER else model}
    return Field("speculative_model", key, aliases, build=lambda w: w.model(), **rest)


def sampled(key: str, word: str | None = None, **releases: Any) -> Field:
    """Whether drafts are sampled and verified with their probabilities; True is written `word`."""
    words = {"probabilistic": True, "gumbel": True, "greedy": False, "strict": False}
    rest: Any = {"encode": {True: word}.get, "decode": lambda name: words.get(name, IGNORED)}
    return Field("use_draft_probs", key, kind=str, default=False, **rest, **releases)


def drops_pool(how: str, when: Callable[[Any], bool] = lambda config: True) -> DroppedSetting:
    """The warning for an engine that looks up n-grams by its own rules."""
    rules = "the pool rules (lookup, is_keep_all, is_use_oldest, is_public_pool) are dropped"
    return DroppedSetting(f"lookup {POOL_RULES}", f"{how}: {rules}.", when)


def drops_draft_probs(why: str, **releases: Any) -> DroppedSetting:
    """The warning for an engine that verifies without the drafter's probabilities."""
    texts = ("use_draft_probs", f"use_draft_probs is dropped{why}")
    return DroppedSetting(*texts, lambda config: config.use_draft_probs, **releases)


# ---- methods and engines


def refusal_by_key(rows: Iterable[Row]) -> dict[str, Refusal]:
    """Key → its refusal."""
    return {key: row for row in rows if isinstance(row, Refusal) for key in row.keys.split()}


def ignored_by_key(rows: Iterable[Row]) -> dict[str, str]:
    """Ignored key → its note, or ""."""
    return {k: row.note for row in rows if isinstance(row, Ignored) for k in row.keys.split()}


@dataclass(frozen=True, slots=True)
class Method(Row):
    """A method here as an engine runs it.

    Attributes:
        name, aliases: the engine's names for it, under its `key`; empty if nothing names it.
        implied: our settings that the engine's method implies.
        removal: why other releases lack it, and the closest alternative.
        notes, read_notes: remarks on an export, and on an import.
    """

    decoding_type: str
    name: str
    rows: tuple[Row, ...] = ()
    aliases: tuple[str, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    removal: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    read_notes: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(row for row in self.rows if isinstance(row, Field))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(row for row in self.rows if isinstance(row, Codec))

    @property
    def keys(self) -> set[str]:
        """All keys that are read, refused or ignored for this method."""
        rows: tuple[Field | Codec, ...] = (*self.fields, *self.codecs)
        read = (key for row in rows for key in row.keys)
        return {*read, *refusal_by_key(self.rows), *ignored_by_key(self.rows)}


def method(decoding_type: str, name: str, *rows: Row, **rest: Any) -> Method:
    return Method(decoding_type, name, rows, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serving engine.

    Attributes:
        versions: releases that differ, the default first, then the others, the oldest last.
        key: its key for the method's name.
        drafters: the closest alternative to a drafter written for this playground.
        unsupported: per other decoding type, why it is missing and the closest alternative.
        files: its templates, in the order of the files.
        prepare: what the templates read besides `values`, `target` and `config`; adds remarks.
        parse: text → values, and the target if it names one.
        find_method: values → one of its methods.
        rows: refused and ignored keys of every method.
        reasons: why settings have no counterpart, overriding `conversion.REASONS`.
        notes: remarks on every export.
        hybrid: a note on drafting for targets with recurrent layers.
    """

    name: str
    title: str
    versions: tuple[tuple[str, str], ...]
    drafters: str
    methods: tuple[Method, ...]
    unsupported: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    files: tuple[str, ...]
    prepare: Callable[[Any, Values], Values] = lambda writer, values: {}
    parse: Callable[[str, ReadYaml], tuple[Mapping[str, Any], str | None]]
    find_method: Callable[[Any], Method]
    rows: tuple[Row, ...] = ()
    key: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hybrid: str = ""

    @property
    def default(self) -> str:
        """The release to export for unless one is named: the newest stable one."""
        return self.versions[0][0]

    @property
    def keys(self) -> frozenset[str]:
        """All keys of all methods."""
        common = {self.key, *ignored_by_key(self.rows), *refusal_by_key(self.rows)}
        return frozenset(common.union(*(method.keys for method in self.methods)))

    def method(self, config: MethodConfig, version: Version) -> Method:
        """The method as this release runs it.

        Raises:
            UnsupportedError: it cannot.
        """
        cls, name, title = type(config), config.decoding_type, self.title
        candidates = [method for method in self.methods if method.decoding_type == name]
        for candidate in candidates:
            if candidate.is_for(version):
                return candidate
        if candidates:
            since = ".".join(map(str, candidates[0].since))
            later = f"{title} has {candidates[0].name or cls.title} from {since} on."
            nearest = f"Release {since} or newer; before, {self._nearest(cls, version)}."
            raise UnsupportedError(*(candidates[0].removal or (later, nearest)))
        missing = f"{title} has no {cls.title}.", f"{self._nearest(cls, version)}."
        own = f"A drafter written for this playground does not run in {title}.", self.drafters
        combined = f"{title} runs one drafting method at a time.", EXPORT_ONE
        plain = f"Without a drafting method, {title} needs no config.", "Export one that drafts."
        general = {"Autoregressive": plain, "Combined": combined, "User_Provided": own}
        raise UnsupportedError(*{**general, **self.unsupported}.get(name, missing))

    def _nearest(self, cls: type[MethodConfig], version: Version) -> str:
        """This release's methods that, like this one, have weights of their own or none."""
        names = [m.decoding_type for m in self.methods if m.is_for(version)]
        available = [methods()[name] for name in names if name not in NO_ALTERNATIVE]
        similar = [other.title for other in available if _has_weights(other) == _has_weights(cls)]
        if not similar:
            return ", ".join(other.title for other in available)
        kind = "with weights of their own" if _has_weights(cls) else "without weights"
        return f"{', '.join(dict.fromkeys(similar))}: {kind}, too"


def _has_weights(cls: type[MethodConfig]) -> bool:
    return "speculative_model" in cls.model_fields


def load_engine(name: str, *, base: Engine | None = None, **code: Any) -> Engine:
    """The engine that a file of `tables` describes.

    Args:
        base: an engine whose refused and ignored keys, reasons and missing methods hold here, too.
        code: the remaining attributes.
    """
    text = (Path(__file__).parent / "tables" / f"{name}.toml").read_text(encoding="utf-8")
    described = tomllib.loads(text)
    rows: tuple[Row, ...] = (
        Ignored(described.pop("ignored", "")),
        *(Ignored(keys, note) for keys, note in described.pop("noted", {}).items()),
        *refusals(described.pop("refused", {})),
    )
    unsupported = {
        kind: (why, nearest)
        for kinds, (why, nearest) in described.pop("unsupported", {}).items()
        for kind in kinds.split()
    }
    reasons = described.pop("reasons", {})
    if base is not None:
        rows = (*base.rows, *rows)
        unsupported, reasons = {**base.unsupported, **unsupported}, {**base.reasons, **reasons}
    versions = tuple(described.pop("releases").items())
    plain: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in described.items()
    }
    plain |= {"versions": versions, "rows": rows, "reasons": reasons, "unsupported": unsupported}
    return Engine(name=name, **plain, **code)


def method_named(methods: Iterable[Method], key: str, name: str) -> Method:
    """The first method of that name.

    Raises:
        ConfigError: there is none.
    """
    named = [(word, m) for m in methods if m.name for word in (m.name, *m.aliases)]
    names = dict(reversed(named))
    if name in names:
        return names[name]
    raise ConfigError(
        f"{key} must be one of {', '.join(dict(named))}, got {name or 'none':.40}. Others have no "
        "counterpart here."
    )
