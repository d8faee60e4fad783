"""The benchmark's own script, whole, on a tiny shape and the processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cuda_decode, random_llama
from engine.tree import ChoiceTree
from tests.engine.cuda.tape import Tape


def test_the_script_measures_every_way_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    options = ["--smoke", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    rows = cuda_decode.main(options, lambda device: Tape())
    assert [row.way for row in rows] == list(cuda_decode.WAYS)
    eager, *recorded = rows
    assert eager.forward == "transformers' modules" and eager.graph_bytes == 0
    for row in recorded:
        assert "tape" in row.forward and row.graph_bytes > 0 and row.cache_bytes > 0
        assert row.error is not None and row.error < 1e-5 and row.agreement == 1.0
    for row in rows:
        assert row.share > 0 and row.eagle_ratio is not None
        assert set(row.eagle_split_ms) == {"draft_ms", "verify_ms", "accept_ms", "other_ms"}
    written = json.loads(out.read_text())
    assert [row["way"] for row in written["rows"]] == list(cuda_decode.WAYS)
    assert written["copy_bytes_per_s"]["median"] > 0
    assert "EAGLE step" in capsys.readouterr().out


def test_nothing_is_begun_that_does_not_fit_into_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--smoke", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path / "x.json")]
    assert cuda_decode.main(options) == []
    assert "left out, no time" in capsys.readouterr().out


def test_the_tree_has_as_many_nodes_as_asked_for_and_no_gap() -> None:
    tree = random_llama.likely_tree(63)
    assert len(tree.shape) == 64 and tree.depth == 5
    assert ChoiceTree.parse(tree.as_lists(), form="candidates") == tree
