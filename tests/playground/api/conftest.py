"""The program over a tiny target, asked by other programs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.playground.serving import Served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """A program without a token, on loopback."""
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
