"""What can be varied comes from the method's class; ranges and lists are checked against it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from engine.drafters import methods
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.lookup.suffix import SuffixConfig
from engine.errors import ConfigError
from playground.experiments.space import (
    MAX_GRID,
    Space,
    VariedSetting,
    parse_vary,
    suggested_range,
    tunables_of,
)
from playground.experiments.sweep.trials import distributions

NGRAM = NGramConfig()


def space(*vary: str, base: Any = NGRAM) -> Space:
    return Space(base, [parse_vary(text) for text in vary])


def test_every_bounded_number_literal_and_bool_can_be_varied() -> None:
    for cls in methods().values():
        base = cls.parse({})
        known = {tunable.name: tunable for tunable in tunables_of(base)}
        for field, info in cls.model_fields.items():
            if info.annotation is bool:
                assert suggested_range(known[field], getattr(base, field)) == "false,true"
            if info.annotation in (int, float):
                assert known[field].is_number
                assert known[field].is_integer == (info.annotation is int)
        assert "decoding_type" not in known and not any("choices" in field for field in known)
    literal = {tunable.name: tunable for tunable in tunables_of(NGRAM)}["lookup"]
    assert literal.choices == get_args(NGramConfig.model_fields["lookup"].annotation)


def test_suggested_ranges_lie_within_the_bounds_and_hold_the_value() -> None:
    for cls in methods().values():
        base = cls.parse({})
        for tunable in tunables_of(base):
            name, value = tunable.name, getattr(base, tunable.name)
            if suggested := suggested_range(tunable, value):
                made = Space(base, [parse_vary(f"{name}={suggested}")])
                assert made.contains({name: value}) or not value, tunable


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_draft_len=1:4", (1, 2, 3, 4)),
        ("max_draft_len=1:10:4", (1, 5, 9)),
        ("max_draft_len=3:64:log", (3, 6, 12, 24, 48, 64)),
        ("max_draft_len=1:64:log", (1, 2, 4, 8, 16, 32, 64)),
        ("max_draft_len=7:7", (7,)),
        ("max_draft_len=8,2", (8, 2)),
        ("lookup=pool,transformers", ("pool", "transformers")),
        ("is_keep_all=true,false", (True, False)),
    ],
)
def test_a_grid_has_exactly_these_values(text: str, values: tuple[Any, ...]) -> None:
    made = space(text)
    field = made.varied[0].field
    assert tuple(point[field] for point in made.grid()) == values
    assert made.num_grid == len(values)


def test_a_grid_is_every_combination_and_ends_at_its_end() -> None:
    made = space("max_draft_len=1:3", "lookup=pool,transformers")
    assert len(made.grid()) == made.num_points == 6
    assert made.points() == made.grid()
    assert made.grid()[1] == {"max_draft_len": 1, "lookup": "transformers"}
    base = SuffixConfig()
    tenths = space("min_token_prob=0:0.3:0.1", base=base).grid()
    assert [point["min_token_prob"] for point in tenths] == [0.0, 0.1, 0.2, 0.3]
    with pytest.raises(ConfigError, match="a grid needs its step"):
        space("min_token_prob=0:0.3", base=base).grid()


def test_huge_spaces_are_counted_but_not_listed() -> None:
    base = SuffixConfig()
    made = space("global_pool_size=1000:10000000", "max_draft_len=1:64", base=base)
    assert made.num_points == 64 * (10_000_000 - 999) > MAX_GRID
    assert made.points() is None
    with pytest.raises(ConfigError, match="Narrow"):
        made.grid()
    assert space("min_token_prob=0:1", base=base).num_points is None
    assert space("min_token_prob=0:1:1e-9", base=base).num_points is None


def test_a_search_by_factors_takes_the_integers_between() -> None:
    assert space("max_draft_len=1:8:log").num_points == 8
    assert len(space("max_draft_len=1:8:log").grid()) == 4
    factors = space("max_draft_len=2:8:log")
    assert factors.log_values(search=False) == " max_draft_len takes 2, 4, 8."
    assert "any value from 2 to 8" in factors.log_values(search=True)
    assert space("max_draft_len=2:8").log_values(search=False) == ""


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ("x", "--vary takes field=low:high"),
        ("max_draft_len=", "--vary takes field=low:high"),
        ("nope=1:2", "'nope' cannot be varied"),
        ("decoding_type=NGram", "cannot be varied"),
        ("max_draft_len=0:5", "max_draft_len must be greater than or equal to 1, got 0"),
        ("max_draft_len=1:65", "got 65"),
        ("max_draft_len=1:4.5", "got 4.5"),
        ("max_draft_len=5:1", "low ≤ high"),
        ("max_draft_len=1:6:0", "greater than 0"),
        ("max_draft_len=1:6:0.5", "its step must be one"),
        ("max_draft_len=1:6:often", "the step must be a number or log"),
        ("max_draft_len=1:2:3:4", "low:high:step"),
        ("max_draft_len=nan:4", "low ≤ high"),
        ("max_draft_len=1,1", "each value once"),
        ("max_draft_len=1,true", "got true"),
        ("max_draft_len=none", "got none"),
        ("lookup=1:2", "List its values"),
        ("lookup=pool,foo", "must be 'pool', 'pool_as_coded' or 'transformers', got foo"),
        ("is_keep_all=1", "got 1"),
    ],
)
def test_a_wrong_range_is_one_sentence(vary: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        space(vary)


def test_nothing_twice_the_same_and_an_excluded_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="once"):
        space("max_draft_len=1:2", "max_draft_len=3:4")
    with pytest.raises(ConfigError, match="must be greater than 0, got 0"):
        space("max_spec_factor=0:2", base=SuffixConfig())


def test_ranges_survive_storing() -> None:
    for text in ("max_draft_len=1:16:3", "max_draft_len=1:16:log", "lookup=pool,transformers"):
        vary = parse_vary(text)
        assert VariedSetting.parse(vary.model_dump(mode="json")) == vary
        assert f"{vary.field}={vary}" == text


def test_optuna_draws_from_the_same_values() -> None:
    made = space("max_draft_len=1:10:4", "lookup=pool,transformers", "is_keep_all=true,false")
    found = distributions(made)
    assert list(found) == ["max_draft_len", "lookup", "is_keep_all"]
    for point in made.grid():
        for field, value in point.items():
            assert found[field].to_external_repr(found[field].to_internal_repr(value)) == value
    inside = {"max_draft_len": 9, "lookup": "pool", "is_keep_all": True}
    assert made.contains(inside)
    assert not made.contains({**inside, "max_draft_len": 10})
    assert not made.contains({**inside, "is_keep_all": 1})
