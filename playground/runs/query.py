"""Filters, order and page of the Runs page, and the link that restores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from engine.config import Settings
from engine.errors import ConfigError
from engine.safe_text import read_json
from playground.host.live import RunId
from storage import EQUAL, LABEL_PREFIX, GroupKey, RunQuery, SortKey, Status, labelled_key

PAGE_SIZE = 50
MAX_LINK_CHARS = 20_000
FLAT = "run"
"""No grouping: requests of experiments are listed like single runs."""
FILTERS = ("tag", *EQUAL)
OWN_MENU = ("target", "method_title", "status")
PICKED = tuple(name for name in FILTERS if name not in OWN_MENU)
"""Filters that share one menu."""
OLDER = ("experiment", "benchmark_id")
"""Filters of older links."""
NUM_RUNS: Final = "num_runs"
"""Sorts groups by their size, and runs by time."""


def _known_group(value: str) -> str:
    names = (FLAT, "tag", *get_args(GroupKey))
    if value not in names and not value.startswith(LABEL_PREFIX):
        raise ValueError(f"group must be one of {', '.join(names)} or {LABEL_PREFIX}KEY")
    return value


Text = Annotated[str, Field(max_length=600, pattern=r"^[^\x00]*$")]
RunIds = Annotated[
    tuple[RunId, ...],
    Field(strict=False, max_length=500),
    AfterValidator(lambda ids: tuple(dict.fromkeys(ids))),
]


class TableQuery(Settings):
    """Filters, grouping, order and page of the table; empty filters match every run."""

    text: Annotated[Text, Field(max_length=200)] = ""
    status: Literal[Status, "", None] = None
    deleted: bool = False
    target: Text | None = None
    decoding_type: Text | None = None
    method_title: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    setup_id: Text | None = None
    prompt_id: Text | None = None
    experiment_id: Text | None = None
    trial: Text | None = None
    tag: Text | None = None
    labels: Annotated[dict[Text, Text], Field(max_length=16)] = {}
    ids: RunIds | None = None
    group: Annotated[Text, AfterValidator(_known_group)] | None = None
    sort: Literal[SortKey, "num_runs"] = "created_at"
    descending: bool = True
    page: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    compare: RunIds | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, values: dict[str, Any]) -> dict[str, Any]:
        """As links before schema 0009 name experiments: by `KIND:ID`, by `ID` or `SWEEP-TRIAL`."""
        new = {**values}
        for name in OLDER:
            if name not in new:
                continue
            new["experiment_id"] = old = new.pop(name)
            if isinstance(old, str) and name == "experiment":
                new["experiment_id"] = old.partition(":")[2]
            elif isinstance(old, str):
                key = labelled_key(old, {})
                new |= {"experiment_id": key.experiment_id, "trial": key.trial or None}
        for name in ("group", "sort"):
            if new.get(name) == "benchmark_id":
                new[name] = "experiment_id"
        return new

    @property
    def grouped(self) -> bool:
        return bool(self.group) and self.group != FLAT

    @property
    def folded(self) -> bool:
        """Whether an experiment is one row; not if certain runs or one experiment are selected."""
        picked = (self.experiment_id, self.setup_id, self.prompt_id, self.ids)
        return not self.group and not any(picked) and "compare" not in self.labels

    def run_query(self, **changes: Any) -> RunQuery:
        """The corresponding query of the log."""
        filters: dict[str, Any] = {name: getattr(self, name) or None for name in (*EQUAL, "tag")}
        others = ("text", "labels", "ids", "deleted", "descending")
        filters |= {name: getattr(self, name) for name in others}
        query = RunQuery(
            **filters,
            sort="created_at" if self.sort == NUM_RUNS else self.sort,
            limit=PAGE_SIZE,
            offset=PAGE_SIZE * self.page,
        )
        return replace(query, **changes)

    def in_group(self, value: str | None) -> TableQuery:
        """The runs of one of the groups that this query makes, newest first."""
        by = self.group or "experiment_id"
        changes: dict[str, Any] = {by: value}
        if by.startswith(LABEL_PREFIX):
            changes = {"labels": {**self.labels, by.removeprefix(LABEL_PREFIX): value}}
        first = {"group": None, "page": 0, "sort": "created_at", "descending": True}
        return self.parse({**self.model_dump(), **first, **changes})

    def after(self, before: TableQuery) -> TableQuery:
        """Back on the first page if filters changed; in the default order if the grouping did."""
        if self.group != before.group:
            sort = NUM_RUNS if self.grouped else "created_at"
            return self.replace(page=0, sort=sort, descending=True)
        return self if self.filters == before.filters else self.replace(page=0)

    def sorted_by(self, sort: str) -> TableQuery:
        """Sorted by another column, largest first; by the same one, in reverse."""
        return self.replace(page=0, sort=sort, descending=self.sort != sort or not self.descending)

    @property
    def filters(self) -> dict[str, Any]:
        """Values that select runs."""
        others = ("sort", "descending", "page", "compare", "group")
        return {name: value for name, value in self.link_values.items() if name not in others}

    @property
    def link_values(self) -> dict[str, Any]:
        """Values that differ from the initial table's, to keep the address short."""
        return {
            name: value
            for name, value in self.model_dump(mode="json", exclude_defaults=True).items()
            if value not in ("", {})
        }


def read_link(text: str) -> TableQuery:
    """The query that a link's `runs` holds. Raises ConfigError: it is malformed."""
    if len(text) > MAX_LINK_CHARS:
        raise ConfigError("The link is too long. Open the Runs page and set the filters there.")
    return TableQuery.parse(read_json(text, what="The link"), where="the link")


# ---- further filters as short texts: `tag = keep`, `label:turn = 1`


def filter_texts(query: TableQuery) -> list[str]:
    """The query's further filters, one text each."""
    texts = [f"{name} = {value}" for name in PICKED if (value := getattr(query, name))]
    texts += [f"{LABEL_PREFIX}{key} = {value}" for key, value in query.labels.items()]
    return texts + ([f"ids = {','.join(query.ids)}"] if query.ids else [])


def read_filters(texts: Iterable[str]) -> dict[str, Any]:
    """Values of a `TableQuery` for filters as written by `filter_texts` or by hand.

    Raises ConfigError: a text is not a filter.
    """
    filters: dict[str, Any] = {"labels": {}}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if equals and name in (*FILTERS, *OLDER):
            filters[name] = value
        elif equals and name == "ids":
            filters["ids"] = value.split(",")
        elif equals and name.startswith(LABEL_PREFIX):
            filters["labels"][name.removeprefix(LABEL_PREFIX)] = value
        else:
            raise ConfigError(
                f"A filter must be like `tag = keep` or `label:turn = 1`, got {text!r:.80}."
            )
    return filters
