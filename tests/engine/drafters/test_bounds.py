"""What drafters collect from texts stays within its bytes, however many texts there are."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.drafters.lookup import bounded, suffix
from engine.drafters.lookup.bounded import BoundedTable
from engine.proposal import Budget, Outcome, TargetOutput
from tests.engine.drafters.judges import observe, open_session, target_of
from tests.models import VOCAB, build_context

MOST = 1 << 20
LONG = {"max_draft_len": 16, "max_matching_ngram_size": 4}
COLLECTING: dict[str, dict[str, Any]] = {
    "pool": {"decoding_type": "NGram", **LONG},
    "pool-of-the-newest": {"decoding_type": "NGram", "is_keep_all": False, **LONG},
    "prompt-lookup": {"decoding_type": "NGram", "lookup": "transformers", **LONG},
    "lookahead": {"decoding_type": "Lookahead", "max_verification_set_size": 64},
    "text": {"decoding_type": "Suffix"},
    "earlier-runs": {
        "decoding_type": "Suffix",
        "use_global_pool": True,
        "global_pool_size": 1_000_000,
    },
    "matrix": {"decoding_type": "Token_Recycling"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "POOL_BYTES", MOST)
    monkeypatch.setattr(suffix, "TEXT_BYTES", MOST)
    monkeypatch.setattr(suffix, "RUNS_BYTES", MOST)


def write(drafter: Drafter, prompt: list[int], steps: int) -> Any:
    """The session of a text that nobody verifies: every step commits a token at random."""
    generator = torch.Generator().manual_seed(len(prompt))
    shown = TargetOutput(torch.randn(1, VOCAB, generator=generator))
    session = open_session(drafter, prompt, prompt[0], shown)
    for _ in range(steps):
        proposal = session.propose(Budget(64))
        output = TargetOutput(torch.randn(proposal.num_rows, VOCAB, generator=generator))
        observe(session, Outcome(proposal, output, (0,), (int(output.logits[0].argmax()),)))
    return session


def bytes_after_each(drafter: Drafter, texts: int, length: int) -> Iterator[int]:
    rng = random.Random(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(texts):
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            session = write(drafter, prompt, steps=40)
            yield tracemalloc.get_traced_memory()[0] - before - 16 * length
            session.close()
            del session
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", COLLECTING)
def test_a_drafters_memory_stays_within_its_limit(name: str) -> None:
    drafter = parse_method(COLLECTING[name]).build(build_context(target_of("llama")))
    memories = 2 if name == "earlier-runs" else 1  # of this text, and of those before
    assert max(bytes_after_each(drafter, texts=2, length=4000)) < memories * MOST


def test_the_least_recently_used_entry_goes_first() -> None:
    table = BoundedTable[int, str]()
    for key in range(4):
        table.put(key, "", MOST // 4)
    assert table.get(0) is not None
    table.put(4, "", MOST // 4)
    assert [key in table._values for key in range(5)] == [True, False, True, True, True]
    table.resize(4, MOST)  # larger than all that is allowed: alone
    assert [key in table._values for key in range(5)] == [False, False, False, False, True]
    table.put(4, "", 1)
    assert table.num_bytes == 1
