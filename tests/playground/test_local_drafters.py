"""Smaller models on the machine are offered as draft models, of whatever vocabulary."""

from __future__ import annotations

from pathlib import Path

from engine.model.sources import TargetSpec
from playground.experiments.fastest import methods_to_try
from playground.host.catalog import Catalog, catalog_within
from playground.host.local_drafters import draft_models_of
from playground.host.menu import GROUPS, LOCAL, MethodMenu
from storage import RunLog


def gguf(file: Path, mib: int) -> Path:
    with file.open("wb") as stream:
        stream.truncate(mib << 20)
    return file


def models(tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a draft model in the same folder that is small enough."""
    gguf(tmp_path / "half-and-more.gguf", 501)
    small = gguf(tmp_path / "small.gguf", 90)
    return gguf(tmp_path / "target.gguf", 1000), small


def test_models_of_half_the_size_draft_by_text(tmp_path: Path) -> None:
    target, small = models(tmp_path)
    spec = TargetSpec.of_path_or_hub(str(target))
    others = Catalog.shipped().targets
    found = draft_models_of(spec, others.values())
    drafters = [preset.config.model_dump()["speculative_model"] for preset in found]
    assert drafters == [str(small), "smollm2-135m-instruct"]
    assert {preset.config.model_dump()["vocabulary"] for preset in found} == {"text"}
    tiny = TargetSpec.of_path_or_hub(str(small))
    assert draft_models_of(tiny, others.values()) == []


def test_they_are_in_the_menu_and_tried_by_find_the_fastest(tmp_path: Path, log: RunLog) -> None:
    target, small = models(tmp_path)
    catalog = catalog_within(Catalog.shipped(), [str(target)], ())
    assert catalog.resolve(str(small)).path == str(small)
    labels = [label for label, _ in MethodMenu(catalog, log).choices(str(target))]
    mine = [label for label in labels if label.endswith(LOCAL)]
    assert len(mine) == 2 and "by text" in mine[0] and LOCAL in GROUPS

    def num_tried() -> int:
        return sum(
            key.startswith("local ") for key in methods_to_try(catalog, str(target)).values()
        )

    assert num_tried() == 2
    small.unlink()
    assert num_tried() == 1
