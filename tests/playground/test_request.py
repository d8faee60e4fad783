"""Hostile and careless payloads: each is refused with one sentence, none reaches the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafters import user_provided
from engine.errors import ConfigError, PlaygroundError
from engine.proposal import Budget, TargetOutput
from playground.errors import Fault, attempt
from playground.host.catalog import OWN_DRAFTERS, Catalog
from playground.host.request import MAX_PROMPT_CHARS, read_request
from tests.engine.drafters.judges import open_session
from tests.models import build_context, tiny_target
from tests.playground.asks import ask
from tests.playground.tiny import tiny_catalog


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return tiny_catalog(Path("unused"))


NO_COUNTS: list[Any] = ["0", "-5", "1e9", "10000000", "NaN", "", None, [], True]
HOSTILE: list[dict[str, Any]] = [
    *({"prompt": prompt} for prompt in ("", "  \n ", None)),
    *({"limits": {"max_new_tokens": tokens}} for tokens in NO_COUNTS),
    *({"target": target} for target in ("../../etc/passwd", None, ["tiny"])),
    {"dtype": "int8"},
    *({"method": method} for method in ("nothing", 7)),
    *({"mode": mode} for mode in ("both", ["chat"])),
    *({"prompt": x} for x in (7, {"a": 1}, "x" * (MAX_PROMPT_CHARS + 1), "half \ud800 pair")),
    *({"system": system} for system in (["x"], "x" * 20_001)),
    {"form": 3},
    {"form": {"values": []}},
    {"form": {"values": {"method": "x"}}},
    *(
        {"settings": values}
        for values in ({"decoding_type": "Autoregressive"}, {"unknown": 1}, {"note": "x" * 500_000})
    ),
    {"form": {"values": {"sampling": None}}},
    *(
        {"sampling": values}
        for values in ({"temperature": "NaN"}, {"top_p": 7}, {"seed": 1.5}, {"top_j": 4})
    ),
    {"form": {"values": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}}}}},
    *({"parent": parent} for parent in (["x"], "x" * 100, "a\nb")),
    {"repeats": 5},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_payloads_are_refused_with_a_sentence(
    catalog: Catalog, changes: dict[str, Any]
) -> None:
    with pytest.raises(PlaygroundError) as caught:
        read_request(catalog, ask(**changes))
    sentence = str(caught.value)
    assert len(sentence) < 600 and (sentence.endswith((".", "?")) or "must" in sentence)
    assert all(name in sentence for name in changes.get("limits", ()))


def test_own_drafters_are_offered_by_registered_name_only() -> None:
    shipped = Catalog.shipped()
    assert all(OWN_DRAFTERS not in key for _, key in shipped.method_choices("any"))
    form = {"values": {"method": {"drafter": "os:system"}}}
    catalog = dataclasses.replace(tiny_catalog(Path("unused")), types=shipped.types)
    request = read_request(catalog, ask(method=f"type:{OWN_DRAFTERS}", form=form))
    bench: Any = None
    with pytest.raises(ConfigError, match="registered"):
        request.config.build(bench)


def test_a_drafter_of_ones_own_that_fails_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fails:
        def draft(self, token_ids: list[int], length: int) -> list[int]:
            return [token_ids[10_000]]

    monkeypatch.setattr(user_provided, "_factories", {"mine": lambda target: Fails()})
    drafter = user_provided.UserProvidedConfig(drafter="mine").build(build_context(tiny_target()))
    session = open_session(drafter, [1, 2], 3, TargetOutput(torch.zeros(1, 1)))
    fault = attempt(lambda: session.propose(Budget(4)), where="run 7")
    assert isinstance(fault, Fault) and not fault.expected
    assert fault.sentence.startswith("Your drafter failed in run 7.\n")
    assert "return [token_ids[10_000]]" in fault.sentence and "IndexError" in fault.sentence
    assert "engine/drafters" not in fault.sentence, "our own lines are of no help"
