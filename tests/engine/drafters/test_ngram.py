"""N-gram lookup: proposals equal the implementations that its rules come from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.drafters.lookup.ngram import NGramConfig, Pool, PoolLookup, lookup_of
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from tests.engine.drafters.judges import write
from tests.models import build_context

GOLDEN = Path(__file__).parents[2] / "golden" / "ngram"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
END = 10_000


def config_of(row: dict[str, Any], lookup: Any) -> NGramConfig:
    return NGramConfig(
        lookup=lookup,
        max_draft_len=row["max_draft_len"],
        max_matching_ngram_size=row["max_matching_ngram_size"],
    )


def drafts(
    config: NGramConfig,
    *sequences: list[int],
    end: int = END,
    eos_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """What is proposed after the last sequence; each one is a run of its own."""
    shared = Pool() if config.is_public_pool else None
    for sequence in sequences:
        lookup = lookup_of(config, end, eos_ids, shared)
        proposed = lookup.draft(sequence)
        if isinstance(lookup, PoolLookup):
            lookup.learn(sequence)
    return proposed


@pytest.mark.parametrize("sequence", EXPECTED["sequences"], ids=lambda s: s["name"])
def test_prompt_lookup_equals_transformers(sequence: dict[str, Any]) -> None:
    for row in sequence["results"]:
        ours = drafts(config_of(row, "transformers"), sequence["tokens"])
        assert ours == row["hf_5"]
        # Without a match, the old release feeds the token 0.
        assert ours == ([] if row["hf_4_37"] == [0] else row["hf_4_37"])


def test_prompt_lookup_stops_at_eos_and_at_the_end() -> None:
    for row in EXPECTED["hf_5_variants"]:
        eos_ids = frozenset() if row["eos_token_id"] is None else frozenset({row["eos_token_id"]})
        config = config_of(row, "transformers")
        end = row["max_length"]
        assert drafts(config, row["tokens"], end=end, eos_ids=eos_ids) == row["draft"]


@pytest.mark.parametrize(
    "run",
    [run for run in EXPECTED["runs"] if run["impl"] == "hf_5"],
    ids=lambda r: f"{r['prompt']}-{r['max_draft_len']}",
)
def test_every_step_of_the_recorded_runs_is_the_same(run: dict[str, Any]) -> None:
    spec = TargetSpec(name="golden", path=str(GOLDEN / "target"))
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=GOLDEN)
    drafter = config_of(run, "transformers").build(build_context(target))
    prompt = EXPECTED["prompts"][run["prompt"]]["ids"]
    text = write(target, drafter, prompt, tokens=48)
    assert text.output == run["final_tokens"] == EXPECTED["prompts"][run["prompt"]]["plain_greedy"]
    recorded = {step["committed_len"]: (step["draft"], step["emitted"]) for step in run["steps"]}
    ours = {
        step.context_len + 1: (list(step.tokens[1:]), list(step.committed[: step.num_committed]))
        for step in text.steps
    }
    # The reference's first forward drafts on the prompt alone, ours is the prefill.
    assert len(prompt) in recorded and len(prompt) not in ours
    shared = recorded.keys() & ours.keys()
    assert len(shared) >= len(ours) - 1 and len(shared) >= len(recorded) - 2
    assert all(ours[at] == recorded[at] for at in shared)


# ---- TensorRT-LLM's pool, derived by hand from its documentation


def pool(**options: Any) -> NGramConfig:
    return NGramConfig(**{"max_draft_len": 2, "max_matching_ngram_size": 2, **options})


TWICE = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2]
"""After (1, 2) came first (3, 4), then (5, 6)."""


def test_the_pool_proposes_the_oldest_match_or_the_newest() -> None:
    assert drafts(pool(), TWICE) == [3, 4]
    assert drafts(pool(is_use_oldest=False), TWICE) == [5, 6]


def test_one_match_is_replaced_only_by_a_longer_one() -> None:
    """Three runs know (1) → (2), (1) → (3, 4) and (1) → (5, 6)."""
    runs = ([1, 2], [1, 3, 4], [1, 5, 6], [9, 1])
    for keep, lookup, newest in (
        (True, "pool", [5, 6]),
        (False, "pool_as_coded", [5, 6]),  # TensorRT-LLM's code adds those of the same length
        (False, "pool", [3, 4]),  # its guide: one value for each key
    ):
        options = {"max_matching_ngram_size": 1, "is_keep_all": keep, "lookup": lookup}
        assert drafts(pool(**options), *runs) == [3, 4]
        assert drafts(pool(**options, is_use_oldest=False), *runs) == newest


def test_a_public_pool_outlives_the_run_and_a_private_one_does_not() -> None:
    assert drafts(pool(), [1, 2, 3, 4], [9, 1, 2]) == [3, 4]
    assert drafts(pool(is_public_pool=False), [1, 2, 3, 4], [9, 1, 2]) == []


def test_the_pool_drafts_no_more_than_the_text_still_needs() -> None:
    """Beside the drafts every step commits one token of the target's own."""
    for room, draft in ((10, [3, 4, 9, 1, 2]), (4, [3, 4, 9]), (2, [3]), (1, []), (0, [])):
        lookup = lookup_of(pool(max_draft_len=8), 7 + room, frozenset())
        assert lookup.draft([1, 2, 3, 4, 9, 1, 2]) == draft


def continuations(config: NGramConfig, tokens: list[int]) -> list[list[int]]:
    """What followed the longest suffix that occurred before, by a search of the whole sequence."""
    for size in range(min(config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
        found = [
            tokens[at + size : at + size + config.max_draft_len]
            for at in range(len(tokens) - size)
            if tokens[at : at + size] == tokens[-size:]
        ]
        if found:
            return found
    return [[]]


@pytest.mark.parametrize("lookup", ["transformers", "pool"])
@pytest.mark.parametrize("seed", range(10))
def test_the_incremental_index_equals_a_search_of_the_whole_sequence(
    seed: int, lookup: str
) -> None:
    """transformers takes the first match, a private pool the first of the longest ones."""
    rng = random.Random(seed)
    config = NGramConfig.parse(
        {
            "lookup": lookup,
            "max_draft_len": rng.randint(1, 6),
            "max_matching_ngram_size": rng.randint(1, 4),
            "is_keep_all": rng.random() < 0.5,
            "is_public_pool": False,
        }
    )
    for _ in range(2):
        index = lookup_of(config, END, frozenset())
        tokens = [rng.randrange(3)]
        for _ in range(25):
            found = continuations(config, tokens)
            wanted = found[0] if lookup == "transformers" else max(found, key=len)
            assert index.draft(tokens) == wanted
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 5))]
