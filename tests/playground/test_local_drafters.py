"""Smaller models on the machine are offered as draft models, of whatever vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from engine.model.sources import TargetSpec
from playground.experiments.fastest import methods_to_try
from playground.host.catalog import Catalog, catalog_within
from playground.host.local_drafters import draft_models_of, num_bytes
from playground.host.menu import GROUPS, LOCAL, MethodMenu
from storage import RunLog
from tests.engine.cpu.tiny_gguf import finish, write_gguf


def gguf(file: Path, mib: int, **about: str) -> Path:
    """A model of this size, as its header has it."""
    write_gguf(file, about=about)
    with file.open("r+b") as stream:
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


def test_only_whole_models_that_load_are_offered(tmp_path: Path) -> None:
    target, small = models(tmp_path)
    write_gguf(tmp_path / "adapter.gguf", about={"general.type": "adapter"})
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    projector = GGUFWriter(tmp_path / "mmproj-model.gguf", "clip")
    projector.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    finish(projector)
    for model, mib in (("fits", 100), ("large", 300)):
        for part in (1, 2):
            file = tmp_path / f"{model}-{part:05}-of-00002.gguf"
            writer = GGUFWriter(file, "llama")
            for field, number in (("count", 2), ("no", part - 1)):
                writer.add_uint16(f"split.{field}", number)
            writer.add_tensor(f"blk.{part}.weight", np.zeros((4, 4), np.float32))
            finish(writer)
            with file.open("r+b") as stream:
                stream.truncate(mib << 20)
    found = draft_models_of(TargetSpec.of_path_or_hub(str(target)), ())
    names = [Path(one.config.model_dump()["speculative_model"]).name for one in found]
    assert names == [small.name, "fits-00001-of-00002.gguf"]
    split = TargetSpec.of_path_or_hub(str(tmp_path / "large-00001-of-00002.gguf"))
    assert num_bytes(split) == 600 << 20


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
