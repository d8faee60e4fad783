"""What a campaign counts: every case is answered or refused in a sentence, soon; none is lost."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_S = 5.0
REPORTS: list[str] = []
ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / room) for room in ("app.py", "engine", "playground", "presets", "storage"))
CANARY = "what nobody asked to be shown"
"""Lies in a file that no case may get at."""


class Watch:
    """How long something has taken; a process that is paused meanwhile is not slow."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    @property
    def took_s(self) -> float:
        return min(time.monotonic() - self._wall, time.process_time() - self._cpu)


@dataclass
class Campaign:
    """The outcomes so far; `lost` and `let_in` name their cases."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    let_in: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    @contextmanager
    def timed(self, case: str) -> Iterator[None]:
        """Count a case as lost that takes long."""
        watch = Watch()
        yield
        took = watch.took_s
        self.slowest = max(self.slowest, (took, case))
        if took > MOST_S:
            self.lost.append(f"{case}: {took:.1f} s")

    def judge(self, case: str, outcome: str, text: str, *, fault: str = "") -> None:
        """Count a case by its outcome and what it said."""
        self.outcomes[outcome] += 1
        if CANARY in text:
            self.let_in.append(case)
        if fault or "Traceback" in text or "Something broke" in text:
            self.lost.append(f"{case}: {fault or text[-300:]}")

    def __str__(self) -> str:
        took, case = self.slowest
        counts = ", ".join(f"{outcome} {n}" for outcome, n in sorted(self.outcomes.items()))
        return (
            f"{self.name}: tried {self.outcomes.total()}, {counts}, lost {len(self.lost)}, "
            f"let in {len(self.let_in)}, slowest {1000 * took:.0f} ms ({case[:80]})"
        )

    def check(self) -> None:
        """Say what came of it when the tests end; nothing may be lost."""
        REPORTS.append(str(self))
        assert not self.lost and not self.let_in, "\n".join(
            [str(self), *self.lost[:60], *self.let_in[:10]]
        )


def our_fault(error: BaseException | None) -> str:
    """Where an exception comes from, if it is from a line of ours."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(OURS)]
    access = str(ROOT / "playground/web/access.py"), str(ROOT / "playground/web/security.py")
    every_call = "process_api"  # of `shell.Pages`
    found = [one for one in ours if one.filename not in access and one.name != every_call]
    where = f"{Path(found[-1].filename).relative_to(ROOT)}:{found[-1].lineno}" if found else ""
    return f"{type(error).__name__}: {str(error)[:120]} at {where}" if found else ""


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def shared() -> list[Any]:
    """Lists within lists, each ten times the same: 10^60 if they were copied."""
    value: list[Any] = []
    for _ in range(60):
        value = [value] * 10
    return value


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**19, 1e308, -1e-320),
    *(math.nan, math.inf),
    *(0.5, "", " ", "a", "0", "-1", "1e400", "nan", "inf", "none", "null", "1_0", "0x10", "٣"),
    *("a" * 300, "a" * 100_000, "\x00", "a\ud800", "a\x00b", "\x1b[2J", "\u202eabc", "\r\n"),
    *("\ufeff", "😀" * 99, "../" * 9 + "etc/passwd"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{{ 7 * 7 }}", "${jndi:x}"),
    *(
        "'; DROP TABLE runs; --",
        "%s%n%x",
        "%",
        "\\",
        '"',
        "[red]",
        "[/x]",
        "../" * 9 + "etc/passwd",
    ),
    *("/etc/passwd", "/dev/zero", "~root", "~nobody/x", "file:///etc/passwd", "http://[::1", "."),
    *("[[0]]", "[" * 50, "{" * 50, "[[0], [0, 0]]", '{"a": 1}', "a: [1", "&a [*a]", "!!binary a"),
    *("run:" + "a" * 30, "type:NGram", "type:Nothing", "file:0123456789abcdef", "label:", "tag = "),
    *([], [None], [[]], [1, "a", None], ["a"] * 1000, list(range(5000)), nested(50), [[0], [0, 0]]),
    *({}, {"": ""}, {"a": nested(40)}, {"values": {}}, {"values": []}, {"values": {"method": 1}}),
    *({"__type__": "update", "value": "a"}, {"ticked": ["a"]}, {"ticked": 1}, {"ticked": [[1]]}),
    {"values": {"method": {"max_draft_len": 1e99}}},
    {"values": {"limits": {"stop": ["a"] * 99}}},
    {"values": {"limits": {"max_new_tokens": "9" * 400}, "sampling": {"seed": 2**64 - 1}}},
    {"method": "scripted", "groups": [["method", "x"]], "values": {"method": {"x": {}}}},
    {"groups": [["A", "scripted"]] * 99, "values": {"A": {"max_draft_len": "١"}}},
    {str(n): n for n in range(2000)},
]
"""What a page's component never holds."""


def shown(case: Any) -> str:
    """A case by which it can be tried again."""
    return json.dumps(case, default=str)[:160]
