"""Adding a method is adding one file: it appears everywhere, is tuned, and its export says no."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import engine.drafters
from engine.config import Limits
from engine.drafters import methods, parse_method
from engine.proposal import Budget
from engine.tree import ChoiceTree
from engine.tuning.controller import build_drafter
from engine.tuning.ranks import measure_ranks
from engine.tuning.replay import replay
from engine.tuning.timing import time_drafts
from playground.deploy import ENGINES, export_method
from playground.host.catalog import Catalog
from playground.host.controls import fields_of
from playground.trees.methods import tree_method
from storage import RunLog, RunQuery
from tests.engine.drafters.judges import write
from tests.engine.tuning.runs import texts_of
from tests.models import build_context, save_tiny, tiny_target
from tests.test_cli import generate

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def example(heading: str) -> str:
    """The file that stands under a heading of docs/extending.md."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line[4:] for line in section.splitlines() if line[:4] in ("", "    "))


@pytest.fixture(autouse=True)
def one_file_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "successor.py").write_text(example("Add a method"))
    (tmp_path / "stride.py").write_text(example("Add a head"))
    monkeypatch.setattr(engine.drafters, "__path__", [*engine.drafters.__path__, str(tmp_path)])
    yield
    for name in ("successor", "stride"):
        sys.modules.pop(f"engine.drafters.{name}", None)


def test_a_new_method_is_in_the_catalog_with_its_controls_and_on_the_tree_page() -> None:
    catalog = Catalog.shipped()
    target = next(iter(catalog.targets))
    assert "type:Successor" in [key for _, key in catalog.method_choices(target)]
    kinds = {control.name: control.kind for control in fields_of(methods()["Successor"]).values()}
    assert kinds["successor_choices"] == "tree"
    method = tree_method(catalog, "type:Successor", target)
    assert method.kind == "tree" and len(method.tree) == 3


def test_the_command_line_runs_a_new_method_and_the_log_keeps_its_trees(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", eos_token_id=None)
    common = ("--prompt-ids", "72,101,108", "--max-new-tokens", 12, "--json")
    plain = generate(folder, *common, "--method", "Autoregressive")
    ours = generate(
        folder, *common, "--method", "Successor", "--set", "successor_choices=[[0],[1],[1,0]]"
    )
    log = RunLog.open(str(folder / "runs.sqlite3"))
    runs = {run.decoding_type: log.get(run.id) for run in log.find(RunQuery()).rows}
    mine, theirs = runs["Successor"], runs["Autoregressive"]
    assert mine is not None and theirs is not None and mine.output_ids == theirs.output_ids
    assert list(log.steps(mine.id))[0].parents == (-1, 0, 0, 2)
    assert "Successor" in ours.output and plain.output
    log.close()


def test_a_new_method_is_measured_and_replayed_like_any_other() -> None:
    # A target of few tokens follows the root by number often enough.
    bench = build_context(tiny_target(vocab_size=8, eos_token_id=None))
    limits = Limits(max_new_tokens=40, ignore_eos=True)
    texts = texts_of(bench, [[1, 2, 3], [5, 4]], limits)
    config: Any = parse_method({"decoding_type": "Successor"})
    table = measure_ranks(config, bench, texts, depths=2)
    tree = ChoiceTree.parse([[0], [2], [0, 0], [0, 1]])
    chosen = config.with_tree(tree)
    real = (write(bench.target, chosen.build(bench), t.prompt_ids, limits=limits) for t in texts)
    accepted = sum(text.num_accepted for text in real)
    assert accepted > 0 and replay(table, tree).num_accepted == accepted
    drafter = chosen.build(bench)
    _, draft_ms, depth = time_drafts(drafter, bench.target, Budget(64), repeats=1)
    assert draft_ms > 0 and depth == tree.depth == chosen.draft_shape().depth


@pytest.mark.parametrize("engine", ENGINES)
def test_no_other_engine_takes_a_new_method(engine: str) -> None:
    config = parse_method({"decoding_type": "Successor"})
    export = export_method(config, ENGINES[engine], target="owner/target")
    assert export.verdict == "not supported" and not export.files
    assert export.refusal.endswith(".")


def test_a_head_is_one_file_too(tmp_path: Path) -> None:
    """It drafts what it ranks first, under the controller as well, and changes no text."""
    target = tiny_target(vocab_size=8, eos_token_id=None)
    matrix = torch.randn(target.hidden_size, target.hidden_size, generator=torch.manual_seed(3))
    save_file({"stride.weight": matrix}, tmp_path / "model.safetensors")
    bench = build_context(target)
    config: Any = parse_method({"decoding_type": "Stride", "speculative_model": str(tmp_path)})
    limits = Limits(max_new_tokens=40, ignore_eos=True)
    (text,) = texts_of(bench, [[1, 2, 3]], limits)
    ranks = measure_ranks(config, bench, [text], depths=1).ranks[:, 0]
    as_set = write(target, config.build(bench), [1, 2, 3], limits=limits)
    assert as_set.output == list(text.output_ids)
    at, right = 0, []
    for step in as_set.steps:
        right.append(int(ranks[at] == 0) if step.num_drafted else 0)
        at += step.num_committed
    assert [step.num_accepted for step in as_set.steps] == right and sum(right) > 0
    controlled = build_drafter(config, bench)
    assert write(target, controlled, [1, 2, 3], limits=limits).output == as_set.output
