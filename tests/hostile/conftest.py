"""The program over a tiny target, and a log."""

from __future__ import annotations

from tests.playground.conftest import log as log
from tests.playground.conftest import served as served
