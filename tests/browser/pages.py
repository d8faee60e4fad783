"""The pages as a person uses them, for browser tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.playground.serving import with_token

WAIT_MS = 60_000
LISTED = "ul[role=listbox] li"
NARROW = {"width": 420, "height": 1000}
VISIBLE_TEXT = """node => [...node.children].filter(
  (part) => !part.matches(".rejected, .eos, .prompt")
    && getComputedStyle(part).visibility !== "hidden").map((part) => part.textContent).join("")"""
Violations = Callable[[Any], list[str]]
"""What axe-core finds wrong with a tab: each with the first of the elements that it is about."""


@dataclass
class GeneratePage:
    """One tab on the Generate page, and what its browser complained about."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(cls, browser: Any, url: str, *, path: str = "/", **options: Any) -> Iterator[Self]:
        """The page in a context of its own (as another person would see it)."""
        options.setdefault("viewport", {"width": 1400, "height": 1000})
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT_MS)
        page = cls(context.new_page())
        page._listen(url)
        page.tab.goto(with_token(url + path))
        page.tab.wait_for_selector("#pg-panel .panel", state="attached")
        page.wait_filled()
        try:
            yield page
        finally:
            context.close()

    def _listen(self, url: str) -> None:
        def console(message: Any) -> None:
            known = (
                "GL Driver Message",  # how fast software draws, not what is wrong
                # A form that is drawn anew: Gradio gives old fields the new values for a moment.
                "cannot be parsed, or is out of range",
                "Method not implemented.",  # Gradio, when an upload's progress ends
            )
            if message.type in ("error", "warning") and not any(k in message.text for k in known):
                self.complaints.append(message.text)

        def request(sent: Any) -> None:
            if not sent.url.startswith((url, "data:", "blob:")):
                self.foreign.append(sent.url)

        self.tab.on("console", console)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", request)

    def wait_filled(self) -> None:
        """Wait until the form has what the browser stored, and takes input."""
        self.tab.wait_for_selector("body.pg-generate", state="attached")

    def reload(self) -> None:
        """In the middle of anything."""
        with self.leaving():
            self.tab.reload()
        self.wait_filled()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """What the old page says of requests that end with it is no complaint."""
        before = len(self.complaints)

        def forget(_: Any) -> None:
            del self.complaints[before:]

        def stay(_: Any) -> None:
            self.tab.remove_listener("framenavigated", forget)

        self.tab.on("framenavigated", forget)
        self.tab.once("domcontentloaded", stay)
        yield

    def check_clean(self) -> None:
        assert self.foreign == [], "asked other servers"
        assert self.complaints == [], "console has errors"

    def pick(self, picker: str, text: str) -> None:
        """Choose in one of the pickers: target, dtype, method, example."""
        choose(self.tab, f"#pg-{picker} input", text)

    def pick_method(self, text: str, first_field: str) -> None:
        """Choose a method and wait for its controls."""
        self.pick("method", text)
        self.tab.wait_for_selector(f"#pg-method-form .pg-field-{first_field}")

    def set(self, name: str, value: str | bool) -> None:
        """Set a control of the settings forms."""
        control = box_of(self.tab, name)
        if isinstance(value, bool):
            control.set_checked(value)
        else:
            control.fill(value)

    def short(self, tokens: int = 40) -> None:
        """Make runs end after so many tokens and nowhere else."""
        self.set("max_new_tokens", str(tokens))
        self.set("ignore_eos", True)

    def start(self, prompt: str) -> None:
        self.tab.fill("#pg-prompt textarea", prompt)
        self.tab.keyboard.press("Control+Enter")

    def stream(self, prompt: str, tokens: int = 90, delay_ms: int = 60) -> None:
        """A run of a few seconds, seen to stream."""
        self.pick_method("Scripted tree", "max_draft_len")
        self.short(tokens)
        self.set("delay_ms", str(delay_ms))
        self.start(prompt)
        self.tab.wait_for_selector("#pg-panel .tokens :is(.bonus, .recovered)")

    def wait_state(self, *states: str, panel: str = "pg-panel") -> None:
        """Wait until the panel's run is in one of the states."""
        any_of = ", ".join(f'#{panel} .panel[data-state="{state}"]' for state in states)
        self.tab.wait_for_selector(any_of, state="attached", timeout=WAIT_MS)

    def wait_done(self, panel: str = "pg-panel") -> None:
        """Wait until everything of the run is on show."""
        self.tab.wait_for_selector(
            f'#{panel} [data-done="true"]', state="attached", timeout=WAIT_MS
        )

    def generate(self, prompt: str) -> None:
        """Generate to the end."""
        last = "[...document.querySelectorAll('#pg-panel [data-run]')].at(-1)?.dataset.run"
        before = self.tab.evaluate(last)
        self.start(prompt)
        self.tab.wait_for_function(f"old => ({last}) !== old", arg=before, timeout=WAIT_MS)
        self.wait_done()

    def text(self, panel: str = "pg-panel", nth: int = -1) -> str:
        """An answer's text, as much as is visible of it; by default the last one's."""
        return str(self.tab.locator(f"#{panel} .tokens").nth(nth).evaluate(VISIBLE_TEXT))

    def go(self, name: str) -> None:
        """Select the tab of a page; those that a narrow window has no room for are in a menu."""
        shown = self.tab.get_by_role("tab", name=name, exact=True)
        if not shown.is_visible():
            self.tab.locator(".overflow-menu > button").click()
            shown = self.tab.locator(".overflow-dropdown button", has_text=name)
        shown.click()

    def show_theme(self, theme: str) -> None:
        """Light or dark, once colours that fade have faded."""
        self.tab.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        self.tab.wait_for_timeout(300)

    def check_width(self, shots: Path, name: str) -> None:
        """Nothing scrolls sideways, wide or narrow, light or dark; takes a picture of each."""
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        for width in (1400, NARROW["width"]):
            self.tab.set_viewport_size({**NARROW, "width": width})
            for theme in ("light", "dark"):
                self.show_theme(theme)
                file = shots / f"{name}-{theme}-{width}.png"
                self.tab.screenshot(path=file, full_page=width < 600)
                assert self.tab.evaluate(wide) <= 0, (width, theme)

    def count(self, selector: str) -> int:
        return int(self.tab.locator(selector).count())


def choose(tab: Any, dropdown: str, text: str) -> None:
    """Choose the first entry with this text in a dropdown."""
    tab.locator(dropdown).first.click()
    tab.locator(LISTED, has_text=re.compile(re.escape(text))).first.click()


def saved(tab: Any, button: str) -> tuple[str, str]:
    """Name and text of the file that a button saves."""
    with tab.expect_download() as download:
        tab.click(button)
    return download.value.suggested_filename, Path(download.value.path()).read_text()


def box_of(form: Any, field: str) -> Any:
    """The box of a setting."""
    return form.locator(f".pg-field-{field}").locator("input, textarea").first


@contextmanager
def held_back(tab: Any) -> Iterator[None]:
    """Nothing reaches the server until the end."""
    waiting: list[Any] = []
    tab.route("**/gradio_api/run/**", lambda route: waiting.append(route))
    yield
    tab.wait_for_timeout(300)
    assert waiting
    for route in waiting:
        route.continue_()
    tab.unroute("**/gradio_api/run/**")
