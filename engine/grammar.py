"""Grammars a text can be held to: JSON schemas, regular expressions, Lark and GBNF.

The library llguidance reads them and says which tokens may come next; it is imported here only,
and only where a grammar is asked for.
Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
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
"""Between the parts of JSON: enough to indent it; a small model may go on with blanks for ever."""
MAX_CHARS = 100_000
MISSING = (
    "structured_output needs the package llguidance. Install it: pip install llguidance. "
    "Without it, set structured_output to none."
)


TITLES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def compiled(kind: GrammarKind, text: str) -> str:
    """A grammar in llguidance's own form.

    Raises ConfigError: it is malformed or has what cannot be held to, or llguidance is missing.
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
            grammar = grammar_from(kind, text)
        fault = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        fault = str(error)
    if fault:
        raise ConfigError(f"grammar is not a usable {what}: {_reason(fault)}.")
    return grammar


def _reason(fault: str) -> str:
    """What is wrong, without the picture of where."""
    named = [line for line in fault.splitlines() if line.startswith("error: ")]
    return first_line(ValueError(named[-1].removeprefix("error: ") if named else fault))


def choice_grammar(texts: Collection[str]) -> str:
    """A Lark grammar of one of these texts."""
    return "start: " + " | ".join(json.dumps(text) for text in texts)


class TokenTexts:
    """The bytes of every token of a target, as grammars read them; made once, in about a second."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> None:
        """Raises TargetError: there is no tokenizer that can be read, or no end-of-text token."""
        from llguidance.hf import from_tokenizer

        if tokenizer is None or not eos_ids:
            raise TargetError(
                "Structured output needs a target with a tokenizer and an end-of-text token. "
                "Choose another, or set structured_output to none."
            )
        self.vocab_size, self.eos_ids = vocab_size, frozenset(eos_ids)
        try:
            self.own: LLTokenizer = from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids)
            )
        except ValueError as error:
            raise TargetError(
                f"This target's tokenizer cannot be read for structured output: "
                f"{first_line(error)}. Choose another target."
            ) from error


class Matcher:
    """Where a text stands in its grammar; can go back as many tokens as it went."""

    def __init__(self, tokens: TokenTexts, grammar: str) -> None:
        """`grammar`: as `compiled` returns it."""
        from llguidance import LLMatcher

        self._vocab_size = tokens.vocab_size
        self._own: LLMatcher = LLMatcher(tokens.own, grammar, log_level=0)

    def allowed(self) -> NDArray[np.bool_]:
        """`(vocab,)` bool: which tokens may come next; the end of the text where it may end.

        Raises TargetError: the grammar has become too large to follow.
        """
        bits = np.frombuffer(self._own.compute_bitmask(), dtype=np.uint8)
        self._check()
        unpacked = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)

    def go(self, token: int) -> None:
        """On by a token that is allowed."""
        self._own.consume_token(token)
        self._check()

    def back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self._own.rollback(num_tokens)
        self._check()

    def _check(self) -> None:
        if self._own.is_error():
            raise TargetError(
                f"The text cannot be held to its grammar any further: "
                f"{_reason(self._own.get_error())}. Simplify the grammar."
            )
