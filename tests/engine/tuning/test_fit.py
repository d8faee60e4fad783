"""The size that is predicted to be the fastest here, and what is said about it."""

from __future__ import annotations

import pytest

import presets
from engine.drafters.combined import CombinedConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.method import MethodConfig
from engine.drafters.sizes import Size, SizeTable, beside_size
from engine.tuning.fit import fit_size
from engine.tuning.latency import LatencyCurve
from playground.host.methods import choose_method
from tests.engine.tuning.runs import Case, golden

FLAT = LatencyCurve((1, 2, 8, 32), (10.0, 10.0, 10.0, 10.0))
STEEP = LatencyCurve((1, 2, 8, 32), (10.0, 20.0, 80.0, 320.0))
FIT = NGramConfig(size="fit", max_draft_len=6)


@pytest.fixture(scope="module")
def case() -> Case:
    return golden("medusa")


def table(target: str, **method: object) -> SizeTable:
    """Twice as much is accepted of six tokens as of one."""
    return SizeTable(
        target=target,
        method={"decoding_type": "NGram", **method},
        sizes=(
            Size(settings={"max_draft_len": 1}, mat=1.5, rows=((1, 0.5), (2, 0.5))),
            Size(settings={"max_draft_len": 6}, mat=3.0, rows=((1, 0.5), (7, 0.5))),
        ),
    )


@pytest.mark.parametrize(("curve", "length"), [(FLAT, 6), (STEEP, 1)])
def test_where_rows_are_dear_little_is_drafted(
    case: Case, curve: LatencyCurve, length: int
) -> None:
    fit = fit_size(FIT, lambda _: table(case.bench.target.name), case.bench, lambda: curve)
    assert isinstance(fit.config, NGramConfig)
    assert fit.config.max_draft_len == length
    assert fit.config.size == "fit"
    assert f"max_draft_len {length} is predicted to be the fastest of 2 sizes" in fit.reason


def test_a_set_size_is_left_alone(case: Case) -> None:
    config = FIT.replace(size="set")

    def never() -> LatencyCurve:
        raise AssertionError("nothing is to be measured")

    assert fit_size(config, lambda _: None, case.bench, never).config is config


def test_nothing_measured_on_this_target_is_said(case: Case) -> None:
    fit = fit_size(FIT, lambda _: table("another"), case.bench, lambda: FLAT)
    assert fit.config is FIT
    assert "other sizes were not measured" in fit.reason


def test_a_table_serves_any_size_of_the_same_settings() -> None:
    measured = table("any", max_matching_ngram_size=3)
    same = NGramConfig(max_matching_ngram_size=3, max_draft_len=9, adaptive=True, size="fit")
    assert measured.serves(same)
    assert not measured.serves(same.replace(max_matching_ngram_size=2))
    assert "max_draft_len" not in beside_size(same)


def test_every_shipped_table_serves_its_preset() -> None:
    for name, measured in presets.size_tables().items():
        config = presets.methods()[name].config
        assert presets.sizes(config) is measured
        for size in measured.sizes:
            assert set(size.settings) <= set(config.size_settings.split())
            config.replace(**size.settings)
            assert sum(share for _, share in size.rows) == pytest.approx(1.0, abs=1e-3)
    for name, preset in presets.methods().items():
        if preset.config.size == "fit":
            parts = preset.config.within() or {name: preset.config}
            assert all(map(presets.sizes, parts.values())), name


def test_methods_within_are_fitted_each_by_itself(case: Case) -> None:
    both = CombinedConfig.parse(
        {
            "size": "fit",
            "retrieval": {"decoding_type": "NGram", "max_draft_len": 6},
            "model": {"decoding_type": "Lookahead"},
        }
    )

    def tables(config: MethodConfig) -> SizeTable | None:
        return table(case.bench.target.name) if isinstance(config, NGramConfig) else None

    fit = fit_size(both, tables, case.bench, lambda: STEEP)
    assert isinstance(fit.config, CombinedConfig)
    assert fit.config.retrieval == NGramConfig(max_draft_len=1)
    assert fit.config.model == both.model and fit.config.size == "fit"
    assert fit.reason.startswith("N-gram lookup. Fitted to this machine: max_draft_len 1")
    assert "Lookahead. Lookahead drafts as much as is set" in fit.reason


def test_a_size_that_is_set_is_no_longer_fitted() -> None:
    assert FIT.replace(max_draft_len=2).size == "set"
    assert FIT.replace(max_draft_len=2, size="fit").size == "fit"
    assert FIT.replace(max_matching_ngram_size=2).size == "fit"
    assert FIT.with_chain(3).size == "set"
    assert choose_method("ngram").size == "fit"
    assert choose_method("ngram", ["max_draft_len=3"]).size == "set"
    assert choose_method("ngram", ["max_draft_len=3", "size=fit"]).size == "fit"
