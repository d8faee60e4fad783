"""Methods against transformers' assisted generation, where it has the method.

    python -m benchmarks.methods_vs_transformers [--rounds 3] [--tokens 96] [--per-category 1]

| ours | transformers' `generate` |
|---|---|
| NGram | prompt lookup (`prompt_lookup_num_tokens`), same draft length |
| Draft_Target | `assistant_model`, same drafter, same constant draft length |
| plain | neither |

One process, same weights and threads, greedy; contestants take turns within each round. Prompts are
of the six kinds of task of the suite `tasks`. Times are of whole answers, prompt included: that is
all that `generate` shows of its steps. Prints totals, and ratios round by round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

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
PAIRS = (("plain", "generate"), ("NGram", "prompt lookup"), ("Draft_Target", "assistant"))


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
    )
    target = load(options.target, options.dtype)
    prompts = first_turns(target, presets.suites()["tasks"], options.per_category)
    prompts = prompts[: 1 if options.smoke else None]
    runs = _contestants(target, Limits(max_new_tokens=options.tokens, ignore_eos=True))
    for run in runs.values():
        run(prompts[0])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        elapsed = dict.fromkeys(runs, 0.0)
        for prompt in prompts:
            for name, run in runs.items():
                elapsed[name] += run(prompt)
        for name, total in elapsed.items():
            seconds[name].append(total)
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens for "
        f"each of {len(prompts)} prompts, {options.rounds} rounds, interleaved"
    )
    tokens = options.tokens * len(prompts)
    for name, values in seconds.items():
        print(f"  {name:16} median {tokens / statistics.median(values):6.1f} tok/s")
    for ours, theirs in PAIRS:
        print(f"  {ours} / {theirs}: {ratios(seconds[theirs], seconds[ours])}")


def _contestants(target: Target, limits: Limits) -> dict[str, Callable[[list[int]], float]]:
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
    assistant = transformers_model(load(presets.locate(DRAFTER), target.companion_dtype))
    length = draft.model_dump()["max_draft_len"]
    assistant.generation_config.num_assistant_tokens = length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    peers: dict[str, dict[str, Any]] = {
        "generate": {},
        "prompt lookup": {"prompt_lookup_num_tokens": ngram.model_dump()["max_draft_len"]},
        "assistant": {"assistant_model": assistant},
    }
    ours = {name: _ours(target, drafter, limits) for name, drafter in drafters.items()}
    return ours | {
        name: _theirs(model, limits.max_new_tokens, more) for name, more in peers.items()
    }


def _ours(target: Target, drafter: Drafter, limits: Limits) -> Callable[[list[int]], float]:
    def run(ids: list[int]) -> float:
        began = time.perf_counter()
        *_, end = decode(target, drafter, ids, limits=limits)
        assert isinstance(end, End) and len(end.output_ids) == limits.max_new_tokens
        return time.perf_counter() - began

    return run


def _theirs(model: Any, tokens: int, settings: dict[str, Any]) -> Callable[[list[int]], float]:
    def run(ids: list[int]) -> float:
        prompt = torch.tensor([ids])
        began = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            **settings,
        )
        assert out.shape[1] == len(ids) + tokens
        return time.perf_counter() - began

    return run


if __name__ == "__main__":
    main()
