"""Time to first token of a chat's second turn: everything read again, or only what is new.

    python -m benchmarks.chat_turns [--tokens 1500] [--rounds 5] [--methods plain,ngram,…]

One target in one process; within each round every method answers the second question cold, then
cached. Prints medians of the time to first token and of the first step's draft, in which a drafter
reads the prompt, and whether both texts are the same.
"""

from __future__ import annotations

import statistics
from typing import Any

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import load
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import BuildContext, Drafter
from engine.model.target import Target

METHODS = (
    "plain,ngram,suffix,token-recycling,medusa-smollm2-135m,eagle-smollm2-135m,pard-smollm2-135m"
)
SENTENCE = "The harbour had three old cranes, and each of them had a name of its own. "
QUESTIONS = ("Tell the story again.", "Which of them would you have repaired first, and why?")


def main() -> None:
    """Measure and print."""
    smoke = {"tokens": 60, "rounds": 1, "methods": "plain,ngram"}
    options = read_options(
        __doc__, smoke=smoke, target=TARGET, tokens=1500, rounds=5, methods=METHODS
    )
    target = load(options.target)
    small = target if options.smoke else load(TARGET)
    context = BuildContext(target, presets.resolve, lambda spec, **where: small, presets.locate)
    print(f"{target.name} {target.dtype_name} on {target.device_name}")
    print(
        f"{'method':22}{'prompt':>8}{'cached':>8}{'cold TTFT':>12}{'cached':>10}"
        f"{'cold draft':>12}{'cached':>10}  text"
    )
    for name in options.methods.split(","):
        drafter = presets.methods()[name].config.build(context)
        timings: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        texts, num_cached, prompt = set[tuple[int, ...]](), 0, list[int]()
        for _ in range(options.rounds):
            target.prefixes.clear()
            small.prefixes.clear()
            prompt = second_prompt(target, drafter, options.tokens)
            for cached in (True, False):
                first, step, *_, end = answer(target, drafter, prompt, cached=cached)
                texts.add(end.output_ids)
                timings[cached].append((first.ttft_s, step.draft_s))
                num_cached = max(num_cached, first.num_cached)
        del drafter  # before the next one is built
        cold, warm = (
            [1000 * statistics.median(each) for each in zip(*timings[cached], strict=True)]
            for cached in (False, True)
        )
        print(
            f"{name:22}{len(prompt):8}{num_cached:8}{cold[0]:9.0f} ms{warm[0]:7.0f} ms"
            f"{cold[1]:9.1f} ms{warm[1]:7.1f} ms  {'same' if len(texts) == 1 else 'DIFFERS'}"
        )


def answer(
    target: Target, drafter: Drafter, prompt: list[int], *, cached: bool, tokens: int = 24
) -> list[Any]:
    """Records of one answer."""
    limits = Limits(max_new_tokens=tokens)
    return list(decode(target, drafter, prompt, limits=limits, prefix_caching=cached))


def second_prompt(target: Target, drafter: Drafter, tokens: int) -> list[int]:
    """Have the first question answered, and ask the second."""
    question, text = {"role": "user", "content": QUESTIONS[0]}, ""
    while len(target.encode_chat([question])) < tokens:
        text += SENTENCE
        question = {"role": "user", "content": text + QUESTIONS[0]}
    first = answer(target, drafter, target.encode_chat([question]), cached=True, tokens=64)
    assert target.tokenizer is not None
    reply = target.tokenizer.decode(first[-1].output_ids, skip_special_tokens=True)
    turns = [question, {"role": "assistant", "content": str(reply)}]
    return target.encode_chat([*turns, {"role": "user", "content": QUESTIONS[1]}])


if __name__ == "__main__":
    main()
