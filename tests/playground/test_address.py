"""Addresses: server and browser open the same tab, and no other tab takes its parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.datastructures import QueryParams

from playground.web.address import link_params, tab_of

CASES = json.loads((Path(__file__).parents[1] / "scripts/addresses.json").read_text())


@pytest.mark.parametrize(("query", "tab"), CASES.items())
def test_an_address_opens_one_tab(query: str, tab: str) -> None:
    params = QueryParams(query)
    assert tab_of(params) == tab
    tabs = {*CASES.values()}
    assert all(link_params(other, params) == {} for other in tabs - {tab})


def test_a_link_has_the_parameters_of_its_tab() -> None:
    params = QueryParams("tab=generate&run=abc&__theme=dark")
    assert link_params("generate", params) == {"run": "abc"}
    assert link_params("runs", QueryParams("run=abc")) == {"run": "abc"}
