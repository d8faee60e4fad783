"""A choice tree as a small picture: depth to the right, one line per path."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

from engine.formats import plural
from engine.safe_text import visible_value
from engine.tree import ChoiceTree
from playground.errors import Fault, attempt

STEP_X, STEP_Y, MARGIN = 26, 7, 5
PICTURE = Environment(autoescape=True, finalize=visible_value).from_string("""
<figure class="pg-tree-picture"><b>{{ label }}</b>
{% if fault %}<figcaption class="faulty">{{ fault }}</figcaption>{% else %}
<svg viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}" role="img" aria-label="{{ text }}">
{% for x1, y1, x2, y2 in edges %}<path d="M{{ x1 }} {{ y1 }}L{{ x2 }} {{ y2 }}"/>{% endfor %}
{% for x, y in nodes %}<circle cx="{{ x }}" cy="{{ y }}" r="2.5"/>{% endfor %}
</svg><figcaption>{{ text }}</figcaption>{% endif %}
</figure>
""")


def tree_picture(label: str, raw: Any) -> str:
    """A picture of what a tree's control holds; what is wrong with it where it is no tree."""
    tree = attempt(lambda: ChoiceTree.parse(raw), where="drawing a tree")
    if isinstance(tree, Fault):
        return PICTURE.render(label=label, fault=tree.sentence)
    places = _places(tree)
    edges = [(*places[path[:-1]], *places[path]) for path in tree.paths]
    return PICTURE.render(
        label=label,
        width=2 * MARGIN + STEP_X * tree.depth,
        height=2 * MARGIN + STEP_Y * (len(tree.leaves) - 1),
        text=f"{plural(len(tree), 'node')}, {tree.depth} deep",
        edges=edges,
        nodes=places.values(),
    )


def _places(tree: ChoiceTree) -> dict[tuple[int, ...], tuple[int, float]]:
    """Where every path's node stands: leaves one below the other, a parent between its children."""
    below: dict[tuple[int, ...], list[float]] = {}
    places: dict[tuple[int, ...], tuple[int, float]] = {}
    rows = {leaf: MARGIN + STEP_Y * row for row, leaf in enumerate(sorted(tree.leaves))}
    for path in [*reversed(tree.paths), ()]:
        inner = below.get(path)
        y = (inner[0] + inner[-1]) / 2 if inner else float(rows[path])
        places[path] = MARGIN + STEP_X * len(path), y
        below.setdefault(path[:-1], []).append(y)
    return places
