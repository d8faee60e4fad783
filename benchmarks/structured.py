"""Structured output with and without drafting: the same texts, all valid, and how much faster.

    python -m benchmarks.structured [--methods eagle2-smollm2-135m,suffix] [--limit 50]

Fifty prompts ask for JSON, ten of each of five kinds with a schema each. Every prompt is answered
greedily under its schema by plain decoding and by every method in turn, as they are by default.
Prints per method how many texts are plain decoding's, how many are valid by `jsonschema` (another
program than the one that holds the text), tok/s over plain decoding's, MAT, the share of drafts
that is accepted, and the drafts that were cut because the schema forbids them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema

from benchmarks import TARGET, read_options
from benchmarks.models import drafter_of, load
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.metrics import Metrics, measure, tok_s
from engine.model.text import whole_text
from engine.steps import End

PLAIN = "plain"
TEXT = {"type": "string", "maxLength": 32}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4}
COUNT = {"type": "integer", "minimum": 0, "maximum": 100_000}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "person": (
        {"name": TEXT, "age": COUNT, "city": TEXT, "hobbies": TEXTS},
        "a baker|a pilot|a painter|a nurse|a farmer|a judge|a diver|a teacher|a singer|a chef",
    ),
    "country": (
        {"name": TEXT, "capital": TEXT, "languages": TEXTS, "area_km2": COUNT},
        "France|Japan|Kenya|Brazil|Canada|Egypt|Norway|India|Peru|Italy",
    ),
    "animal": (
        {"name": TEXT, "class": {"enum": ["mammal", "bird", "fish", "reptile"]}, "food": TEXTS},
        "a lion|an owl|a salmon|a cobra|a horse|a parrot|a shark|a turtle|a wolf|an eagle",
    ),
    "recipe": (
        {"title": TEXT, "minutes": COUNT, "ingredients": TEXTS, "vegetarian": {"type": "boolean"}},
        "pancakes|tomato soup|fried rice|apple pie|salad|pasta|an omelette|tacos|bread|curry",
    ),
    "event": (
        {"title": TEXT, "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}}
        | {"place": TEXT, "guests": COUNT},
        "a concert|a wedding|a fair|a lecture|a race|a play|a market|a parade|a dinner|a meeting",
    ),
}


def main() -> None:
    """Answer every prompt with every method, print a line per method."""
    options = read_options(
        __doc__,
        smoke={"limit": 1, "methods": "suffix", "tokens": 24},
        target=TARGET,
        dtype="float32",
        methods="eagle2-smollm2-135m,suffix,token-recycling",
        limit=50,
        tokens=256,
    )
    target = load(options.target, options.dtype)
    names = [PLAIN, *options.methods.split(",")]
    drafters = {name: drafter_of(target, name) for name in names}
    runs: dict[str, list[tuple[str, bool, Metrics]]] = defaultdict(list)
    for question, schema in list(prompts())[: options.limit]:
        ids = target.encode_chat([{"role": "user", "content": question}])
        sampling = Sampling(structured_output="json_schema", grammar=json.dumps(schema))
        for name, drafter in drafters.items():
            limits = Limits(max_new_tokens=options.tokens)
            records = list(decode(target, drafter, ids, sampling=sampling, limits=limits))
            assert isinstance(end := records[-1], End)
            text = whole_text(target.tokenizer, end.output_ids)
            runs[name].append((text, is_valid(text, schema), measure(records)))
    print(f"{options.target} · {target.dtype_name} · {target.device_name} · {len(runs[PLAIN])}")
    print(
        f"{'method':24}{'same':>8}{'valid':>8}{'speedup':>10}{'MAT':>8}{'accepted':>10}{'cut':>8}"
    )
    for name in names:
        print(line(name, runs[name], runs[PLAIN]), flush=True)


def prompts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Prompts and their schemas, kind after kind in turn."""
    subjects = {kind: subjects.split("|") for kind, (_, subjects) in KINDS.items()}
    for n in range(10):
        for kind, (properties, _) in KINDS.items():
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            fields = ", ".join(properties)
            question = f"Describe {subjects[kind][n]} as a JSON object with the fields {fields}."
            yield question, {**schema, "additionalProperties": False}


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (jsonschema.ValidationError, json.JSONDecodeError):
        return False
    return True


def line(
    name: str, own: list[tuple[str, bool, Metrics]], plain: list[tuple[str, bool, Metrics]]
) -> str:
    """One method's figures, pooled over the prompts."""
    rates = [_rate([metrics for *_, metrics in runs]) for runs in (own, plain)]
    every = [metrics for *_, metrics in own]
    steps, accepted = sum(m.num_steps for m in every), sum(m.num_accepted for m in every)
    drafted, cut = sum(m.num_drafted for m in every), sum(m.num_cut for m in every)
    same = sum(one[0] == other[0] for one, other in zip(own, plain, strict=True))
    return (
        f"{name:24}{same:8}{sum(valid for _, valid, _ in own):8}{rates[0] / rates[1]:10.2f}"
        f"{1 + accepted / steps:8.2f}{accepted / max(1, drafted):10.0%}"
        f"{cut / max(1, cut + drafted):8.0%}"
    )


def _rate(runs: list[Metrics]) -> float:
    """tok/s of several runs."""
    timed = [(m.num_new_tokens, (m.num_new_tokens - 1) / m.tok_s) for m in runs if m.tok_s]
    found = tok_s(timed)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
