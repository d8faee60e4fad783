"""Grammars for structured output: JSON schemas, regular expressions, Lark and GBNF.

The library llguidance parses them and computes which tokens may come next. It is imported here
only, when a grammar is used.
Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, TargetError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["none", "json_schema", "regex", "grammar"]
ANY_OBJECT = '{"type":"object"}'
BLANKS = r"[ \t\r\n]{0,32}"
"""Blanks between JSON tokens: enough to indent; without a limit, a small model may never end."""
MAX_CHARS = 100_000
MAX_MULTIPLE = 0xFFFF
"""A number has this many states, which llguidance's limits do not count; it squares it in 32 bits.
"""
MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)', re.ASCII)
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
MISSING = (
    "structured_output needs the package llguidance. Install it: pip install llguidance. "
    "Without it, set structured_output to none."
)
TITLES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


@functools.lru_cache(maxsize=8)
def compile_grammar(kind: GrammarKind, text: str) -> str:
    """A grammar in llguidance's own form.

    Raises ConfigError: it is malformed, too large or not supported, or llguidance is missing.
    """
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise ConfigError(MISSING) from error
    assert kind != "none"
    what = TITLES[kind]
    if kind != "json_schema" and not text.strip():
        raise ConfigError(f"grammar must hold a {what}, got nothing. Write one.")
    try:
        if kind == "json_schema":
            schema = text.strip() or ANY_OBJECT
            grammar = LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": BLANKS})
        else:
            if kind == "grammar":  # it looks for Lark's keywords, in quadratic time if all is blank
                text = "\n".join(line for line in text.split("\n") if line.strip())
            grammar = grammar_from(kind, text)
        fault = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        fault = str(error)
    if fault:
        raise ConfigError(f"grammar is not a usable {what}: {_reason(fault)}.")
    if kind != "regex":
        _check_multiples(text)
    return grammar


def _check_multiples(text: str) -> None:
    """Raises ConfigError: the `multipleOf` of a JSON schema, which Lark may hold, are too large.

    They count in units of the last decimal place of all: 0.25 and 3 as 25 and 300. Those that
    `allOf` and references combine have a divisor of the common multiple of all.
    """
    text = ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), text)
    numbers = MULTIPLE_OF.findall(text)
    units = [float(number) or 1.0 for number in numbers]
    while any(value % 1 for value in units) and max(units) <= MAX_MULTIPLE:
        units = [10 * value for value in units]
    if units and (max(units) > MAX_MULTIPLE or math.lcm(*map(int, units)) > MAX_MULTIPLE):
        raise ConfigError(
            f"grammar must have multipleOf with a common multiple of at most {MAX_MULTIPLE} units "
            f"of the last decimal place, got {', '.join(numbers):.80}. Use smaller or fewer ones."
        )


def _reason(fault: str) -> str:
    """The message of a fault, without the excerpt that shows its place."""
    errors = [line for line in fault.splitlines() if line.startswith("error: ")]
    return first_line(ValueError(errors[-1].removeprefix("error: ") if errors else fault))


def choice_grammar(texts: Collection[str]) -> str:
    """A Lark grammar that matches exactly these texts."""
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def token_texts(tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> LLTokenizer:
    """A target's vocabulary as llguidance reads it; made once per target, in about a second.

    Raises TargetError: no readable tokenizer, or no end-of-text token.
    """
    from llguidance.hf import from_tokenizer

    if tokenizer is None or not eos_ids:
        raise TargetError(
            "Structured output needs a target with a tokenizer and an end-of-text token. "
            "Choose another, or set structured_output to none."
        )
    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        raise TargetError(
            f"This target's tokenizer cannot be read for structured output: "
            f"{first_line(error)}. Choose another target."
        ) from error


class Matcher:
    """The state of a text in its grammar; any number of tokens can be rolled back."""

    def __init__(self, tokens: LLTokenizer, grammar: str) -> None:
        """`grammar`: as `compile_grammar` returns it."""
        from llguidance import LLMatcher

        self._vocab_size = tokens.vocab_size
        self._matcher: LLMatcher = LLMatcher(tokens, grammar, log_level=0)

    def allowed(self) -> NDArray[np.bool_]:
        """`(vocab,)` bool: the tokens that may come next, end-of-text tokens included.

        Raises TargetError: the grammar's state has become too large.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        unpacked = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)

    def advance(self, token: int) -> None:
        """Extend the text by an allowed token."""
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        self._matcher.rollback(num_tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TargetError(
                "The text can no longer be matched with its grammar: "
                f"{_reason(self._matcher.get_error())}. Simplify the grammar."
            )
