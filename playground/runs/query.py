"""Questions about the run log as a browser sends them, checked before the database sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

from engine.errors import ConfigError
from playground.host.request import read_count, read_run_id
from storage import RunQuery
from storage.filters import LABEL_PREFIX, Figure, GroupKey, SortKey, names_of
from storage.records import Status

PAGE_SIZE = 50
MAX_PAGE = 1_000_000
MAX_SEARCH_CHARS = 200
MAX_VALUE_CHARS = 600
MAX_LABELS = 16
MAX_IDS = 500
EQUAL = (
    "target",
    "decoding_type",
    "method_title",
    "dtype",
    "device",
    "setup_id",
    "prompt_id",
    "benchmark_id",
    "tag",
)
KNOWN = {*EQUAL, "text", "status", "labels", "ranges", "ids", "deleted"}
KNOWN |= {"sort", "descending", "page", "group", "baseline"}


def read_query(asked: Any) -> RunQuery:
    """A query from what the table sent; what is empty filters nothing.

    Raises:
        ConfigError: naming what is wrong with it.
    """
    raw = read_mapping("The question", asked)
    unknown = sorted(str(key) for key in raw.keys() - KNOWN)
    if unknown:
        raise ConfigError(f"Runs cannot be asked for by {unknown[0]!r:.60}.")
    status = _word("status", raw.get("status") or None, (None, *get_args(Status)))
    equal: dict[str, Any] = {n: read_text(n, raw[n]) for n in EQUAL if raw.get(n)}
    return RunQuery(
        **equal,
        text=read_text("text", raw.get("text") or "", most=MAX_SEARCH_CHARS),
        status=cast(Status | None, status),
        labels=_labels(raw.get("labels") or {}),
        ranges=_ranges(raw.get("ranges") or {}),
        ids=None if raw.get("ids") is None else read_ids(raw["ids"]),
        only_deleted=_flag("deleted", raw.get("deleted", False)),
        sort=cast(SortKey, _word("sort", raw.get("sort", "created_at"), names_of(SortKey))),
        descending=_flag("descending", raw.get("descending", True)),
        limit=PAGE_SIZE,
        offset=PAGE_SIZE * read_count("page", raw.get("page", 0), most=MAX_PAGE),
    )


def read_group(raw: object) -> str:
    """What to group by.

    Raises:
        ConfigError: no such thing.
    """
    text = read_text("group", raw)
    return text if text.startswith(LABEL_PREFIX) else _word("group", text, (*_GROUPS, "tag"))


def read_ids(raw: object) -> tuple[str, ...]:
    """Ids of ticked runs.

    Raises:
        ConfigError: no list of ids, or too many.
    """
    if not isinstance(raw, list | tuple) or len(raw) > MAX_IDS:
        raise ConfigError(f"ids must be a list of at most {MAX_IDS} runs.")
    return tuple(dict.fromkeys(read_run_id(item) for item in raw))


def read_mapping(name: str, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} must be a mapping, got {type(raw).__name__}.")
    return raw


def read_text(name: str, raw: object, *, most: int = MAX_VALUE_CHARS) -> str:
    """Text that a database can be asked for."""
    if not isinstance(raw, str) or len(raw) > most or "\x00" in raw or not _is_whole(raw):
        raise ConfigError(f"{name} must be text of at most {most} characters, got {raw!r:.60}.")
    return raw


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _labels(raw: object) -> dict[str, str]:
    pairs = read_mapping("labels", raw)
    if len(pairs) > MAX_LABELS:
        raise ConfigError(f"At most {MAX_LABELS} labels are taken, got {len(pairs)}.")
    return {read_text("label", k): read_text("label", v) for k, v in pairs.items()}


def _ranges(raw: object) -> dict[Figure, tuple[float | None, float | None]]:
    found: dict[Figure, tuple[float | None, float | None]] = {}
    for name, bounds in read_mapping("ranges", raw).items():
        figure = cast(Figure, _word("range", name, names_of(Figure)))
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise ConfigError(f"The range of {figure} must be [least, most].")
        found[figure] = (_bound(figure, bounds[0]), _bound(figure, bounds[1]))
    return found


def _bound(figure: str, raw: object) -> float | None:
    if raw is None:
        return None
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        raise ConfigError(f"A bound of {figure} must be a number, got {raw!r:.40}.")
    return float(raw)


def _flag(name: str, raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ConfigError(f"{name} must be true or false, got {raw!r:.40}.")
    return raw


_GROUPS = names_of(GroupKey)


def _word(name: str, raw: Any, allowed: tuple[Any, ...]) -> Any:
    if isinstance(raw, str | None) and raw in allowed:
        return raw
    words = ", ".join(str(item) for item in allowed if item)
    raise ConfigError(f"{name} must be one of {words}, got {raw!r:.40}.")
