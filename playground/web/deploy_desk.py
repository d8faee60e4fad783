"""What the Deploy page asks: a method as every engine takes it, and a config read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop import ENGINES, find_engine
from engine.interop.handoff import Export
from engine.metrics import FORMULAS
from playground.host.catalog import OWN_DRAFTERS, TYPE_PREFIX, Catalog
from playground.host.request import read_run_id
from playground.web.deploying import (
    Handed,
    hand_over,
    method_yaml,
    of_run,
    read_config,
    set_settings,
)
from storage import RunLog, RunQuery

RECENT = 40
"""Runs offered in the menu; any other opens by its id."""
MAX_VERSION_CHARS = 40
BLOCK = 15
"""Draft length of the table's methods that have none by default: DFlash's usual block."""
MAX_PARAMS = 200


class DeployDesk:
    """Answers the page's questions; every answer is plain JSON."""

    def __init__(self, log: RunLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog

    def menus(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Engines, targets and the newest runs."""
        return {
            "engines": [
                {
                    "name": engine.name,
                    "title": engine.title,
                    "trees": engine.trees,
                    "versions": [list(version) for version in engine.versions],
                }
                for engine in ENGINES.values()
            ],
            "targets": [list(choice) for choice in self._catalog.target_choices()],
            "runs": self._recent(),
            "formulas": {name: FORMULAS[name] for name in ("mat", "tok_s")},
        }

    def _recent(self) -> list[dict[str, Any]]:
        rows = self._log.find(RunQuery(limit=RECENT)).rows
        return [
            {
                "id": run.id,
                "method": run.method_title,
                "target": run.target,
                "mat": run.mat,
                "tok_s": run.tok_s,
                "created_at": run.created_at.isoformat(),
            }
            for run in rows
        ]

    def methods(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Methods that fit a target."""
        target = self._catalog.target(asked.get("target")).name
        return {"methods": [list(choice) for choice in self._catalog.method_choices(target)]}

    def look(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One method: how every engine takes it, and the files of the engine that is asked for.

        Raises:
            ConfigError: no such run, method, target, engine or version.
        """
        handed = self._handed(asked)
        engine = find_engine(asked.get("engine") or next(iter(ENGINES)))
        version = _version(asked.get("version"))
        chosen = hand_over(handed, engine.name, version, self._catalog.resolve)
        rows = [
            chosen
            if name == engine.name
            else hand_over(handed, name, resolve=self._catalog.resolve)
            for name in ENGINES
        ]
        return {
            "title": handed.title,
            "target": handed.target,
            "mat": handed.mat,
            "tok_s": handed.tok_s,
            "lossless": handed.config.lossless,
            "settings": _shown(handed.config),
            "engines": [_row(export) for export in rows],
            "export": {**asdict(chosen), "verdict": chosen.verdict},
        }

    def _handed(self, asked: Mapping[str, Any]) -> Handed:
        run = asked.get("run")
        if run:
            return of_run(self._log, read_run_id(run))
        method = self._catalog.method(asked.get("method"))
        return Handed(method.config, self._catalog.target(asked.get("target")).name, method.title)

    def matrix(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Every method of the engine package against every engine, with its default settings."""
        rows = []
        for name, cls in self._catalog.types.items():
            config = cls.parse({})
            given = {"speculative_model": "DRAFTER", "max_draft_len": BLOCK}
            unset = {key: value for key, value in given.items() if getattr(config, key, "") is None}
            config = config.replace(**unset)
            handed = Handed(config, "TARGET", cls.title)
            cells = [_row(hand_over(handed, engine)) for engine in ENGINES]
            rows.append({"name": name, "title": cls.title, "cells": cells})
        return {"engines": [engine.title for engine in ENGINES.values()], "rows": rows}

    def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A pasted config as a method here.

        Raises:
            ConfigError: it cannot be read, or has no counterpart here.
        """
        engine = find_engine(asked.get("engine")).name
        found = read_config(engine, str(asked.get("text") or ""))
        return {
            "title": type(found.config).title,
            "decoding_type": found.config.decoding_type,
            "lossless": found.config.lossless,
            "target": found.target,
            "settings": _shown(found.config),
            "yaml": method_yaml(found.config, engine),
            "notes": list(found.notes),
            "ignored": list(found.ignored),
            "unknown": list(found.unknown),
        }

    def used(self, asked: Mapping[str, Any], target: object) -> tuple[str, str, dict[str, Any]]:
        """Target, method key and settings of a pasted config, for the Generate page.

        Raises:
            ConfigError: it cannot be read, or the target is not offered this method.
        """
        config = read_config(
            find_engine(asked.get("engine")).name, str(asked.get("text") or "")
        ).config
        name = self._catalog.target(target).name
        key = TYPE_PREFIX + config.decoding_type
        offered = [choice for _, choice in self._catalog.method_choices(name)]
        if key not in offered or config.decoding_type == OWN_DRAFTERS:
            raise ConfigError(
                f"{type(config).title} does not fit the target {name}. Pick another target on the "
                "Generate page first."
            )
        return name, key, set_settings(config)


def _row(export: Export) -> dict[str, Any]:
    """An engine's verdict in a line."""
    lost = [text for text in export.warnings]
    words = export.refusal or (lost[0] if lost else "")
    return {
        "name": export.engine,
        "version": export.version,
        "verdict": export.verdict,
        "words": words,
        "nearest": export.nearest,
        "losses": len(lost),
    }


def _shown(config: MethodConfig) -> list[list[str]]:
    """Settings that differ from the defaults, for people."""
    return [[name, _short(value)] for name, value in set_settings(config).items()]


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} nodes" if isinstance(value[0], list) else f"{len(value)} values"
    text = str(value)
    return text if len(text) <= MAX_PARAMS else text[: MAX_PARAMS - 1] + "…"


def _version(raw: object) -> str | None:
    if raw in (None, ""):
        return None
    if not isinstance(raw, str) or len(raw) > MAX_VERSION_CHARS:
        raise ConfigError(f"version must be the release of an engine, got {raw!r:.60}.")
    return raw
