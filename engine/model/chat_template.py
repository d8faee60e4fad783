"""Chat templates: the settings that one reads, and conversations rendered by it.

A conversation is rendered as `apply_chat_template` of the model's publisher does it. Templates
differ in what they take for content and for a tool call's arguments; of the forms that a
conversation may have, the first is used in which nothing that was said is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from jinja2 import meta, nodes

from engine.config import EFFORT, THINKING
from engine.errors import ConfigError, PromptError, first_line
from engine.safe_text import as_text

if TYPE_CHECKING:  # the log is listed without it
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""One turn: `role`, `content` (text, a list of text parts or None), and of an agent's history
`tool_calls`, `tool_call_id`, `name` and `reasoning_content`, each as in OpenAI's requests."""
TEMPLATE_S = 2.0
"""Limit for rendering a conversation, which normally takes milliseconds."""
SWITCHES = (THINKING, "thinking")
"""The variables by which templates read whether to think."""
EFFORTS = ("low", "medium", "high")
"""Values of the effort where a template compares it with none."""
FIXED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message raise_exception "
    "strftime_now bos_token eos_token unk_token pad_token".split()
)
"""Variables that a request does not set."""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Marks the assistant's tokens for training; a tag of transformers that Jinja does not know."""
PYTHON_VALUES = ("{'", "[{'")
"""How Python's own notation of structured values begins."""
BROKEN = (
    *(jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError),
    *(OSError, RuntimeError, MemoryError, ConfigError),
)
"""What a template may raise."""
SPEAKERS = {"user": "the user says", "tool": "a tool answers"}
"""Roles whose words every template must show."""
ContentForm = Literal["given", "text", "parts"]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template lets a request set.

    Attributes:
        names: the variables that it reads.
        efforts: values of `reasoning_effort` that it tells apart; empty where it reads none.
    """

    names: frozenset[str] = frozenset()
    efforts: tuple[str, ...] = ()

    @property
    def switches(self) -> tuple[str, ...]:
        """The variables that turn thinking on or off; empty where it has no switch."""
        return tuple(name for name in SWITCHES if name in self.names)

    def variables(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A request's settings as variables of this template.

        Thinking has one switch, whatever the template calls it, and where it has only a switch,
        every effort but `none` turns it on.

        Raises PromptError: the template does not read one of them.
        """
        values = dict(settings)
        effort = values.get(EFFORT)
        has_effort = EFFORT in self.names and (effort != "none" or "none" in self.efforts)
        if effort is not None and self.switches and not has_effort:
            values.setdefault(THINKING, effort != "none")
            del values[EFFORT]
        if THINKING in values and self.switches:
            is_on = values.pop(THINKING)
            values = dict.fromkeys(self.switches, is_on) | values
        for name in values:
            if name not in self.names or name in FIXED:
                allowed = ", ".join(sorted({*self.switches, EFFORT} & self.names)) or "none"
                raise PromptError(
                    f"chat template does not read {name:.60}; of the settings for thinking it "
                    f"reads {allowed}. Leave {name:.60} out."
                )
        return values


@functools.lru_cache(maxsize=16)
def read_options(template: str) -> TemplateOptions:
    """The options of a template's text; none if it cannot be parsed."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(GENERATION_TAG.sub("", template))
        compared, defaults = _compared_efforts(tree), _default_efforts(tree)
        names = frozenset(meta.find_undeclared_variables(tree))  # alters the tree
    except (jinja2.TemplateError, RecursionError):
        return TemplateOptions()
    if EFFORT not in names:
        return TemplateOptions(names)
    efforts = dict.fromkeys([*compared, *defaults]) if compared else EFFORTS
    return TemplateOptions(names, tuple(efforts))


def _compared_efforts(tree: nodes.Template) -> list[str]:
    """The texts that a template compares its effort with."""
    efforts: list[str] = []
    for comparison in tree.find_all(nodes.Compare):
        value = comparison.expr
        while isinstance(value, nodes.Filter) and value.node is not None:
            value = value.node
        if isinstance(value, nodes.Name) and value.name == EFFORT:
            for operand in comparison.ops:
                efforts += _texts(operand.expr)
    return efforts


def _default_efforts(tree: nodes.Template) -> list[str]:
    """The texts that a template sets its effort to."""
    efforts: list[str] = []
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and assignment.target.name == EFFORT:
            value = assignment.node
            efforts += _texts(value.expr2 if isinstance(value, nodes.CondExpr) else value)
    return efforts


def _texts(node: nodes.Node | None) -> Iterator[str]:
    """The texts of a constant, or of a list of constants."""
    for one in node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]:
        if isinstance(one, nodes.Const) and isinstance(one.value, str) and one.value:
            yield one.value


# ---- rendering


def content_text(content: object) -> str:
    """A turn's content as one text: its text parts, a line each; empty without content."""
    return "\n".join(_content_parts(content))


def _content_parts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, Sequence) else ()
    return [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]


def system_text(messages: Sequence[Message]) -> str:
    """The system prompt of a conversation; empty without one."""
    return next((content_text(m.get("content")) for m in messages if m["role"] == "system"), "")


def message_text(message: Message) -> str:
    """A turn for display: its content, and its tool calls, a line each."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"{function['name']}({function['arguments']})" for function in calls]
    return "\n".join(filter(None, [content_text(message.get("content")), *lines]))


def is_message(message: Message) -> bool:
    """Whether a turn has the keys by which it is rendered, with values of their types."""
    calls = message.get("tool_calls") or ()
    functions = [c.get("function") for c in calls if isinstance(c, Mapping)]
    return (
        isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | Sequence | None)
        and len(functions) == len(calls)
        and all(isinstance(f, Mapping) and {"name", "arguments"} <= f.keys() for f in functions)
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    settings: Mapping[str, Any],
    *,
    model: str,
) -> str:
    """A conversation rendered by the tokenizer's chat template, with its generation prompt.

    Args:
        settings: values of variables that the template reads.
        model: its name in error messages.

    Raises PromptError: the template rejects the turns or a setting, leaves out what was said, or
        fails.
    """
    try:
        template = tokenizer.get_chat_template()
        variables = read_options(template).variables(settings)
        if tokenizer.bos_token is None:  # so that a template may add it to a text
            variables["bos_token"] = ""
        with _time_limit(TEMPLATE_S):
            return _render_any(tokenizer, template, messages, variables)
    except PromptError as error:
        raise PromptError(f"{model}'s {error}") from error
    except BROKEN as error:
        raise PromptError(
            f"{model}'s chat template refused the turns: {first_line(error).rstrip('.')}."
        ) from error


def _render_any(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Message],
    variables: dict[str, Any],
) -> str:
    """The conversation in the first form that the template renders completely."""
    known = "\n".join([template, *(content_text(m.get("content")) for m in messages)])
    refusal: Exception | None = None
    second_best: str | None = None
    for tools, turns in product((None, []), _forms(messages)):
        try:
            rendered = tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
            text = as_text(str(rendered), what="what it writes")
        except TimeoutError:
            raise
        except BROKEN as error:
            refusal = refusal or error
            continue
        if missing := _missing(text, messages):
            if not isinstance(refusal, PromptError):  # says more than what another form raised
                refusal = PromptError(f"chat template leaves out {missing}.")
        elif any(text.count(value) > known.count(value) for value in PYTHON_VALUES):
            second_best = second_best or text
        else:
            return text
    if second_best is None:
        assert refusal is not None
        raise refusal
    return second_best


def _forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The conversation in the forms that templates read, each once, as it was given first."""
    forms: list[list[dict[str, Any]]] = []
    contents: tuple[ContentForm, ...] = ("given", "text", "parts")
    for content, parsed, absent in product(contents, (True, False), (None, "")):
        turns = [_turn(message, content, parsed, absent) for message in messages]
        if turns not in forms:
            forms.append(turns)
            yield turns


def _turn(
    message: Message, content: ContentForm, parsed: bool, absent: str | None
) -> dict[str, Any]:
    """One turn in one form.

    Args:
        parsed: whether the arguments of tool calls are objects, else JSON text.
        absent: content of a turn without any; transformers drops a key whose value is None.
    """
    turn, given = dict(message), message.get("content")
    if given is None:
        turn["content"] = absent
    elif content != "given":
        text = content_text(given)
        turn["content"] = text if content == "text" else [{"type": "text", "text": text}]
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [_tool_call(call, parsed) for call in calls]
    return turn


def _tool_call(call: Mapping[str, Any], parsed: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not parsed and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif parsed and isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # agents write faulty JSON, too
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _missing(text: str, messages: Sequence[Message]) -> str | None:
    """What a rendered conversation leaves out, in words; a text may be there as a JSON string."""
    for message in messages:
        if who := SPEAKERS.get(message["role"]):
            for said in map(str.strip, _content_parts(message.get("content"))):
                quoted = [
                    json.dumps(said, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)
                ]
                if not any(one in text for one in (said, *quoted)):
                    return f"what {who}"
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in text:
                return f"the call of the tool {call['function']['name']:.60}"
    return None


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError from a template's own lines when they take longer.

    Its loops run as Python code in this thread; a call into a library is not interrupted.
    """
    ends_s: float | None = None  # its compilation does not count

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal ends_s
        if frame.f_code.co_filename != "<template>":
            return None
        ends_s = ends_s or time.monotonic() + seconds
        if time.monotonic() > ends_s:
            raise TimeoutError(f"it takes more than {seconds:g} s")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
