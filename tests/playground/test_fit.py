"""The page offers what fits the target and says why the rest does not; useless drafts are named."""

from __future__ import annotations

import pytest

from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.result import warning_of

EMBEDDED = "smollm2-135m-instruct"


@pytest.mark.parametrize("target", [EMBEDDED, "vicuna-7b-v1.3", "deepseek-v3"])
def test_every_preset_is_either_offered_or_explained(target: str) -> None:
    catalog = Catalog.shipped()
    offered = {key for _, key in catalog.method_choices(target)}
    explained = {title for title, _ in catalog.unavailable(target)}
    for name, preset in catalog.presets.items():
        assert (name in offered) != (preset.title in explained), name
        assert (name in offered) == (preset.target in (None, target))


def test_reason_names_the_target_that_a_drafter_belongs_to() -> None:
    reasons = dict(Catalog.shipped().unavailable(EMBEDDED))
    assert reasons["Medusa heads for Vicuna 7B"] == "made for vicuna-7b-v1.3"
    assert "MTP" in reasons["MTP"]


def test_mtp_is_offered_only_where_the_target_carries_it() -> None:
    catalog = Catalog.shipped()
    key = TYPE_PREFIX + "MTP"
    assert key in {k for _, k in catalog.method_choices("deepseek-v3")}
    assert key not in {k for _, k in catalog.method_choices(EMBEDDED)}


def test_methods_that_need_weights_say_so() -> None:
    titles = {key: title for title, key in Catalog.shipped().method_choices(EMBEDDED)}
    assert titles[TYPE_PREFIX + "Medusa"].endswith("needs weights")
    assert titles[TYPE_PREFIX + "NGram"].endswith("default settings")


@pytest.mark.parametrize(
    ("mat", "steps", "drafted", "warns"),
    [
        (1.04, 20, 100, True),
        (1.05, 20, 100, False),
        (1.0, 19, 100, False),
        (1.0, 50, 0, False),
        (None, None, 3, False),
    ],
)
def test_warning_comes_below_mat_1_05_over_20_steps_of_drafting(
    mat: float | None, steps: int | None, drafted: int, warns: bool
) -> None:
    warning = warning_of(
        {"mat": mat, "num_steps": steps, "num_drafted": drafted}, {"trained": True}
    )
    assert (warning is not None) == warns
    assert warning is None or "another target" in warning
