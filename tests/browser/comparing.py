"""The Compare page as a person uses it, for browser tests."""

from __future__ import annotations

from typing import Any

from tests.browser.pages import WAIT_MS, GeneratePage, choose

RESULTS = "#pg-cmp-results"
TABLE = "#pg-cmp-table"
FORM = "#pg-cmp-form"
COMPARE_MS = 3 * WAIT_MS
"""Longest wait for a comparison: it is many runs."""


class ComparePage:
    """The Compare tab of an opened page."""

    def __init__(self, page: GeneratePage) -> None:
        self.page = page
        self.tab: Any = page.tab

    def go(self) -> None:
        self.page.go("Compare")
        self.tab.wait_for_selector(f"{RESULTS} .panel")

    @property
    def configurations(self) -> Any:
        """Groups of the form, one per configuration."""
        return self.tab.locator(f"{FORM} .pg-group")

    def leave(self, count: int) -> None:
        """Remove all configurations behind the first ones."""
        self.configurations.first.wait_for()
        for left in range(self.configurations.count(), count, -1):
            last = self.configurations.nth(left - 1)
            if last.locator("> button:not(.open)").count():
                last.locator("> button").click()
            last.get_by_role("button", name="Remove").click()
            last.wait_for(state="detached")

    def pick(self, picker: str, text: str) -> None:
        """Choose in one of the pickers: target, dtype, suite, example, method."""
        choose(self.tab, f"#pg-cmp-{picker} input", text)

    def add(self, text: str) -> None:
        """Add a configuration."""
        before = self.configurations.count()
        self.pick("method", text)
        self.tab.click("#pg-cmp-add")
        self.configurations.nth(before).wait_for()

    def field(self, number: int | None, name: str) -> Any:
        """A setting of a configuration, or (None) one that all share; opens its group."""
        groups = self.tab.locator("#pg-cmp-run-form .pg-group") if number is None else None
        found = (groups or self.configurations.nth(number)).locator(f".pg-field-{name}")
        for _ in range(100):
            for folded in (groups or self.configurations.nth(number)).all():
                if folded.locator("> button:not(.open)").count():
                    folded.locator("> button").click()
            if found.count():
                break
            self.tab.wait_for_timeout(50)
        return found

    def set(self, number: int | None, name: str, value: str | bool) -> None:
        control = self.field(number, name).locator("input, textarea").first
        if isinstance(value, bool):
            control.set_checked(value)
        else:
            control.fill(value)

    def short(self, tokens: int = 24, repeats: int = 1) -> None:
        """Make runs end after so many tokens and nowhere else."""
        self.set(None, "max_new_tokens", str(tokens))
        self.set(None, "ignore_eos", True)
        self.set(None, "repeats", str(repeats))

    def compare(self, prompt: str | None = None) -> None:
        """Compare to the end, until the race can be run."""
        self.begin(prompt)
        self.wait_final()

    def begin(self, prompt: str | None = None) -> None:
        if prompt is not None:
            self.tab.fill("#pg-cmp-prompt textarea", prompt)
        self.tab.evaluate(
            f"document.querySelector('{RESULTS} [data-final]')?.removeAttribute('data-final')"
        )
        self.tab.keyboard.press("Control+Enter")

    def wait_final(self) -> None:
        self.tab.wait_for_selector(
            f'{RESULTS} [data-final="true"]', state="attached", timeout=COMPARE_MS
        )

    def wait_raced(self, lanes: int) -> None:
        """Wait until the race, which begins by itself, has run to its end."""
        self.tab.wait_for_function(
            f"""lanes => document.querySelectorAll('{RESULTS} .lane.over').length === lanes
              && document.querySelector('{RESULTS} .race-play').textContent.includes('Race')""",
            arg=lanes,
            timeout=COMPARE_MS,
        )

    def wait_drafts(self) -> None:
        """Wait until a drafted token is on show."""
        self.tab.wait_for_selector(f"{RESULTS} .tokens .draft", timeout=COMPARE_MS)

    def text(self) -> str:
        return str(self.tab.inner_text(f"{RESULTS} .compare-text"))

    def alert(self) -> str:
        self.tab.wait_for_selector(f"{RESULTS} .compare-head .alert:not([hidden])")
        return str(self.tab.inner_text(f"{RESULTS} .compare-head .alert"))

    def lanes(self) -> list[dict[str, Any]]:
        """Of every lane: run, its time and its speedup in words."""
        found: list[dict[str, Any]] = self.tab.evaluate(
            f"""[...document.querySelectorAll('{RESULTS} .lane')].map((lane) => ({{
              run: lane.dataset.run, words: lane.querySelector('.lane-time').textContent,
              speedup: lane.querySelector('.lane-speedup').textContent,
            }}))"""
        )
        return found

    def seek(self, ms: int) -> None:
        """Move the race's scrubber."""
        self.tab.locator(f"{RESULTS} .race-bar input[type=range]").evaluate(
            "(range, ms) => { range.value = ms; range.dispatchEvent(new Event('input')); }", ms
        )

    def shown_text(self, panel: int) -> str:
        """What a panel shows of its answer at this moment of the race."""
        return self.page.text(RESULTS.removeprefix("#"), panel)

    def rows(self) -> list[str]:
        """Names of the configurations in the table."""
        rows = self.tab.locator(f"{TABLE} tbody tr")
        return [str(name) for name in rows.evaluate_all("rows => rows.map(r => r.dataset.row)")]

    def cell(self, name: str, column: str) -> str:
        heads = self.tab.locator(f"{TABLE} th").all_inner_texts()
        row = self.tab.locator(f'{TABLE} tr[data-row="{name}"] td')
        return str(row.nth(heads.index(column)).inner_text())
