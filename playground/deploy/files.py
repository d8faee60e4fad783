"""Exports, imported methods, and the files and commands of other engines as text."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError

Verdict = Literal["exact", "with losses", "not supported"]
Version = tuple[int, ...]
MAX_CHARS = 200_000
Files = dict[str, str]
"""Texts to save or paste by file name."""
ReadYaml = Callable[[str], Any]
"""Parses YAML to plain data; callers pass it in, since the engine package does not import yaml."""
_OPTION = re.compile(r"-(?![\d.]).")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_PLAIN = re.compile(r"(?:[A-Za-z_/~]|\.{1,2}/)[\w./~-]*")
_YAML_WORDS = frozenset("true false yes no on off null y n ~".split())


@dataclass(frozen=True, slots=True)
class Export:
    """A method as an engine runs it.

    Attributes:
        warnings: a sentence per difference from the method here.
        refusal: why the engine cannot run it; there are no files then.
        nearest: the closest alternative.
    """

    engine: str
    version: str
    files: Files = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    nearest: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.refusal:
            return "not supported"
        return "with losses" if self.warnings else "exact"


@dataclass(frozen=True, slots=True)
class ImportedMethod:
    """An engine's config read as a method here.

    Attributes:
        target: None where the text names none.
        notes: how it was read where that is not obvious.
        ignored: keys that do not affect drafting, such as where the drafter runs.
    """

    config: MethodConfig
    target: str | None = None
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The target, the notes and the ignored keys, a line each."""
        target = [f"Its target was {self.target}."] if self.target else []
        unread = (f"ignored: {key} has no effect on drafting." for key in self.ignored)
        return (*(f"note: {note}" for note in (*target, *self.notes)), *unread)


def yaml_block(values: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings as YAML, with lists in flow style and strings quoted only if necessary."""
    pad = " " * indent
    lines = [
        f"{pad}{key}:\n{yaml_block(value, indent + 2)}"
        if isinstance(value, Mapping)
        else f"{pad}{key}: {_yaml_value(value)}\n"
        for key, value in values.items()
    ]
    return "".join(lines)


def _yaml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml_value, value))}]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
            return value
        return json.dumps(value, ensure_ascii=not value.isprintable())
    text = json.dumps(value)  # to PyYAML, which reads YAML 1.1, 1e-05 is a text
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def gguf_name(model: str) -> str:
    """The file name of a model converted to GGUF; a GGUF file's own name."""
    return model if model.endswith(".gguf") else f"{PurePath(model).name}.gguf"


def _options(values: Mapping[str, Any]) -> str:
    """Options of a shell command, one with its value per line, to follow its first line."""
    return "".join(f" \\\n  {key} {shlex.quote(str(value))}" for key, value in values.items())


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    extensions=["jinja2.ext.do"],
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters |= {
    "compact_json": lambda value: json.dumps(value, separators=(",", ":")),
    "gguf_name": gguf_name,
    "json": lambda value: json.dumps(value, indent=2),
    "options": _options,
    "quote": shlex.quote,
    "repr": repr,
    "yaml": yaml_block,
}


def render(folder: str, names: Iterable[str], **values: Any) -> Files:
    """The files of these templates in a folder of `templates`; what comes out empty is left out."""
    load = _TEMPLATES.get_template
    texts = {name: load(f"{folder}/{name}.jinja").render(values) for name in names}
    return {name: text for name, text in texts.items() if text}


class Flags(NamedTuple):
    """A parsed command line.

    Attributes:
        options: value by name, with dashes for underscores; "" = no value.
        environment: the assignments NAME=VALUE before the command.
    """

    options: dict[str, str]
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def first(self, *names: str) -> str | None:
        """Value of the first of these options that is given."""
        return next((self.options[name] for name in names if name in self.options), None)


def read_flags(text: str) -> Flags:
    """Parse a command line; the last value of an option counts.

    Raises:
        ConfigError: quotes do not match.
    """
    try:
        tokens = shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError as error:
        raise ConfigError(f"The command cannot be parsed: {error}.") from error
    options: dict[str, str] = {}
    environment: dict[str, str] = {}
    arguments: list[str] = []
    tokens.reverse()
    while tokens:
        name, equals, value = (token := tokens.pop()).partition("=")
        if _OPTION.match(token):
            values, name = options, name.replace("_", "-")
            if not equals and tokens and not _OPTION.match(tokens[-1]):
                value = tokens.pop()
        elif _ASSIGNMENT.match(token):
            values = environment
        else:
            arguments.append(token)
            continue
        values[name] = value
    return Flags(options, tuple(arguments), environment)


def read_python(text: str) -> tuple[list[ast.AST], Callable[[ast.expr], Any]]:
    """The syntax nodes of a program, which is not run, and a function that evaluates them.

    A literal has its value; a variable that of its literal or the name of the model loaded into it
    (`from_pretrained`), else its own name; a call has the function's name.

    Raises:
        ConfigError: it is not valid Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text).strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"The program is not valid Python: {error!s:.80}.") from error
    variables: dict[str, Any] = {}
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Constant(value=value)
                | ast.Call(
                    func=ast.Attribute(attr="from_pretrained"), args=[ast.Constant(value=value), *_]
                ),
            ):
                variables[name] = value

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return variables.get(name, name)
            case ast.Attribute(attr=name):
                return name
            case ast.Call(func=func):
                return ast.unparse(func)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None

    return nodes, value_of


def read_mapping(text: str, read_yaml: ReadYaml, expected: str) -> dict[str, Any]:
    """The mapping in a YAML text.

    Raises:
        ConfigError: there is none; the message begins with `expected`.
    """
    values = read_yaml(text)
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"{expected}, got {text.strip()[:60]!r}.")
    return {str(key): value for key, value in values.items()}
