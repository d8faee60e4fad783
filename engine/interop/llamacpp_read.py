"""llama.cpp's flags as a method, in their new and old names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.combined import CombinedConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.method import MethodConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.errors import ConfigError
from engine.interop.flags import Flags, read_flags
from engine.interop.handoff import Imported, ReadYaml
from engine.interop.plain import number, sort_keys, whole

MODEL = ("--spec-draft-model", "-md", "--model-draft", "--spec-draft-hf", "-hfd", "-hfrd",
         "--hf-repo-draft")  # fmt: skip
LENGTH = ("--spec-draft-n-max", "--draft-max", "--draft", "--draft-n")
LEAST = ("--spec-draft-n-min", "--draft-min", "--draft-n-min")
P_MIN = ("--spec-draft-p-min", "--draft-p-min")
TYPE = "--spec-type"
OLD_DEFAULTS = {"--draft-max": 16, "--spec-draft-n-max": 3}
KNOWN = frozenset(
    "--spec-draft-p-split --draft-p-split --spec-draft-ngl -ngld --gpu-layers-draft "
    "--n-gpu-layers-draft --spec-draft-device -devd --device-draft --spec-draft-type-k -ctkd "
    "--cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft --spec-draft-threads -td "
    "--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --ctx-size-draft -cd "
    "--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-cpu-moe -cmoed "
    "--cpu-moe-draft --spec-draft-n-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-conf-min "
    "--spec-synth-rates --spec-synth-len --spec-default --spec-ngram-check-rate "
    "--spec-ngram-mod-n-match --spec-ngram-mod-n-min --spec-ngram-mod-n-max".split()
)
LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
Values = Mapping[str, str]
Read = tuple[MethodConfig, set[str]]


def read_llamacpp(text: str, read_yaml: ReadYaml) -> Imported:
    """The method that a `llama-server` command, or its flags alone, set up.

    Raises:
        ConfigError: nothing speculative in it, or a type that has no counterpart here.
    """
    flags = read_flags(text)
    values = {k: v for k, v in flags.options.items() if _is_speculative(k)}
    kinds = [kind.strip() for kind in values.get(TYPE, "").split(",") if kind.strip()]
    if not kinds and any(name in values for name in MODEL):
        kinds = ["draft-simple"]
    if not kinds or kinds == ["none"]:
        raise ConfigError(f"The command names neither {TYPE} nor a draft model (-md).")
    notes: list[str] = []
    config, used = _read(kinds, values, notes)
    if any(name in values for name in ("--draft-max", "--draft-min", "--draft", "--draft-n")):
        notes.append("Builds since April 2026 refuse the old names such as --draft-max.")
    ignored, unknown = sort_keys(values, used={*used, TYPE, *LEAST}, known=KNOWN)
    return Imported(config, _target(flags), tuple(notes), ignored, unknown)


def _is_speculative(name: str) -> bool:
    named = {*MODEL, *LENGTH, *LEAST, *P_MIN, *KNOWN}
    return name in named or name.startswith(("--spec", "--draft"))


def _target(flags: Flags) -> str | None:
    return flags.first("-m", "--model", "-hf", "--hf-repo")


def _read(kinds: list[str], values: Values, notes: list[str]) -> Read:
    if len(kinds) == 2 and kinds[0] in LOOKUPS and kinds[1] in _DRAFTING:
        first, used = _lookup(kinds[0], values, notes)
        second, more = _DRAFTING[kinds[1]](values, notes)
        config = CombinedConfig.parse({"retrieval": first, "model": second})
        return config, used | more
    if len(kinds) > 1:
        raise ConfigError(
            f"{TYPE} {','.join(kinds)} has no counterpart here; an n-gram type followed by a "
            "draft type has."
        )
    (kind,) = kinds
    if kind in LOOKUPS:
        return _lookup(kind, values, notes)
    if kind not in _DRAFTING:
        known = [*LOOKUPS, *_DRAFTING]
        raise ConfigError(
            f"{TYPE} must be one of {', '.join(known)}, got {kind!r:.40}. Others have no "
            "counterpart here."
        )
    return _DRAFTING[kind](values, notes)


def _first(values: Values, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in values), None)


def _length(values: Values, notes: list[str]) -> int:
    name = _first(values, LENGTH)
    if name is not None:
        return whole(values, name)
    notes.append("No draft length is given: 3, the default of builds since April 2026, is taken.")
    return 3


def _model(values: Values) -> str | None:
    name = _first(values, MODEL)
    return None if name is None or values[name] == "DRAFTER.gguf" else values[name]


def _read_draft(values: Values, notes: list[str]) -> Read:
    p_min = _first(values, P_MIN)
    settings = {
        "speculative_model": _model(values),
        "max_draft_len": _length(values, notes),
        "use_draft_probs": False,
        "confidence_threshold": 0.0 if p_min is None else number(values, p_min),
    }
    if p_min is None:
        notes.append("No p_min is given: 0 is taken; builds before April 2026 had 0.75.")
    return DraftTargetConfig.parse(settings), {*MODEL, *LENGTH, *P_MIN}


def _chain(cls: type[MethodConfig], *, own_model: bool) -> Callable[[Values, list[str]], Read]:
    def read(values: Values, notes: list[str]) -> Read:
        settings: dict[str, Any] = {"max_draft_len": _length(values, notes)}
        if own_model:
            settings["speculative_model"] = _model(values)
        p_min = _first(values, P_MIN)
        if p_min is not None and number(values, p_min) > 0:
            notes.append(f"{p_min} is ignored: {cls.title} here drafts the full length.")
        return cls.parse(settings), {*(MODEL if own_model else ()), *LENGTH, *P_MIN}

    return read


def _lookup(kind: str, values: Values, notes: list[str]) -> Read:
    """An n-gram type: the newest occurrence in the request's own text."""
    names = {part: (f"--spec-{kind}-{part}", f"--spec-ngram-{part}") for part in ("size-n",
             "size-m", "min-hits")}  # fmt: skip
    given = {part: _first(values, both) for part, both in names.items()}
    size, length = given["size-n"], given["size-m"]
    if kind != "ngram-simple":
        notes.append(f"{kind} counts occurrences; here the newest one is copied.")
    config = NGramConfig.parse(
        {
            "max_matching_ngram_size": 12 if size is None else whole(values, size),
            "max_draft_len": 48 if length is None else whole(values, length),
            "is_use_oldest": False,
            "is_public_pool": False,
        }
    )
    notes.append("Here shorter matches are tried, too, where the longest finds nothing.")
    hits = given["min-hits"]
    if hits is not None and whole(values, hits) > 1:
        notes.append(f"{hits} is ignored: here one occurrence is enough.")
    return config, {name for both in names.values() for name in both} | set(LENGTH)


_DRAFTING: Mapping[str, Callable[[Values, list[str]], Read]] = {
    "draft-simple": _read_draft,
    "draft": _read_draft,
    "draft-eagle3": _chain(Eagle3Config, own_model=True),
    "draft-dflash": _chain(DFlashConfig, own_model=True),
    "draft-mtp": _chain(MTPConfig, own_model=False),
}
