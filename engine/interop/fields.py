"""A serving engine as tables of its methods' settings, each read both ways.

An engine's file lists, for every method that it takes, rows of `Field` (our setting, the engine's
key, how a value goes there and comes back, the releases that have it) and of `Loss` (what a setting
loses there). `conversion` walks these rows; what no row can say is a small function of the engine's
file, called after them with the `Writer` or `Reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.drafters import methods
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop.handoff import File, ReadYaml, Version

Values = dict[str, Any]
NO_MODEL = "DRAFTER"
"""Stands for the drafter's weights where the method names none."""
UNLIKE = ("Combined", "MTP", "MTP_Assistant")
"""Methods that stand for no other: they combine, or need layers of the target."""
POOL_RULES = "is_keep_all is_use_oldest is_public_pool"
BLOCK = "Set max_draft_len, e.g. to the draft model's block size less one."
"""What to do where DFlash's length is left to the draft model, and the engine wants a number."""
IGNORED = object()
"""A value of the engine's that has no meaning here."""


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
    write: Callable[[Any], Any] | None = None
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

    return Field(
        "speculative_model", theirs, also, write=lambda writer: writer.model(), back=back, **rest
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that makes the engine draft or accept as no method here does; it is never ignored.

    Attributes:
        why: what it does, in a few words.
        neutral: values with which it does nothing, in lower case.
    """

    why: str
    neutral: tuple[str, ...] = ("false", "none")

    def check(self, title: str, key: str, value: Any) -> None:
        """Raises ConfigError: the value has an effect."""
        if str(value).strip().lower() not in self.neutral:
            shown = f"{key}={value}"[:80] if str(value) else key
            raise ConfigError(
                f"{shown} has no counterpart here: in {title}, {self.why}. Remove it to read "
                "the rest."
            )


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
        takes: keys that `read` reads, beside those of the rows.
        known: further keys of the engine's method that do not bear on what is drafted.
        refuses: keys that no method here could follow; as those of the engine.
    """

    ours: str
    theirs: str
    rows: tuple[Field | Loss, ...] = ()
    also: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    outside: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    read_notes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    refuses: Mapping[str, Refusal] = field(default_factory=dict)
    write: Callable[[Any, Values], None] | None = None
    read: Callable[[Any], None] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are read."""
        rows = (key for row in self.rows if isinstance(row, Field) for key in row.keys)
        return (*rows, *self.takes)


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
        known: keys of any method and release; what is none of them is refused.
        refuses: of these, the ones that no method here could follow.
        drawn: key for how drafts are drawn when sampling; a setting here of some methods only.
        reasons: why a setting of ours has no counterpart, where `conversion.REASONS` is wrong.
        hybrid: notes on drafting for targets with recurrent layers.
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
    files: Callable[[Any, Values], tuple[File, ...]]
    parse: Callable[[str, ReadYaml], tuple[Mapping[str, Any], str | None]]
    pick: Callable[[Any], Method]
    known: frozenset[str] = frozenset()
    refuses: Mapping[str, Refusal] = field(default_factory=dict)
    drawn: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    hybrid: tuple[Loss, ...] = ()

    @property
    def newest(self) -> str:
        return self.versions[0][0]

    @property
    def keys(self) -> frozenset[str]:
        """All that it knows, of any method."""
        own = ((*method.keys, *method.known, *method.refuses) for method in self.methods)
        return self.known.union(self.refuses, [self.key], *own)

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


def drops_block_tree(title: str) -> Loss:
    """The warning of an engine that drafts a block as a chain."""
    return Loss(
        "use_dynamic_tree dynamic_tree_max_topK max_total_draft_tokens",
        "use_dynamic_tree, dynamic_tree_max_topK and max_total_draft_tokens are dropped: "
        f"{title} drafts the likeliest token of every place of the block; measured MAT falls.",
        lambda config: config.use_dynamic_tree,
    )


def drops_draft_probs(why: str, **releases: Any) -> Loss:
    """The warning of an engine that verifies without the drafter's probabilities."""
    sentence = f"use_draft_probs is dropped{why}"
    return Loss("use_draft_probs", sentence, lambda config: config.use_draft_probs, **releases)
