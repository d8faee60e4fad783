"""The address of a filtered table: what a link may say, checked before the page follows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.runs.query import read_group, read_ids, read_mapping, read_query, read_text

MAX_LINK_CHARS = 20_000


def read_link(text: str) -> dict[str, Any]:
    """The query that a link's `runs` holds: filters, order, group, compared runs, baseline.

    Raises:
        ConfigError: it is malformed.
    """
    if len(text) > MAX_LINK_CHARS:
        raise ConfigError("The link is too long. Open the Runs page and filter there.")
    try:
        raw = read_mapping("The link", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError("The link is damaged. Open the Runs page and filter there.") from error
    query = {key: value for key, value in raw.items() if key not in ("compare", "baseline")}
    read_query(query)
    if query.get("group"):
        read_group(query["group"])
    link = dict(query)
    if raw.get("compare") is not None:
        link["compare"] = list(read_ids(raw["compare"]))
    if raw.get("baseline") is not None:
        link["baseline"] = _baseline(read_mapping("baseline", raw["baseline"]))
    return link


def _baseline(raw: Mapping[str, Any]) -> dict[str, str]:
    return {name: read_text(name, raw.get(name)) for name in ("setup_id", "title")}
