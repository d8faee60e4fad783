"""What settings from the page may name: what is shipped, and what the server was started for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import presets
from engine.errors import SourceError
from playground.host.catalog import Catalog, catalog_within
from playground.host.models import Models
from tests.playground.tiny import save_tiny_llama


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    folder = tmp_path / "opened"
    (folder / "heads").mkdir(parents=True)
    return folder


def test_shipped_weights_may_be_used() -> None:
    catalog = catalog_within(Catalog.shipped(), (), ())
    for preset in catalog.presets.values():
        values = preset.config.model_dump()
        for name in filter(None, (values.get("speculative_model"), values.get("datastore"))):
            located = catalog.locate(name)
            assert catalog.locate(located) == located
    for name in presets.targets():
        assert catalog.resolve(name).name == name


def test_other_places_are_refused_alike_whether_they_exist(opened: Path) -> None:
    catalog = catalog_within(Catalog.shipped(), (), [str(opened), "some/model"])
    (opened / "link").symlink_to("/etc")
    (opened.parent / "opened2").mkdir()
    there = ["/etc/passwd", "/etc", f"{opened}/../opened2", f"{opened}/link/passwd", ".", ""]
    missing = ["/etc/nothing", "owner/model", "~nobody-here/x", "a\0b", f"{opened}/none"]
    missing.append("x" * 5000)
    said = set()
    for name in (*there, *missing):
        for find in (catalog.locate, catalog.resolve):
            with pytest.raises(SourceError) as refused:
                find(name)
            said.add(str(refused.value).replace(repr(name[:80]), "NAME"))
    assert len(said) == 1


def test_paths_allowed_at_the_start_may_be_used(opened: Path) -> None:
    tiny = save_tiny_llama(opened / "tiny")
    catalog = catalog_within(Catalog.shipped(), [str(tiny)], [str(opened / "heads"), "some/model"])
    assert catalog.target(str(tiny)).path == str(tiny)
    assert catalog.locate(str(opened / "heads")) == str(opened / "heads")
    assert catalog.resolve("some/model").hub == "some/model"
    with pytest.raises(SourceError):
        catalog.locate(str(opened))


def test_what_is_allowed_again_at_each_poll_is_held_once() -> None:
    catalog = catalog_within(Catalog.shipped(), (), ())
    for _ in range(100):
        catalog.admit("owner/head")
    places = catalog.locate.__self__.places  # type: ignore[attr-defined]
    assert [place for place in places if place == "owner/head"] == ["owner/head"]


def test_models_locate_drafters_by_the_catalog(tiny_folder: Path, tmp_path: Path) -> None:
    catalog = catalog_within(Catalog.shipped(), [str(tiny_folder)], ())
    with closing(
        Models(cache_dir=tmp_path, device="cpu", resolve=catalog.resolve, locate=catalog.locate)
    ) as models:
        models.target(catalog.target(str(tiny_folder)), "float32", lambda *_: None)
        for where in ("/etc", "/nothing"):
            with pytest.raises(SourceError, match="is not among the allowed paths"):
                models.build_context().weights(where, "heads")
