"""Chat templates: the settings that they read, and agents' histories."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import PromptError
from engine.model.chat_template import message_text, read_options, render
from engine.model.random_weights import byte_tokenizer

USER = {"role": "user", "content": "Weather in Paris?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": "b"}'}}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look up."},
    {"role": "tool", "content": "Sunny", "tool_call_id": "c1"},
]
ROLES = "{% for m in messages %}[{{ m.role }}]"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"


def rendered(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return render(tokenizer, messages, settings, model="tiny")


def test_options_are_the_variables_a_template_reads() -> None:
    options = read_options(
        SWITCH + ROLES + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert options.switches == ("enable_thinking",) and options.efforts == ()
    assert "m" not in options.names and "messages" in options.names
    assert read_options("{{ 'Reasoning: ' + reasoning_effort }}").efforts == (
        "low",
        "medium",
        "high",
    )
    assert read_options(
        "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'max' %}"
        "{% if reasoning_effort | lower not in ['none', 'low'] %}{% endif %}"
    ).efforts == ("none", "low", "max")
    assert not read_options("{% if %}").names  # rendering it says what is wrong


@pytest.mark.parametrize(
    ("template", "settings", "text"),
    [
        (SWITCH, {"enable_thinking": False}, "<off>"),
        (SWITCH, {"enable_thinking": True}, ""),
        (SWITCH, {"reasoning_effort": "none"}, "<off>"),
        (SWITCH, {"reasoning_effort": "high"}, ""),
        ("{{ thinking }}", {"enable_thinking": False}, "False"),
        ("{{ thinking }}{{ enable_thinking }}", {"enable_thinking": True}, "TrueTrue"),
        ("{{ reasoning_effort }}{{ thinking }}", {"reasoning_effort": "low"}, "low"),
        ("{{ reasoning_effort }}{{ thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ style.words[0] }}", {"style": {"words": ["terse"]}}, "terse"),
    ],
)
def test_settings_reach_the_template(template: str, settings: dict[str, Any], text: str) -> None:
    whole = rendered(template + "|{{ messages[0].content }}", [USER], **settings)
    assert whole == f"{text}|Weather in Paris?"


@pytest.mark.parametrize("name", ["enable_thinking", "reasoning_effort", "stile", "tools"])
def test_a_setting_that_the_template_does_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(PromptError, match=f"tiny's chat template does not read {name}"):
        rendered(ROLES + "{{ m.content }}{% endfor %}", [USER], **{name: True})


ANSWER = "{{ m.content or '' }}"


def calls(arguments: str) -> str:
    """The part of a template that writes a turn's calls."""
    return (
        f"{{% for c in m.tool_calls or [] %}}({{{{ c.function.name }}}} {arguments}){{% endfor %}}"
    )


NAMES = calls("")


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        (ANSWER + calls("{{ c.function.arguments | tojson }}"), '(weather {"a": "b"})'),
        (ANSWER + calls("{{ c.function.arguments }}"), '(weather {"a": "b"})'),
        (ANSWER + calls("{{ '' + c.function.arguments }}"), '(weather {"a": "b"})'),
        ("{{ m.content }}" + NAMES, "(weather )"),
        ("{{ m.content.strip() }}" + NAMES, "(weather )"),
        ("{% if m.content is not defined %}-{% endif %}" + ANSWER + NAMES, "-(weather )"),
        (ANSWER + "{{ m.reasoning_content }}" + NAMES, "Look up.(weather )"),
        (ANSWER + "{{ m.thinking }}" + NAMES, "Look up.(weather )"),
    ],
)
def test_an_agents_history_is_rendered_in_the_form_the_template_reads(turn: str, text: str) -> None:
    whole = rendered(ROLES + turn + "{% endfor %}", HISTORY)
    assert whole == f"[user]Weather in Paris?[assistant]{text}[tool]Sunny"


def test_parts_of_content_reach_a_template_that_reads_parts_and_one_that_does_not() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    turns = [{"role": "user", "content": parts}]
    typed = "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert rendered(ROLES + typed, turns) == "[user]<Say ><hello.>"
    assert rendered(ROLES + "{{ m.content }}{% endfor %}", turns) == "[user]Say \nhello."


@pytest.mark.parametrize(
    ("turn", "missing"),
    [
        ("{{ m.content or '' }}", "the call of the tool weather"),
        ("{% if m.role != 'tool' %}{{ m.content }}{% endif %}" + NAMES, "what a tool answers"),
        (NAMES, "what the user says"),
        ("{{ '' + m.content }}", "the call of the tool weather"),
    ],
)
def test_a_template_that_leaves_out_what_was_said_is_refused(turn: str, missing: str) -> None:
    with pytest.raises(PromptError, match=f"tiny's chat template leaves out {missing}"):
        rendered(ROLES + turn + "{% endfor %}", HISTORY)


def test_what_a_template_raises_is_one_sentence() -> None:
    template = "{{ raise_exception('Roles must alternate.') }}"
    with pytest.raises(
        PromptError, match=r"^tiny's chat template refused .*: Roles must alt\w+\.$"
    ):
        rendered(template, [USER])


def test_a_template_that_iterates_over_tools_is_rendered_without_any() -> None:
    assert rendered("{% for t in tools %}{% endfor %}{{ messages[0].content }}", [USER])


def test_a_turn_is_displayed_with_its_calls() -> None:
    assert [message_text(turn) for turn in HISTORY] == [
        "Weather in Paris?",
        'weather({"a": "b"})',
        "Sunny",
    ]
