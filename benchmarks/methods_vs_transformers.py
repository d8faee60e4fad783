"""Decoding and methods against `transformers.generate`, where it has the method.

    python -m benchmarks.methods_vs_transformers [--rounds 3] [--tokens 96] [--per-category 1]
                                                 [--dtype float32] [--compiled]

| ours | transformers' `generate` |
|---|---|
| plain | neither |
| NGram | prompt lookup (`prompt_lookup_num_tokens`), same draft length |
| Draft_Target | `assistant_model`, same drafter, same constant draft length |

One process, same weights and threads, greedy; contestants take turns within each round. `generate`
runs a copy of the model under transformers' own modules and attention, in the target's dtype (in
bfloat16 for q4, which transformers does not have); `--compiled` adds its static-cache mode under
torch.compile, which takes minutes to warm up on a processor. Prompts are of the six kinds of task
of the suite `tasks`. Prints totals and ratios round by round: of whole answers, prompt included,
and of what follows the first token (where `generate` drafts: its first step).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig

import presets
from benchmarks import TARGET, ratios, read_options
from benchmarks.models import build_context, first_turns, load, transformers_model
from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.steps import End

DRAFTER = "draft-smollm2-135m"
PAIRS = (
    *(("plain", "generate"), ("plain", "generate, compiled"), ("NGram", "plain")),
    *(("NGram", "prompt lookup"), ("Draft_Target", "assistant")),
)
Seconds = tuple[float, float]
"""Of a whole answer, and of what follows its first token."""
Contestant = Callable[[list[int]], Seconds]


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"rounds": 1, "tokens": 8, "dtype": "float32"},
        target=TARGET,
        dtype="auto",
        rounds=3,
        tokens=96,
        per_category=1,
        compiled=False,
    )
    target = load(options.target, options.dtype)
    prompts = first_turns(target, presets.suites()["tasks"], options.per_category)
    prompts = prompts[: 1 if options.smoke else None]
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    runs = _contestants(target, limits, options.compiled)
    for run in runs.values():
        run(prompts[0])
    seconds: dict[str, list[Seconds]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        elapsed: dict[str, list[Seconds]] = {name: [] for name in runs}
        for prompt in prompts:
            for name, run in runs.items():
                elapsed[name].append(run(prompt))
        for name, each in elapsed.items():
            whole, rest = zip(*each, strict=True)
            seconds[name].append((sum(whole), sum(rest)))
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens for "
        f"each of {len(prompts)} prompts, {options.rounds} rounds, interleaved"
    )
    for part, title in enumerate(("whole answers", "after the first token")):
        print(f"\n{title}")
        tokens = (options.tokens - part) * len(prompts)
        times = {name: [each[part] for each in rounds] for name, rounds in seconds.items()}
        for name, values in times.items():
            print(f"  {name:18} median {tokens / statistics.median(values):6.1f} tok/s")
        for ours, theirs in PAIRS:
            if theirs in times:
                print(f"  {ours} / {theirs}: {ratios(times[theirs], times[ours])}")


def _contestants(target: Target, limits: Limits, compiled: bool) -> dict[str, Contestant]:
    bench = build_context(target)
    draft = presets.methods()[DRAFTER].config
    # A pool of each run's own: it must not remember the answers from the round before.
    ngram = presets.methods()["ngram"].config.replace(is_public_pool=False)
    drafters = {
        "plain": parse_method({"decoding_type": "Autoregressive"}).build(bench),
        "NGram": ngram.build(bench),
        "Draft_Target": draft.build(bench),
    }
    model = transformers_model(target)
    assistant = transformers_model(load(presets.locate(DRAFTER), target.precision.companion))
    length = draft.model_dump()["max_draft_len"]
    assistant.generation_config.num_assistant_tokens = length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    peers: dict[str, dict[str, Any]] = {
        "generate": {},
        "prompt lookup": {"prompt_lookup_num_tokens": ngram.model_dump()["max_draft_len"]},
        "assistant": {"assistant_model": assistant},
    }
    if compiled:
        everywhere = CompileConfig()
        vars(everywhere)["_compile_all_devices"] = True
        static = {"cache_implementation": "static", "compile_config": everywhere}
        peers["generate, compiled"] = static
    ours = {name: _ours(target, drafter, limits) for name, drafter in drafters.items()}
    return ours | {
        name: _theirs(model, limits.max_new_tokens, more) for name, more in peers.items()
    }


def _ours(target: Target, drafter: Drafter, limits: Limits) -> Contestant:
    def run(ids: list[int]) -> Seconds:
        began = time.perf_counter()
        (_, first), *_, (end, ended) = (
            (record, time.perf_counter()) for record in decode(target, drafter, ids, limits=limits)
        )
        assert isinstance(end, End) and len(end.output_ids) == limits.max_new_tokens
        return ended - began, ended - first

    return run


def _theirs(model: Any, tokens: int, settings: dict[str, Any]) -> Contestant:
    def run(ids: list[int]) -> Seconds:
        prompt, clock = torch.tensor([ids]), _Clock()
        began = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            streamer=clock,
            **settings,
        )
        ended = time.perf_counter()
        assert out.shape[1] == len(ids) + tokens
        return ended - began, ended - clock.times[1]

    return run


class _Clock:
    """A streamer that notes when tokens arrive (the first call is the prompt)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return None


if __name__ == "__main__":
    main()
