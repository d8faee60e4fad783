"""A report as one HTML file: whole, escaped, and enough to repeat the experiment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Limits
from engine.drafters import methods
from engine.model.sources import TargetSpec
from playground.cli.bench import configurations_of
from playground.experiments.plan import BASELINE_NAME, Configuration, ExperimentPlan, Item
from playground.experiments.prompts import read_suite_text
from playground.experiments.report.page import command, page_html, prompts_file
from playground.experiments.report.report import Results, make_report
from playground.experiments.statistics import FinishedRequest
from tests.playground.bench.requests import measured, plan_of

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 1234*5 }}${8*8}"


def plan(*, items: Sequence[Item] = (), gone: str = "") -> ExperimentPlan:
    """Two configurations on two prompts, one of them with two turns."""
    choices = {"decoding_type": "Medusa", "medusa_choices": ((0,), (0, 0), (1,))}
    named: dict[str, dict[str, Any]] = {
        BASELINE_NAME: {"decoding_type": "Autoregressive"},
        "N-gram, 'short'": {"decoding_type": gone or "NGram", "max_draft_len": 3},
        HOSTILE: {**choices, "speculative_model": "a b/c"},
    }
    both = (
        Item("s", "1", "chat", "chat", ("Hello.",)),
        Item("s", "2", HOSTILE[:60], HOSTILE[:60], (HOSTILE, "And?"), raw=True),
    )
    rows = [{"name": name, "lossless": True, "config": each} for name, each in named.items()]
    return plan_of(
        configurations=[Configuration.stored(row, methods()) for row in rows],
        limits=Limits(max_new_tokens=64, ignore_eos=True),
        target=TargetSpec(name="my target", hub="a/b"),
        dtype="auto",
        repeats=2,
        items=items or both,
    )


def requests_of(stored: ExperimentPlan) -> list[FinishedRequest]:
    names = stored.names
    return [
        measured(
            name,
            suite=item.suite,
            prompt=item.id,
            turn=turn,
            repeat=repeat,
            group=item.category,
            run_id=f"{place}{item.id}{turn}{repeat}",
            decode_s=0.4 / (1 + place) + 0.01 * turn,
            text=HOSTILE,
            output_ids=(1, 2, 3, 4, 5 + (place == 2)),
        )
        for place, name in enumerate(names)
        for item in stored.items
        for turn in range(len(item.turns))
        for repeat in range(2)
    ]


def drawn(
    title: str,
    stored: ExperimentPlan,
    requests: Sequence[FinishedRequest],
    environment: dict[str, Any],
) -> str:
    row: Any = SimpleNamespace(name=title)
    report = make_report(stored, requests)
    return page_html(Results(row, stored, tuple(requests), report, environment))


def test_control_characters_of_names_and_answers_are_shown_not_obeyed() -> None:
    sent = "\x1b[2J\x00\u202egnp.exe\x9b31m\r"
    stored = plan(items=[Item("s", "1", "chat", "chat", (f"Hello{sent}",))])
    requests = [replace(request, text=request.text + sent) for request in requests_of(stored)]
    page = drawn(sent, stored, requests, {"cpu": sent})
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    assert page.count(r"\x1b[2J\x00\u202egnp.exe\x9b31m\r") > 2
    (prompts,) = re.findall(r"<details><summary>prompts.yaml</summary><pre>(.*?)</pre>", page, re.S)
    assert read_suite_text(unescape(prompts), "prompts.yaml", where="page").prompts[0].turns == (
        f"Hello{sent}",
    ), "what repeats the experiment is what was asked"


def page_of(stored: ExperimentPlan) -> str:
    environment = {"device_name": HOSTILE, "cpu": "a processor", "versions": {"torch": "2.13"}}
    return drawn(HOSTILE, stored, requests_of(stored), environment)


def test_the_page_has_the_reports_figures_and_what_models_and_people_wrote_as_text() -> None:
    stored = plan()
    report, page = make_report(stored, requests_of(stored)), page_of(stored)
    tags = set(re.findall(r"<(\w+)", page))
    assert "table" in tags and not tags & {"script", "img", "link", "iframe", "object", "a"}
    unquoted = re.sub(r'"[^"]*"', "", page)
    assert not re.search(r"<[^>]*\s(on\w+|src|href)\s*=", unquoted)
    assert "&lt;script&gt;alert(1)" in page and "{{ 1234*5 }}" in page and "6170" not in page
    assert "default-src 'none'" in page
    for section in report.configurations[1:]:
        fast = section.overall.speedup
        assert fast is not None and fast.low is not None
        assert fast.text in page and f"{fast.low:.2f} … {fast.high:.2f}" in page
    ratios = [section.ratio for section in report.configurations]
    widths = [float(width) for width in re.findall(r'class="bar[^>]+width: ([\d.]+)%', page)]
    assert widths == pytest.approx([60 * ratio / max(ratios) for ratio in ratios], abs=0.01)
    assert page.count('class="interval"') == 2, "plain decoding has none"
    assert "3 turns of 2 prompts × 3 configurations × 2 repeats = 18 requests" in page
    assert ">identical<" in page and ">0 of 6<" in page and "unexplained" in page
    assert "a processor" in page and "torch 2.13" in page
    assert len(page.encode()) < 40_000, "no plotting library came along"


def test_the_command_repeats_the_experiment() -> None:
    stored = plan()
    words = shlex.split(command(stored))
    assert words[:2] == ["specdec", "bench"]
    methods = [words[i + 1] for i, word in enumerate(words) if word == "--method"]
    found = configurations_of(methods)
    assert [(one.name, one.config.model_dump(mode="json")) for one in found] == [
        (one.name, one.values) for one in stored.configurations[1:]
    ]
    options = dict(zip(words[2:], words[3:], strict=False))
    assert (options["--target"], options["--suite"]) == ("my target", "prompts.yaml")
    assert (options["--repeats"], options["--max-new-tokens"]) == ("2", "64")
    assert "--ignore-eos" in words and "--seed" not in words, "greedy draws nothing"

    suite = read_suite_text(prompts_file(stored), "prompts.yaml", where="the file")
    assert [(p.id, p.category, list(p.turns), p.raw) for p in suite.prompts] == [
        (item.id, item.category, list(item.turns), item.raw) for item in stored.items
    ]
    page = page_of(plan(gone="Gone"))
    assert "Repeat it" not in page and "Figures" in page, "a method of another version"
