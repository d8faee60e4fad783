"""Ollama: a Modelfile.

Ollama starts llama-server with --spec-type draft-mtp, or draft-dflash where the file that DRAFT
names is such a drafter; no other type can be chosen.
Source: ollama/ollama, parser/parser.go and llm/llama_server.go.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.deploy import llamacpp, table
from playground.deploy.conversion import Reader
from playground.deploy.files import ReadYaml
from playground.deploy.table import Field, load_engine, method

DRAFT, LENGTH = "DRAFT", "draft_num_predict"
WEIGHTS = dataclasses.replace(llamacpp.WEIGHTS, key=DRAFT, aliases=())
COUNT = Field("max_draft_len", LENGTH, requirement=table.BLOCK, default=4)
KIND_NOTE = "Ollama reads from the file's architecture which drafter it is."
METHODS = {
    "layers": method("MTP", "", COUNT),
    "assistant": method("MTP_Assistant", "", WEIGHTS, COUNT, notes=(KIND_NOTE,)),
    "dflash": method("DFlash", "", WEIGHTS, COUNT, notes=(KIND_NOTE,)),
}


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    """DRAFT and the parameters that affect drafting; instructions are case-insensitive."""
    values: dict[str, str] = {}
    for line in re.sub(r'""".*?"""', "", text, flags=re.DOTALL).splitlines():
        name, _, value = line.strip().partition(" ")
        if name.lower() == "parameter":
            name, _, value = value.strip().partition(" ")
        elif name.upper() in ("FROM", DRAFT):
            name = name.upper()
        if name in ("FROM", DRAFT) or "draft" in name:
            if values.setdefault(name, value.strip(" \"'")) != value.strip(" \"'"):
                raise ConfigError(f"The Modelfile has several lines for {name}. Keep one of them.")
    return values, values.pop("FROM", None)


def _find_method(reader: Reader) -> table.Method:
    length, model = reader.find(LENGTH), reader.values.get(DRAFT)
    if (length and reader.typed(length, int) == 0) or not (length or model):
        raise ConfigError(
            f"The Modelfile drafts nothing: it has no {DRAFT} and no PARAMETER {LENGTH} above 0."
        )
    if length is None:
        reader.notes.append(f"{LENGTH} is not set: 4, its default beside {DRAFT}, is used.")
    if model is None:
        return METHODS["layers"]
    return METHODS["dflash" if "dflash" in str(model).lower() else "assistant"]


ENGINE = load_engine(
    "ollama",
    methods=tuple(METHODS.values()),
    parse=_parse,
    find_method=_find_method,
)
