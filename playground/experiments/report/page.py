"""A report as one HTML file: for a README's link or a colleague, opened anywhere, offline.

It holds everything it shows: its style, and its chart as SVG. plotly inlined would be 4.7 MB; drawn
here it is a few kilobytes. It has no script, and its policy lets none run: what models wrote enters
through a template that escapes it and shows its control characters.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from engine import formats
from engine.config import Sampling
from engine.drafters import parse_method
from engine.errors import ConfigError
from engine.formats import DASH
from engine.safe_text import json_text, visible_value
from playground.experiments.finished import FinishedRequest
from playground.experiments.plan import BASELINE, extent
from playground.experiments.report.report import FORMULAS, Cell, Report, Section
from playground.plots import GREY, HUES

MAX_ANSWERS = 40
"""Prompts whose answers are shown; the file of prompts has all."""
MAX_CHARS = 6000
PROMPTS = "prompts.yaml"
BAR, GAP, LEFT, WIDTH = 22, 12, 210, 820
"""Heights of a bar and of the space below it, and where the bars begin and end, in pixels."""
IDENTITY = "SHA-256 of all answers' token ids, in order; equal answers have equal digests"
_PAGES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible_value)


@dataclass(frozen=True, slots=True)
class Bar:
    """A configuration in the chart; lengths in pixels."""

    name: str
    y: int
    width: float
    low: float | None
    high: float | None
    text: str
    colour: str


def report_page(
    title: str,
    plan: Mapping[str, Any],
    report: Report,
    requests: Sequence[FinishedRequest],
    environment: Mapping[str, Any],
) -> str:
    """The page of an experiment as it stands.

    Args:
        plan: as `ExperimentPlan.to_dict` writes it.
        environment: where its first request ran.
    """
    items, repeats = plan["items"], int(plan["repeats"])
    turns = sum(len(item["turns"]) for item in items)
    bars, end = _bars(report)
    return PAGE.render(
        title=title,
        report=report,
        extent=extent(len(items), turns, len(plan["configurations"]), repeats),
        machine=_machine(plan, environment),
        command=command(plan),
        prompts=prompts_file(plan),
        prompts_name=PROMPTS,
        bars=bars,
        end=end,
        left=LEFT,
        height=(BAR + GAP) * len(bars) + 24,
        groups=list(report.groups) if len(report.groups) > 1 else [],
        rows=[_row(section, requests) for section in report.configurations],
        answers=_answers(items, report, requests),
        formulas={name: FORMULAS[name] for name in SHOWN},
        identity=IDENTITY,
    )


SHOWN = ("speedup", "interval", "tok_s", "mat", "step_ms", "draft_acceptance", "ttft_ms", "verdict")


def command(plan: Mapping[str, Any]) -> str:
    """What repeats the experiment with a file of its prompts; empty where a method is unknown."""
    methods = []
    try:
        for one in plan["configurations"]:
            if one["config"]["decoding_type"] == BASELINE:
                continue
            config = parse_method(one["config"])
            said = {"name": one["name"], **config.changed}.items()
            settings = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in said]
            methods += ["--method", shlex.join([config.decoding_type, *settings])]
    except ConfigError:
        return ""
    target, sampling, limits = plan["target"], plan["sampling"], plan["limits"]
    words = ["python", "app.py", "bench", "--target", target.get("path") or target["name"]]
    words += ["--dtype", plan["dtype"], "--suite", PROMPTS, *methods]
    words += ["--repeats", str(plan["repeats"]), "--max-new-tokens", str(limits["max_new_tokens"])]
    words += ["--ignore-eos"] if limits.get("ignore_eos") else []
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        if sampling["temperature"] > 0 and name in sampling:
            words += [f"--{name.replace('_', '-')}", str(sampling[name])]
    if (kind := sampling.get("structured_output", "none")) != "none":
        words += [f"--{kind.replace('_', '-')}", sampling["grammar"] or "{}"]
    return shlex.join(words)


def prompts_file(plan: Mapping[str, Any]) -> str:
    """The prompts as a suite that `--suite` takes; JSON is YAML."""
    names = ("id", "category", "turns", "raw", "history")
    prompts = [{name: item[name] for name in names if item.get(name)} for item in plan["items"]]
    head = {"description": "prompts of a shared report", "examples": False}
    return json_text({**head, "prompts": prompts}, indent=1)


def _machine(plan: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """What the figures hold for."""
    versions = environment.get("versions") or {}
    facts = {
        "target": plan["target"].get("title") or plan["target"]["name"],
        "dtype": environment.get("dtype", plan["dtype"]),
        "device": environment.get("device_name", ""),
        "processor": environment.get("cpu") or "",
        "system": environment.get("platform") or "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": environment.get("git_commit") or "",
        "sampling": Sampling.parse(plan["sampling"]).words,
        "length": f"at most {plan['limits']['max_new_tokens']} new tokens",
    }
    return {name: str(text) for name, text in facts.items() if text}


def _bars(report: Report) -> tuple[list[Bar], float]:
    """Every speedup as a bar with its interval, and where 1× lies."""
    found = [
        (section, fast, fast.ratio)
        for section in report.configurations
        if (fast := section.overall.speedup) is not None and fast.ratio is not None
    ]
    longest = max((ratio for *_, ratio in found), default=1.0)
    unit = (WIDTH - LEFT - 90) / max(1.0, 1.5 * longest)

    def at(value: float | None) -> float | None:
        return None if value is None else LEFT + unit * min(value, 1.5 * longest)

    bars = []
    for n, (section, fast, ratio) in enumerate(found):
        low, high = (None, None) if section.reference else (at(fast.low), at(fast.high))
        colour = GREY if section.reference else HUES[(n - 1) % len(HUES)]
        y = n * (BAR + GAP) + 4
        bars.append(Bar(section.name, y, unit * ratio, low, high, fast.text, colour))
    return bars, LEFT + unit


def _row(section: Section, requests: Sequence[FinishedRequest]) -> dict[str, Any]:
    """A configuration's figures as texts."""
    overall, verdict = section.overall, section.verdict
    same = DASH
    if verdict is not None:
        same = f"{verdict.num_identical} of {verdict.num_compared} token-identical"
    return {
        "name": section.name,
        "reference": section.reference,
        "lossless": section.lossless,
        "speedup": formats.speedup(1.0) if section.reference else _ratio(overall),
        "interval": overall.speedup.interval if overall.speedup and not section.reference else "",
        "tok_s": formats.tok_s(overall.tok_s),
        "mat": formats.mat(overall.mat),
        "step_ms": formats.milliseconds(overall.step_ms),
        "acceptance": formats.percent(section.draft_acceptance),
        "ttft_ms": formats.milliseconds(section.ttft_ms),
        "same": "reference" if section.reference else same,
        "digest": _digest(section.name, requests),
        "groups": {group: _ratio(cell) for group, cell in section.groups.items()},
        "why": "" if section.why is None else section.why.because,
    }


def _ratio(cell: Cell) -> str:
    return DASH if cell.speedup is None else cell.speedup.text


def _digest(name: str, requests: Sequence[FinishedRequest]) -> str:
    own = sorted((r.pair, r.output_ids) for r in requests if r.configuration == name)
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16] if own else DASH


def _answers(
    items: Sequence[Mapping[str, Any]], report: Report, requests: Sequence[FinishedRequest]
) -> list[dict[str, Any]]:
    """The first prompts with plain decoding's answers, and the answers that differ from them."""
    plain = report.configurations[0].name
    first = {(r.prompt, r.turn, r.configuration): r for r in requests if r.repeat == 0}
    found = []
    for item in items[:MAX_ANSWERS]:
        for turn, asked in enumerate(item["turns"]):
            base = first.get((item["id"], turn, plain))
            if base is None:
                continue
            others = {
                section.name: other.text[:MAX_CHARS]
                for section in report.configurations[1:]
                if (other := first.get((item["id"], turn, section.name))) is not None
                and other.output_ids != base.output_ids
            }
            text = base.text[:MAX_CHARS]
            found.append({"prompt": asked[:MAX_CHARS], "text": text, "others": others})
    return found


PAGE = _PAGES.from_string("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --dim: #777b; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 32px auto;
  padding: 0 16px; }
h1 { font-size: 22px; margin: 0 0 8px; } h2 { font-size: 16px; margin: 28px 0 8px; }
.headline.firm { font-weight: 600; } .dim, small { opacity: .7; } small { display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  vertical-align: top; } th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; }
svg text { fill: currentColor; font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; } dt { opacity: .7; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: 10px; margin: 6px 0; font-size: 13px; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="headline {{ 'firm' if report.fastest }}">{{ report.headline }}</p>
<p class="dim">{{ extent }}, {{ report.num_done }} done; one request at a time.</p>
<svg viewBox="0 0 820 {{ height }}" width="820" role="img"
 aria-label="Speedup over plain decoding with 95% intervals">
<line x1="{{ end }}" x2="{{ end }}" y1="0" y2="{{ height - 22 }}" stroke="currentColor"
 stroke-dasharray="2 3" opacity=".6"/>
<text x="{{ end }}" y="{{ height - 6 }}" text-anchor="middle">1×</text>
{% for bar in bars %}
<text x="{{ left - 8 }}" y="{{ bar.y + 16 }}" text-anchor="end">{{ bar.name | truncate(30) }}</text>
<rect x="{{ left }}" y="{{ bar.y }}" width="{{ '%.1f' % bar.width }}" height="22" rx="3"
 fill="{{ bar.colour }}"/>
{% if bar.low is not none %}
<path d="M{{ '%.1f' % bar.low }} {{ bar.y + 11 }}H{{ '%.1f' % bar.high }}M{{ '%.1f' % bar.low }}
 {{ bar.y + 6 }}v10M{{ '%.1f' % bar.high }} {{ bar.y + 6 }}v10" stroke="currentColor"
 fill="none"/>
{% endif %}
<text x="{{ '%.1f' % ([bar.high or 0, left + bar.width] | max + 8) }}" y="{{ bar.y + 16 }}">
{{- bar.text }}</text>
{% endfor %}
</svg>
<h2>Figures</h2>
<div class="wide"><table><thead><tr><th>configuration</th>
<th title="{{ formulas.speedup }}">speedup<small>95% interval</small></th>
<th title="{{ formulas.tok_s }}">tok/s</th><th title="{{ formulas.mat }}">MAT</th>
<th title="{{ formulas.draft_acceptance }}">accepted</th>
<th title="{{ formulas.step_ms }}">step ms</th><th title="{{ formulas.ttft_ms }}">TTFT ms</th>
<th title="{{ formulas.verdict }}">answers<small title="{{ identity }}">digest</small></th>
</tr></thead><tbody>
{% for row in rows %}
<tr><td>{{ row.name }}{% if not row.lossless %} (lossy){% endif %}</td>
<td>{{ row.speedup }}<small>{{ row.interval }}</small></td><td>{{ row.tok_s }}</td>
<td>{{ row.mat }}</td><td>{{ row.acceptance }}</td><td>{{ row.step_ms }}</td>
<td>{{ row.ttft_ms }}</td><td>{{ row.same }}<small>{{ row.digest }}</small></td></tr>
{% endfor %}
</tbody></table></div>
{% if groups %}
<h2>Speedup by kind of task</h2>
<div class="wide"><table><thead><tr><th>configuration</th>
{% for group in groups %}<th>{{ group }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows if not row.reference %}
<tr><td>{{ row.name }}</td>
{% for group in groups %}<td>{{ row.groups.get(group, "–") }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
<h2>Why</h2>
<dl>{% for row in rows if row.why %}<dt>{{ row.name }}</dt><dd>{{ row.why }}</dd>{% endfor %}</dl>
<h2>Machine and settings</h2>
<dl>{% for name, text in machine.items() %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{% if command %}
<h2>Repeat it</h2>
<p>Save the prompts below as {{ prompts_name }}, then:</p>
<pre>{{ command }}</pre>
{% endif %}
<details><summary>{{ prompts_name }}</summary><pre>{{ prompts }}</pre></details>
<h2>Answers</h2>
{% for one in answers %}
<details><summary>{{ one.prompt | truncate(90) }}</summary><pre>{{ one.prompt }}</pre>
<p class="dim">plain decoding</p><pre>{{ one.text }}</pre>
{% for name, text in one.others.items() %}
<p class="dim">{{ name }}, which differs</p><pre>{{ text }}</pre>
{% endfor %}</details>
{% endfor %}
<h2>How each figure is computed</h2>
<dl>{% for name, text in formulas.items() %}<dt>{{ name | replace("_", " ") }}</dt>
<dd>{{ text }}</dd>{% endfor %}</dl>
</body></html>
""")
