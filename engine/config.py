"""Settings that users write: sampling, limits, and the base class of all others.

Unknown keys, wrong types and values out of range are refused with a sentence that names the key,
the value and what is allowed. A method's settings are in the file of its drafter.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from engine.errors import ConfigError
from engine.grammar import MAX_CHARS, TITLES, GrammarKind, compile_grammar
from engine.safe_text import short

MAX_FAULTS = 4
"""The most faults that one sentence names."""
UnitFloat = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveUnitFloat = Annotated[float, Field(gt=0.0, le=1.0)]
"""From 0 to 1; above 0."""
THINKING, EFFORT = "enable_thinking", "reasoning_effort"
"""Chat template settings: whether a reasoning model thinks, and how much."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")]


class Settings(BaseModel):
    """A frozen pydantic model whose validation errors read as one sentence (`parse`)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=()
    )

    main_settings: ClassVar[str] = ""
    """The most important settings (separated by blanks); empty = all."""

    without_effect: ClassVar[tuple[tuple[dict[str, Any], str], ...]] = ()
    """Pairs of settings' values and the settings (separated by blanks) without effect at them."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """Build from plain data.

        Raises ConfigError: naming key, value and rule; `where` (a file, a page) is appended.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{cls.__name__} must be a mapping of settings, got {type(values).__name__}"
                f"{_location(where)}."
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _config_error(cls, error, where) from error

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed, checked again."""
        return self.parse({**self.model_dump(), **changes})

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that are not at their defaults, as plain JSON."""
        values, defaults = (one.model_dump(mode="json") for one in (self, type(self).parse({})))
        return {name: value for name, value in values.items() if value != defaults[name]}

    def live_settings(self) -> set[str]:
        """Settings that have an effect with the values of the others."""
        names = set(type(self).model_fields)
        for values, without_effect in self.without_effect:
            if all(getattr(self, name) == value for name, value in values.items()):
                names -= set(without_effect.split())
        return names


def setting(default: Any, title: str, description: str, **rules: Any) -> Any:
    """A pydantic `Field` with a display name and a line of explanation."""
    return Field(default, title=title, description=description, **rules)


def _location(where: str) -> str:
    return f" (in {where})" if where else ""


def _config_error(cls: type[BaseModel], error: ValidationError, where: str) -> ConfigError:
    """All faults in one sentence, and separately by setting."""
    sentences: list[str] = []
    faults: dict[str, str] = {}
    for detail in error.errors(include_url=False)[:MAX_FAULTS]:
        sentences.append(_explain(cls, detail))
        # A rule over several settings begins with the name of the one to change.
        name = str(detail["loc"][0]) if detail["loc"] else sentences[-1].partition(" ")[0]
        faults.setdefault(name, f"{sentences[-1]}.")
    return ConfigError(f"{'; '.join(sentences)}{_location(where)}.", faults=faults)


def _explain(cls: type[BaseModel], detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or cls.__name__
    if detail["type"] == "extra_forbidden":
        names = list(cls.model_fields)
        near = difflib.get_close_matches(str(detail["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"
        return f"{key} is not a setting of {cls.__name__}; {hint}"
    if detail["type"] == "missing":
        return f"{key} is missing"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
    rule = detail["msg"].partition(" should ")[2] or f"be {detail['msg']}"
    return f"{key} must {rule}, got {short(detail['input'])}"


class Sampling(Settings):
    """How a text is drawn: the settings of the prompt's chat template, then how each token is
    chosen from the target's logits. Temperature 0 is greedy."""

    main_settings = "temperature top_p seed"
    without_effect = (
        ({"temperature": 0.0}, "top_k top_p min_p verification"),
        ({"structured_output": "none"}, "grammar"),
    )

    temperature: float = setting(
        0.0, "Temperature", "0 = greedy (argmax)", ge=0.0, le=10.0, allow_inf_nan=False
    )
    top_k: int = setting(0, "Top-k", "keep the k likeliest tokens; 0 = all", ge=0, le=1_000_000)
    top_p: PositiveUnitFloat = setting(
        1.0, "Top-p", "keep the smallest set with this much probability", allow_inf_nan=False
    )
    min_p: UnitFloat = setting(
        0.0,
        "Min-p",
        "keep tokens with at least this share of the best one's probability; 0 = all",
        allow_inf_nan=False,
    )
    verification: Literal["block", "token"] = setting(
        "block",
        "Verification",
        "of chains that the drafter sampled: block accepts more of them, token is the original "
        "papers' rule; either way the text follows the target's distribution",
    )
    seed: int = setting(0, "Seed", "seed of every random draw of the run", ge=0, le=2**63 - 1)
    structured_output: GrammarKind = setting(
        "none",
        "Structured output",
        "constrain the text to a JSON schema, a regular expression or a grammar (Lark or "
        "GBNF); the text can still be cut short by its length limit",
    )
    grammar: str = setting(
        "",
        "Schema, expression or grammar",
        "what the text must match; an empty JSON schema allows any object",
        max_length=MAX_CHARS,
    )
    chat_template_kwargs: dict[VariableName, JsonValue] = setting(
        {},
        "Chat template settings",
        'a JSON object of variables that the chat template reads: {"enable_thinking": false}',
        max_length=32,
    )

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if self.constrained:
            try:
                compile_grammar(self.structured_output, self.grammar)
            except ConfigError as error:
                raise ValueError(str(error).rstrip(".")) from error
        return self

    @property
    def constrained(self) -> bool:
        """Whether the text must follow a grammar."""
        return self.structured_output != "none"

    def __hash__(self) -> int:
        """Of all settings; values of the chat template's are no keys themselves."""
        return hash(self.model_dump_json())

    @property
    def words(self) -> str:
        """A short description: `greedy`, or `temperature 0.7, JSON schema`."""
        words = "greedy" if self.greedy else f"temperature {self.temperature:g}"
        words += f", {TITLES[self.structured_output]}" if self.constrained else ""
        kwargs = (f", {name} {json.dumps(v)}" for name, v in self.chat_template_kwargs.items())
        return words + "".join(kwargs)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken; below 1e-5 no other has a chance."""
        return self.temperature < 1e-5


class Limits(Settings):
    """When a text ends."""

    main_settings = "max_new_tokens ignore_eos"

    max_new_tokens: int = setting(
        256, "New tokens", "maximum number of tokens to generate", ge=1, le=1_000_000
    )
    ignore_eos: bool = setting(False, "Ignore end of text", "continue past the end-of-text token")
    stop: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = setting(
        (),
        "Stop strings",
        "strings that end the text and are left out of it",
        strict=False,
        max_length=16,
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = setting(
        (),
        "Stop tokens",
        "token ids that end the text, besides end-of-text tokens; they are left out of it",
        strict=False,
        max_length=16,
    )
