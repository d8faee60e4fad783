"""The models that a process keeps loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.model.sources import TargetSpec
from playground.host.bounded import BoundedCache
from playground.host.models import Models
from tests.storage.conftest import errors_at_once


@pytest.fixture
def models(tiny_folder: Path, tmp_path: Path) -> Iterator[Models]:
    """With the tiny target loaded; every name is a model like it."""

    def resolve(name: str) -> TargetSpec:
        return TargetSpec(name=name, path=str(tiny_folder))

    models = Models(
        cache_dir=tmp_path, device="cpu", resolve=resolve, locate=lambda name, kind="drafters": name
    )
    models.target(resolve("tiny"), "float32", lambda *told: None)
    yield models
    models.close()


def drafting_with(name: str) -> MethodConfig:
    return parse_method({"decoding_type": "Draft_Target", "speculative_model": name})


def draft_models(models: Models) -> set[str]:
    return {name for name, *_ in models._companions}


def test_a_draft_model_goes_with_the_last_drafter_and_job_that_draw_on_it(models: Models) -> None:
    for name in ("a", "b", "c"):
        models.drafter(drafting_with(name))
    assert draft_models(models) == {"a", "b", "c"}, "a job may use what it has loaded to its end"
    models.release()
    models.release()
    assert draft_models(models) == {"b", "c"}, "these two drafters are kept ready"
    drafter = drafting_with("d").build(models.build_context())
    models.release()
    assert draft_models(models) == {"b", "c", "d"}, "the next job may want it again"
    del drafter
    models.release(idle=True)
    assert draft_models(models) == {"b", "c"}


def test_a_draft_model_whose_files_were_replaced_is_read_again(
    models: Models, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "trained"))
    models._resolve = lambda name: TargetSpec(name=name, path=name)
    config = drafting_with(str(folder))
    first = models.drafter(config)
    assert models.drafter(config) is first
    weights = folder / "model.safetensors"  # which a training that goes on replaces
    data = weights.read_bytes()
    weights.write_bytes(data[:-4096] + data[-4096:][::-1])
    assert models.drafter(config) is not first and len(models._companions) == 2


def test_the_same_dtype_loads_nothing_anew(models: Models, tiny_folder: Path) -> None:
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    first = models.target(spec, "auto", lambda *told: None)
    picked = first.dtype_name
    assert models.target(spec, picked, lambda *told: None) is first
    models.close()
    first = models.target(spec, picked, lambda *told: None)
    assert models.target(spec, "auto", lambda *told: None) is first
    other = {"float32": "bfloat16", "bfloat16": "float32"}[picked]
    assert models.target(spec, other, lambda *told: None) is not first


def test_a_bounded_cache_keeps_the_newest_values_within_its_bytes() -> None:
    cache, made = BoundedCache[str](10, len), list[str]()

    def read(key: str, size: int = 4, **stale: Any) -> str:
        def make(kept: str | None) -> str:
            made.append(key)
            return f"{kept}?" if kept else size * key

        return cache.get_or_compute(key, make, **stale)

    assert [read(key) for key in "abcba"] == ["aaaa", "bbbb", "cccc", "bbbb", "aaaa"]
    assert made == [*"abca"]
    assert read("x", 50) == read("x") == 50 * "x" and made == [*"abcax"]
    assert read("x", is_stale=lambda kept: len(kept) == 50)[-1] == "?"


def test_threads_that_want_one_value_have_it_made_once() -> None:
    cache, made = BoundedCache[str](10, len), list[str]()

    def make(kept: str | None) -> str:
        made.append("value")
        return "value"

    assert errors_at_once(lambda _: cache.get_or_compute("key", make)) == []
    assert made == ["value"]
