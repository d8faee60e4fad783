"""Kinds of task: the six of Spec-Bench and code, and which category of a file belongs to which."""

from __future__ import annotations

GROUPS: dict[str, str] = {
    "chat": "Multi-turn conversation",
    "translation": "Translation",
    "summarisation": "Summarisation",
    "qa": "Question answering",
    "maths": "Mathematical reasoning",
    "rag": "Retrieval-grounded",
    "code": "Code",
}
"""Group → what it is called in a table, in the order of the tables."""
_CHAT = "writing roleplay reasoning math coding extraction stem humanities multi-turn mt_bench"
_MEMBERS: dict[str, str] = {
    "chat": _CHAT,
    "translation": "wmt",
    "summarisation": "summarization summary",
    "qa": "question_answering question-answering",
    "maths": "math_reasoning maths_reasoning gsm8k",
    "rag": "retrieval retrieval-grounded retrieval_grounded",
    "code": "humaneval completion instruction",
}
_GROUP_OF = {name: group for group, names in _MEMBERS.items() for name in names.split()}


def group_of(category: str) -> str:
    """The group of a category as a file spells it; one that is in none is a group of its own.

    MT-Bench's eight categories, `math` and `coding` among them, are Spec-Bench's conversations.
    """
    name = category.strip().lower().replace(" ", "_")
    return name if name in GROUPS else _GROUP_OF.get(name, category.strip())


def group_title(group: str) -> str:
    """What a group is called in a table."""
    return GROUPS.get(group, group)


def in_order(groups: set[str]) -> list[str]:
    """Groups in the order of the tables; those of a file's own come last."""
    known = [group for group in GROUPS if group in groups]
    return known + sorted(groups - set(GROUPS))
