"""N-gram lookup: proposals equal the implementations that its rules come from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters.lookup.ngram import NGramConfig, lookup_of
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.steps import End, Step
from tests.models import build_context, tiny_target

GOLDEN = Path(__file__).parents[2] / "golden" / "ngram"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
END = 10_000


def config_of(row: dict[str, Any], lookup: Any) -> NGramConfig:
    return NGramConfig(
        lookup=lookup,
        max_draft_len=row["max_draft_len"],
        max_matching_ngram_size=row["max_matching_ngram_size"],
    )


def propose(
    config: NGramConfig, sequence: list[int], end: int = END, eos_ids: frozenset[int] = frozenset()
) -> list[int]:
    lookup = lookup_of(config)
    lookup.begin(end, eos_ids)
    return lookup.draft(sequence)


@pytest.mark.parametrize("sequence", EXPECTED["sequences"], ids=lambda s: s["name"])
def test_prompt_lookup_equals_transformers(sequence: dict[str, Any]) -> None:
    for row in sequence["results"]:
        ours = propose(config_of(row, "transformers"), sequence["tokens"])
        assert ours == row["hf_5"]
        # Without a match, the old release feeds the token 0.
        assert ours == ([] if row["hf_4_37"] == [0] else row["hf_4_37"])


def test_prompt_lookup_stops_at_eos_and_at_the_end() -> None:
    for row in EXPECTED["hf_5_variants"]:
        eos_ids = frozenset() if row["eos_token_id"] is None else frozenset({row["eos_token_id"]})
        config = config_of(row, "transformers")
        assert propose(config, row["tokens"], row["max_length"], eos_ids) == row["draft"]


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
    *records, end = decode(target, drafter, prompt, limits=Limits(max_new_tokens=48))
    assert isinstance(end, End)
    assert list(end.output_ids) == run["final_tokens"]
    assert list(end.output_ids) == EXPECTED["prompts"][run["prompt"]]["plain_greedy"]
    recorded = {step["committed_len"]: (step["draft"], step["emitted"]) for step in run["steps"]}
    ours = {
        len(step_prefix): (list(step.tokens[1:]), list(step.committed[: step.num_committed]))
        for step_prefix, step in with_prefixes(prompt, end, records)
    }
    # The reference's first forward drafts on the prompt alone, ours is the prefill.
    assert len(prompt) in recorded and len(prompt) not in ours
    shared = recorded.keys() & ours.keys()
    assert len(shared) >= len(ours) - 1 and len(shared) >= len(recorded) - 2
    assert all(ours[at] == recorded[at] for at in shared)


def with_prefixes(prompt: list[int], end: End, records: list[Any]) -> list[tuple[list[int], Step]]:
    found, count = [], 1
    for step in (r for r in records if isinstance(r, Step)):
        found.append(([*prompt, *end.output_ids[:count]], step))
        count += step.num_committed
    return found


def brute_force(config: NGramConfig, tokens: list[int]) -> list[int]:
    """Prompt lookup as its definition reads: search the whole sequence for every length."""
    n, k = len(tokens), config.max_draft_len
    for size in range(min(config.max_matching_ngram_size, n - 1), 0, -1):
        for at in range(n - size):
            if tokens[at : at + size] == tokens[-size:]:
                return tokens[at + size : at + size + k]
    return []


# ---- TensorRT-LLM's pool, derived by hand from its documentation


def drafts(config: NGramConfig, *sequences: list[int]) -> list[int]:
    """What the pool proposes after the last sequence; each one is a run of its own."""
    lookup = lookup_of(config)
    for sequence in sequences:
        lookup.begin(END, frozenset())
        proposed = lookup.draft(sequence)
    return proposed


def pool(**options: Any) -> NGramConfig:
    return NGramConfig(**{"max_draft_len": 2, "max_matching_ngram_size": 2, **options})


TWICE = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2]
"""After (1, 2) came first (3, 4), then (5, 6)."""


def test_defaults_are_tensorrt_llms() -> None:
    config = NGramConfig()
    assert config.max_matching_ngram_size == 2
    assert config.is_keep_all and config.is_use_oldest and config.is_public_pool
    assert config.lookup == "pool"


def test_the_pool_proposes_the_oldest_match_or_the_newest() -> None:
    assert drafts(pool(), TWICE) == [3, 4]
    assert drafts(pool(is_use_oldest=False), TWICE) == [5, 6]


def test_the_longest_known_suffix_decides() -> None:
    sequence = [7, 2, 8, 8, 1, 2, 3, 3, 1, 2]
    assert drafts(pool(), sequence) == [3, 3]
    assert drafts(pool(max_matching_ngram_size=1), sequence) == [8, 8]
    assert drafts(pool(), [5, 6, 7, 6]) == [7, 6]
    assert drafts(pool(), [5, 6, 7]) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_longer_match_drops_the_shorter_ones(keep: bool) -> None:
    """While (4) stands at the end its continuation is short; it grows with the text."""
    config = pool(max_draft_len=3, max_matching_ngram_size=1, is_keep_all=keep)
    lookup = lookup_of(config)
    lookup.begin(END, frozenset())
    assert lookup.draft([4, 5, 4]) == [5, 4]
    assert lookup.draft([4, 5, 4, 6, 4]) == [5, 4, 6]


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
    lookup = lookup_of(pool(max_draft_len=8))
    for room, draft in ((10, [3, 4, 9, 1, 2]), (4, [3, 4, 9]), (2, [3]), (1, []), (0, [])):
        lookup.begin(7 + room, frozenset())
        assert lookup.draft([1, 2, 3, 4, 9, 1, 2]) == draft


def oldest_longest(config: NGramConfig, tokens: list[int]) -> list[int]:
    """A private pool's oldest match is the first occurrence with the longest continuation."""
    for size in range(min(config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
        continuations = [
            tokens[at + size : at + size + config.max_draft_len]
            for at in range(len(tokens) - size)
            if tokens[at : at + size] == tokens[-size:]
        ]
        if continuations:
            return max(continuations, key=len)
    return []


@pytest.mark.parametrize(
    ("lookup", "search"), [("transformers", brute_force), ("pool", oldest_longest)]
)
@pytest.mark.parametrize("seed", range(10))
def test_the_incremental_index_equals_a_search_of_the_whole_sequence(
    seed: int, lookup: str, search: Callable[[NGramConfig, list[int]], list[int]]
) -> None:
    """Only continuations that were cut by the sequence's end can change later."""
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
    index = lookup_of(config)
    for _ in range(2):
        index.begin(END, frozenset())
        tokens = [rng.randrange(3)]
        for _ in range(25):
            assert index.draft(tokens) == search(config, tokens)
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 5))]


def test_ngram_accepts_on_repetitive_text() -> None:
    target = tiny_target(eos_token_id=None)
    drafter = NGramConfig().build(build_context(target))
    for _ in range(2):
        *records, end = decode(target, drafter, [7, 8] * 8, limits=Limits(max_new_tokens=40))
    again = sum(r.num_accepted for r in records if isinstance(r, Step))
    assert again > 20, "the public pool knows this text by now"
