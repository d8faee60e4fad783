"""The catalogue of figures: title, formula, notation and unit of each, and whether more is better.

Runs are stored as counts and seconds, from which `engine.metrics` computes every figure. Pages,
tables, exports, commands and scripts take titles, tooltips and notation from here; docs/figures.md
lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine import formats

FORMULAS: dict[str, str] = {
    "mat": "mean accepted tokens: "
    "1 + accepted draft tokens / steps, before any cut by EOS or length",
    "position_rates": "how deep drafts go: "
    "rate i = steps that accepted at least i draft tokens / steps",
    "draft_acceptance": "how much of the draft is right: accepted draft tokens / drafted tokens; "
    "what structured output forbids is cut before it is verified, and is not among them",
    "ttft_s": "time to first token: request in the engine, model loaded → first commit, in seconds",
    "tok_s": "decoding without prefill: "
    "(new tokens - 1) / (last commit - first commit), in seconds",
    "itl_ms": "inter-token latency: "
    "mean of step latency / tokens the step committed, in milliseconds",
    "step_p50_ms": "median latency of a step, in milliseconds",
    "step_p95_ms": "95th percentile of the latency of a step, in milliseconds",
    "time_split": "mean seconds per step in draft, verify, accept, other and roll-back, which "
    "restores the states of recurrent layers after the accepted path; 0 without such layers",
    "num_prompt_tokens": "the prompt: tokens that were read / tokens in the cache already, from an "
    "earlier turn",
    "num_new_tokens": "new tokens, counted after any cut by EOS, stop string or length / steps of "
    "the loop",
    "speedup": "tok/s over the tok/s of plain decoding: same target, prompt, device and dtype",
    "throughput": "tokens of all requests / seconds that all of them took, reading prompts and "
    "waiting included",
}
"""Of one run. MAT and the position rates count acceptance before any cut by EOS, stop string or
length; tok/s counts what was committed after it."""
POOLED_FORMULAS: dict[str, str] = {
    "speedup": "tok/s over the tok/s of plain decoding on the same requests, tok/s = "
    "Σ (new tokens - 1) / Σ (last commit - first commit); none where a step took less time "
    "than a plain step, for then plain decoding was timed while the machine was slower",
    "request_speedup": "of whole requests, prefill included: Σ output tokens / Σ request latency "
    "over that of plain decoding on the same requests, as genai-perf's throughputs compare",
    "interval": "95% interval of each speedup by itself: Student's t on the scatter between "
    "prompts, or between the repeats of a single prompt; none where its bounds would be more than "
    "10 times apart. Which is the fastest is judged with Bonferroni's correction for their number",
    "mat": "1 + Σ accepted draft tokens / Σ steps, before any cut by EOS or length",
    "tok_s": "Σ (new tokens - 1) / Σ (last commit - first commit): decoding without prefill",
    "step_ms": "Σ step latency / steps: draft + verify + accept + other + roll-back",
    "position_rates": FORMULAS["position_rates"],
    "draft_acceptance": FORMULAS["draft_acceptance"],
    "itl_ms": "mean over requests of the mean over steps of step latency / tokens committed",
    "ttft_ms": "mean over requests of the time from entering the engine to the first commit",
    "time_split": "Σ seconds in draft, verify, accept, other and roll-back / steps",
    "by_context": "tok/s and MAT of the requests by prompt tokens + half of the new tokens",
    "verdict": "greedy answers identical, token for token, to plain decoding's / answers",
}
"""Of several requests, whose counts and seconds are summed before they are divided."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is shown everywhere.

    Attributes:
        form: writes a value, which is in milliseconds where this is `formats.milliseconds`.
        best: `max` or `min`, whichever picks the better value, if either does.
        scale: factor from the stored unit to that of `form`.
        pair: its title where a second figure is shown with it, as `tokens / steps`.
        name: of its formula.
    """

    title: str
    form: Callable[[float | None], str]
    best: Callable[..., float] | None = None
    scale: float = 1.0
    pair: str = ""
    name: str = ""

    @property
    def formula(self) -> str:
        """Its tooltip."""
        return FORMULAS.get(self.name, "")

    @property
    def heading(self) -> str:
        """Of a column, whose cells have no unit."""
        return f"{self.title} ms" if self.form is formats.milliseconds else self.title

    def text(self, value: float | None) -> str:
        """Without its unit."""
        return self.form(None if value is None else self.scale * value)

    def with_unit(self, value: float | None) -> str:
        """86%, 3.1 ms or 1.30 s, for example."""
        form = formats.duration if self.form is formats.milliseconds else self.form
        return form(None if value is None else self.scale * value)


STEP_PARTS = ("draft", "verify", "accept", "other", "roll-back")
"""The parts of a step, in the order of `engine.metrics.TimeSplit`."""
FIGURES: dict[str, Figure] = {
    "num_prompt_tokens": Figure("prompt tokens", formats.count, pair="read / cached"),
    "num_new_tokens": Figure("tokens", formats.count, pair="tokens / steps"),
    "num_steps": Figure("steps", formats.count),
    "tok_s": Figure("tok/s", formats.tok_s, max),
    "speedup": Figure("speedup", formats.speedup, max),
    "mat": Figure("MAT", formats.mat, max),
    "draft_acceptance": Figure("accepted", formats.percent, max),
    "ttft_s": Figure("TTFT", formats.milliseconds, min, 1000),
    "itl_ms": Figure("ITL", formats.milliseconds, min),
    "step_p50_ms": Figure("step p50", formats.milliseconds, min),
    "step_p95_ms": Figure("step p95", formats.milliseconds, min, pair="step p50 / p95"),
    "position_rates": Figure("position rates", formats.percent),
    "time_split": Figure("time split", formats.milliseconds, scale=1000),
    "throughput": Figure("throughput", formats.tok_s),
}
FIGURES = {name: replace(figure, name=name) for name, figure in FIGURES.items()}
FIGURES |= {f"{part}_s": replace(FIGURES["time_split"], title=part) for part in STEP_PARTS[:4]}
TREE_FIGURES: dict[str, tuple[str, str]] = {
    "mat": (
        FIGURES["mat"].title,
        "1 + accepted draft tokens / steps, replayed over every position of the table: exact for "
        "greedy",
    ),
    "tok_s": (
        "predicted tok/s",
        "1000 · MAT / (draft ms + verify ms(nodes + 1)), times measured on this machine",
    ),
    "speedup": (
        FIGURES["speedup"].title,
        "predicted tok/s / plain decoding's 1000 / verify ms(1)",
    ),
    "step_ms": (
        "step",
        "draft ms + verify ms(nodes + 1): drafting, and one forward with the loop's own work",
    ),
    "nodes": ("nodes / depth", "drafted nodes, root excluded / longest path"),
    "steps": (
        "steps / tokens",
        "steps that the tree needs for the table's texts / tokens that they commit; the last step "
        "may run past the end of its text",
    ),
}
"""Titles and formulas on the Tree page, which computes and writes them itself."""
