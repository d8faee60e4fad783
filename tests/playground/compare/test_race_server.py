"""What the race asks the server for: anybody may ask anything."""

from __future__ import annotations

from typing import Any

import pytest

from playground.host.runner import EngineHost
from playground.host.stream import History
from playground.web.components import race_functions
from tests.playground.asks import finished, start

BAD_ASKS: list[Any] = [
    None,
    [],
    "x",
    {},
    {"runs": "x"},
    {"runs": []},
    {"runs": ["x"] * 99},
    {"runs": [3]},
    {"runs": ["x" * 999]},
    {"runs": ["nothing"]},
]


@pytest.mark.parametrize("asked", BAD_ASKS, ids=range(len(BAD_ASKS)))
def test_bad_questions_about_runs_get_a_sentence(
    host: EngineHost, history: History, asked: Any
) -> None:
    clocks, metas = race_functions(host, history)
    assert list(clocks(asked)) == ["error"]
    assert list(metas(asked)) == ["error"]


def test_runs_answer_with_clocks_and_metas(host: EngineHost, history: History) -> None:
    run = finished(start(host))
    clocks, metas = race_functions(host, history)
    assert [clock["run"] for clock in clocks({"runs": [run.log_id]})["clocks"]] == [run.log_id]
    (meta,) = metas({"runs": [run.log_id]})["runs"]
    assert meta["id"] == run.log_id and meta["title"] == "Scripted tree"
