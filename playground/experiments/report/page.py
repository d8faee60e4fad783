"""A report as one self-contained HTML file, to link from a README or send to a colleague.

Its style is inline, and its chart is made of it: plotly would add 4.7 MB. It has no script, and its
content security policy allows none: names and prompts pass through a template that escapes them
and shows control characters.
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
from playground.experiments.report.report import Results

PROMPTS = "prompts.yaml"
_PAGES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=visible_value)


def page_html(results: Results) -> str:
    """The report as an HTML page."""
    plan, report = results.plan, results.report
    return PAGE.render(
        title=results.benchmark.name,
        report=report,
        extent=plan.extent,
        machine=_machine(plan, results.environment),
        command=command(plan),
        prompts=prompts_file(plan),
        prompts_name=PROMPTS,
        unit=60 / max(1.0, *(section.ratio for section in report.configurations)),
        summary=summary(report),
        groups=by_group(report, "speedup", {}) if len(report.groups) > 1 else None,
    )


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
    words = ["specdec", "bench", "--target", target.path or target.name]
    words += ["--dtype", plan.dtype, "--suite", PROMPTS, *methods]
    words += ["--repeats", str(plan.repeats), "--max-new-tokens", str(limits.max_new_tokens)]
    words += ["--ignore-eos"] if limits.ignore_eos else []
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        if sampling.temperature > 0:
            words += [f"--{name.replace('_', '-')}", str(getattr(sampling, name))]
    if (kind := sampling.structured_output) != "none":
        words += [f"--{kind.replace('_', '-')}", sampling.grammar or "{}"]
    for name, value in sampling.chat_template_kwargs.items():
        words += ["--chat-template-kwarg", f"{name}={json.dumps(value)}"]
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
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%;
  min-width: 720px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  vertical-align: top; } th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
.bars { grid-template-columns: fit-content(35%) 1fr max-content; gap: 0 12px; }
.bars > * { position: relative; padding: 6px 0; overflow: hidden; }
.bars span { position: absolute; top: 6px; height: 22px; print-color-adjust: exact; }
.bars .bar { background: #3b82f6; border-radius: 3px; } .bars .plain { background: #8b8b94; }
.bars .one { top: 0; height: 100%; left: var(--unit); border-left: 1px dotted; }
.bars .interval { top: 12px; height: 10px; border: solid; border-width: 0 1px;
  background: linear-gradient(currentColor, currentColor) center / 100% 1px no-repeat; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; } dt { opacity: .7; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: 10px; margin: 6px 0; font-size: 13px; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="headline {{ 'firm' if report.fastest }}">
{{ report.recommendation }} {{ report.headline }}</p>
<p class="dim">{{ extent }}, {{ report.num_done }} done; one request at a time.</p>
<h2>Speedup over plain decoding, with 95% intervals</h2>
<dl class="bars" style="--unit: {{ '%.2f' % unit }}%">
{% for section, cells in summary.rows if section.ratio %}
{% set fast = section.overall.speedup %}
<dt>{{ section.name }}</dt>
<dd><span class="bar {{ 'plain' if section.reference }}"
 style="width: {{ '%.2f' % (unit * fast.ratio) }}%"></span>
{% if fast.low is not none and not section.reference %}
<span class="interval" style="left: {{ '%.2f' % (unit * fast.low) }}%;
 width: {{ '%.2f' % (unit * (fast.high - fast.low)) }}%"></span>
{% endif %}<span class="one"></span></dd><dd>{{ cells[0].line }}</dd>
{% endfor %}
</dl>
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
<dl>{% for title, formula in summary.heads.items() %}<dt>{{ title }}</dt>
<dd>{{ formula }}</dd>{% endfor %}</dl>
</body></html>
""")
