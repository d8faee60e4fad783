"""A report as one self-contained HTML file, to link from a README or send to a colleague.

Its style and its chart (SVG) are inline: plotly would add 4.7 MB, the SVG a few kilobytes. It has
no script, and its content security policy allows none: names and prompts pass through a template
that escapes them and shows control characters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment

from engine.errors import ConfigError
from engine.safe_text import json_text, visible_value
from playground.experiments.plan import ExperimentPlan
from playground.experiments.report.columns import by_group, summary
from playground.experiments.report.report import FORMULAS, Report, Results
from playground.plots import GREY, HUES

PROMPTS = "prompts.yaml"
BAR, GAP, LEFT, WIDTH = 22, 12, 210, 820
"""Heights of a bar and of the space below it, and where the bars begin and end, in pixels."""
_PAGES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible_value)


def page_html(results: Results) -> str:
    """The report as an HTML page."""
    plan, report = results.plan, results.report
    bars, end = _bars(report)
    return PAGE.render(
        title=results.benchmark.name,
        report=report,
        extent=plan.extent,
        machine=_machine(plan, results.environment),
        command=command(plan),
        prompts=prompts_file(plan),
        prompts_name=PROMPTS,
        bars=bars,
        end=end,
        left=LEFT,
        height=(BAR + GAP) * len(bars) + 24,
        summary=summary(report),
        groups=by_group(report, "speedup", {}) if len(report.groups) > 1 else None,
        formulas={name: FORMULAS[name] for name in SHOWN},
    )


SHOWN = ("speedup", "interval", "tok_s", "mat", "step_ms", "draft_acceptance", "ttft_ms", "verdict")


def command(plan: ExperimentPlan) -> str:
    """The command that repeats the experiment; empty if a method is unknown."""
    methods = []
    try:
        for configuration in plan.configurations[1:]:
            config = configuration.config
            values = {"name": configuration.name, **config.changed}.items()
            settings = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values]
            methods += ["--method", shlex.join([config.decoding_type, *settings])]
    except ConfigError:
        return ""
    target, sampling, limits = plan.target, plan.sampling, plan.limits
    words = ["python", "app.py", "bench", "--target", target.path or target.name]
    words += ["--dtype", plan.dtype, "--suite", PROMPTS, *methods]
    words += ["--repeats", str(plan.repeats), "--max-new-tokens", str(limits.max_new_tokens)]
    words += ["--ignore-eos"] if limits.ignore_eos else []
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        if sampling.temperature > 0:
            words += [f"--{name.replace('_', '-')}", str(getattr(sampling, name))]
    if (kind := sampling.structured_output) != "none":
        words += [f"--{kind.replace('_', '-')}", sampling.grammar or "{}"]
    return shlex.join(words)


def prompts_file(plan: ExperimentPlan) -> str:
    """The prompts as a suite that `--suite` takes; JSON is YAML."""
    names = ("id", "category", "turns", "raw", "history")
    values = [{name: getattr(item, name) for name in names} for item in plan.items]
    prompts = [{name: value for name, value in item.items() if value} for item in values]
    head = {"description": "prompts of a shared report", "examples": False}
    return json_text({**head, "prompts": prompts}, indent=1)


def _machine(plan: ExperimentPlan, environment: Mapping[str, Any]) -> dict[str, str]:
    """The machine and settings that the figures hold for."""
    versions = environment.get("versions") or {}
    facts = {
        "target": plan.target.title or plan.target.name,
        "dtype": environment.get("dtype", plan.dtype),
        "device": environment.get("device_name", ""),
        "processor": environment.get("cpu") or "",
        "system": environment.get("platform") or "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": environment.get("git_commit") or "",
        "sampling": plan.sampling.words,
        "length": f"at most {plan.limits.max_new_tokens} new tokens",
    }
    return {name: str(text) for name, text in facts.items() if text}


def _bars(report: Report) -> tuple[list[dict[str, Any]], float]:
    """Every speedup as a bar with its interval, and the position of 1×, in pixels."""
    measured = [
        (section, fast, fast.ratio)
        for section in report.configurations
        if (fast := section.overall.speedup) is not None and fast.ratio is not None
    ]
    longest = max((ratio for *_, ratio in measured), default=1.0)
    unit = (WIDTH - LEFT - 90) / max(1.0, 1.5 * longest)

    def at(value: float | None) -> float | None:
        return None if value is None else LEFT + unit * min(value, 1.5 * longest)

    bars = []
    for n, (section, fast, ratio) in enumerate(measured):
        low, high = (None, None) if section.reference else (at(fast.low), at(fast.high))
        colour = GREY if section.reference else HUES[(n - 1) % len(HUES)]
        bar = {"name": section.name, "text": fast.text, "colour": colour, "low": low, "high": high}
        bars.append({**bar, "y": n * (BAR + GAP) + 4, "width": unit * ratio})
    return bars, LEFT + unit


PAGE = _PAGES.from_string("""
{%- macro table(of) %}
<div class="wide"><table><thead><tr><th>configuration</th>
{% for title, formula in of.heads.items() %}<th title="{{ formula }}">{{ title }}</th>{% endfor %}
</tr></thead><tbody>
{% for section, cells in of.rows %}
<tr><td>{{ section.name }}{% if not section.lossless %} (lossy){% endif %}</td>
{% for cell in cells %}<td title="{{ cell.hint }}">{{ cell.text }}
{%- if cell.small %}<small>{{ cell.small }}</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro -%}
<!doctype html>
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
<p class="headline {{ 'firm' if report.fastest }}">
{{ report.recommendation }} {{ report.headline }}</p>
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
{{ table(summary) }}
{% if groups %}
<h2>Speedup by kind of task</h2>
{{ table(groups) }}
{% endif %}
<h2>Why</h2>
<dl>{% for section in report.configurations if section.why %}
<dt>{{ section.name }}</dt><dd>{{ section.why.because }}</dd>{% endfor %}</dl>
<h2>Machine and settings</h2>
<dl>{% for name, text in machine.items() %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{% if command %}
<h2>Repeat it</h2>
<p>Save the prompts below as {{ prompts_name }}, then:</p>
<pre>{{ command }}</pre>
{% endif %}
<details><summary>{{ prompts_name }}</summary><pre>{{ prompts }}</pre></details>
<h2>How each figure is computed</h2>
<dl>{% for name, text in formulas.items() %}<dt>{{ name | replace("_", " ") }}</dt>
<dd>{{ text }}</dd>{% endfor %}</dl>
</body></html>
""")
