"""Chromium, and a page over a tiny target; all offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from playground.trees.tables import save_table
from storage import RunLog
from tests.browser.pages import GeneratePage, Violations
from tests.browser.trees import PROMPTS, TreePage, Tuned
from tests.engine.tuning.tables import made_up_table
from tests.playground.asks import finished, start
from tests.playground.serving import Served, serving, serving_tiny
from tests.playground.tree_tiny import tree_catalog

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
FLAGS = ["--no-sandbox", "--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

STILL = """document.getAnimations().every((animation) =>
    animation.playState !== "running" || animation.effect.getTiming().iterations === Infinity)"""


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the chromium package, or set CHROMIUM to its path")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tiny(tmp_path_factory.mktemp("browser")) as served:
        yield served


@pytest.fixture
def page(chromium: Any, served: Served) -> Iterator[GeneratePage]:
    """A fresh tab; ends with a check that it said nothing wrong and asked nobody else."""
    with GeneratePage.opened(chromium, served.url) as page:
        yield page
        page.check_clean()


@pytest.fixture(scope="package")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    folder = tmp_path_factory.mktemp("tree-page")
    log = RunLog.open(str(folder / "runs.db"))
    with torch.inference_mode():
        catalog = tree_catalog(folder)
    table = made_up_table()
    save_table(log, catalog.method("medusa").config, table)
    with serving(catalog, log, folder / "cache") as served:
        for prompt in PROMPTS:
            finished(start(served.host, method="plain", mode="raw", prompt=prompt))
        yield Tuned(served, table)
    log.close()


@pytest.fixture
def tree(chromium: Any, tuned: Tuned) -> Iterator[TreePage]:
    """A fresh tab on the Tree page, on the Medusa method."""
    with GeneratePage.opened(chromium, tuned.served.url) as page:
        page.go("Tree")
        editor = TreePage(page)
        editor.ready()
        yield editor
        page.check_clean()


@pytest.fixture(scope="session")
def violations() -> Violations:
    package = "axe_playwright_python"
    pytest.importorskip(package, reason="axe-playwright-python is not installed")
    axe = files(package).joinpath("axe.min.js").read_text(encoding="utf-8")

    def found(tab: Any) -> list[str]:
        tab.wait_for_function(STILL)  # a text that fades in has little contrast
        tab.evaluate(axe)
        return [
            f"{one['id']}: {one['help']} ({len(one['nodes'])} ×, {one['nodes'][0]['html']:.200})"
            for one in tab.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        ]

    return found


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots go: the folder named by SCREENSHOTS, or a temporary one."""
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
