"""The page offers what fits the target and says why the rest does not."""

from __future__ import annotations

import pytest

from playground.host.catalog import TYPE_PREFIX, Catalog

EMBEDDED = "smollm2-135m-instruct"


@pytest.mark.parametrize("target", [EMBEDDED, "vicuna-7b-v1.3", "deepseek-v3"])
def test_every_preset_is_either_offered_or_explained(target: str) -> None:
    catalog = Catalog.shipped()
    offered = {key for _, key in catalog.method_choices(target)}
    explained = {title for title, _ in catalog.unavailable(target)}
    for name, preset in catalog.presets.items():
        assert (name in offered) != (preset.title in explained), name
        assert (name in offered) == (preset.target in (None, target))


def test_what_a_method_needs_is_said() -> None:
    catalog, mtp = Catalog.shipped(), TYPE_PREFIX + "MTP"
    reasons = dict(catalog.unavailable(EMBEDDED))
    assert reasons["Medusa heads for Vicuna 7B"] == "made for vicuna-7b-v1.3"
    titles = {key: title for title, key in catalog.method_choices(EMBEDDED)}
    assert mtp not in titles and "MTP" in reasons["MTP"]
    assert mtp in {key for _, key in catalog.method_choices("deepseek-v3")}
    assert titles[TYPE_PREFIX + "Medusa"].endswith("needs weights")
    assert titles[TYPE_PREFIX + "NGram"].endswith("default settings")
