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
from playground.deploy.table import Engine, Field, method

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


ENGINE = Engine(
    name="mlx",
    title="mlx-lm",
    versions=(("0.32", "the newest known here"), ("0.26", "the oldest known here")),
    drafters="generate_step there is a Python function of your own to copy.",
    methods=(METHOD,),
    files=("serve.sh",),
    parse=_parse,
    find_method=_find_method,
    hybrid="mlx-lm refuses a draft model for targets whose cache cannot be trimmed, such as this.",
)
