"""mlx-lm: flags of `mlx_lm.server`, which drafts with a smaller model only.

Source: mlx_lm/generate.py of 0.32.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from playground.deploy import table
from playground.deploy.conversion import Reader
from playground.deploy.files import ReadYaml, read_flags
from playground.deploy.table import Field, load_engine, method

UNSET = "--num-draft-tokens is not set: 3, its default, is used."
SAME_TOKEN = table.drops_draft_probs(
    ": mlx-lm samples the drafts, but keeps one only where the target draws the same token; "
    "acceptance falls with the temperature."
)
METHOD = method(
    "Draft_Target",
    "",
    table.weights("--draft-model"),
    Field("max_draft_len", "--num-draft-tokens", default=3, note=UNSET),
    SAME_TOKEN,
    implied={"use_draft_probs": False},
)


def _parse(text: str, read_yaml: ReadYaml) -> tuple[Mapping[str, Any], str | None]:
    flags = read_flags(text)
    values = {key: value for key, value in flags.options.items() if "draft" in key}
    return values, flags.first("--model")


def _find_method(reader: Reader) -> table.Method:
    if reader.find("--draft-model") is None:
        raise ConfigError("The command drafts nothing: it has no --draft-model.")
    return METHOD


ENGINE = load_engine(
    "mlx",
    methods=(METHOD,),
    parse=_parse,
    find_method=_find_method,
)
