"""What a dtype costs in quality.

    python -m benchmarks.dtype_quality [--target A,B] [--dtypes auto] [--suite tasks] [--limit 4]
        [--new-tokens 96]

Targets are presets, folders, hub ids or GGUF files.

The float32 target answers the suite's prompts greedily; then every dtype reads prompts and answers
and is asked for the next token of each answer's. Prints the perplexity of the answers, the share of
tokens that are the likeliest in both, and the Kullback-Leibler divergence from float32.
`--limit` counts prompts of each kind of task.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import build_context, encode_question, load
from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.steps import End
from engine.tree import TreeShape

REFERENCE = "float32"


def main() -> None:
    """Answer, score, print."""
    options = read_options(
        __doc__,
        smoke={"dtypes": "bfloat16", "suite": "starter", "limit": 1, "new_tokens": 4},
        target=TARGET,
        dtypes="bfloat16,auto,q8",
        suite="tasks",
        limit=4,
        new_tokens=96,
    )
    for name in options.target.split(","):
        print(f"\n{presets.resolve(name).title or name}")
        _quality(name, options)


def _quality(name: str, options: argparse.Namespace) -> None:
    reference = load(name, REFERENCE, "cpu")
    texts = _answers(reference, options)
    known = [_log_probs(reference, prompt, answer) for prompt, answer in texts]
    reference.close()
    count = sum(len(answer) for _, answer in texts)
    print(f"{count:,} tokens of {len(texts)} answers of {options.suite}, judged by {REFERENCE}")
    print(f"{'dtype':24}{'perplexity':>12}{'same likeliest':>16}{'divergence':>12}")
    _print(REFERENCE, texts, known, known)
    for dtype in options.dtypes.split(","):
        target = load(name, dtype, "cpu")
        log_probs = [_log_probs(target, prompt, answer) for prompt, answer in texts]
        _print(f"{dtype} ({target.environment()['forward']})", texts, known, log_probs)
        target.close()


def _answers(target: Target, options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer, as token ids."""
    plain = AutoregressiveConfig().build(build_context(target))
    counts: dict[str, int] = defaultdict(int)
    texts = []
    for prompt in presets.suites()[options.suite].prompts:
        counts[prompt.category] += 1
        if counts[prompt.category] > options.limit:
            continue
        ids = encode_question(target, prompt.turns[0])
        *_, end = decode(target, plain, ids, limits=Limits(max_new_tokens=options.new_tokens))
        assert isinstance(end, End)
        texts.append((ids, list(end.output_ids)))
    return texts


@torch.inference_mode()
def _log_probs(target: Target, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities `(len(answer), vocab)` float32 before each of the answer's tokens."""
    cache = target.new_cache(len(prompt) + len(answer))
    try:
        first = target.prefill(prompt, cache, Needs()).logits
        chain = Proposal(torch.tensor(answer[:-1]), TreeShape.chain(len(answer) - 2))
        rest = target.verify(chain, cache, Needs()).logits if len(answer) > 1 else first[:0]
    finally:
        cache.free()
    return torch.cat([first.float(), rest.float()]).log_softmax(dim=-1)


def _print(
    name: str,
    texts: list[tuple[list[int], list[int]]],
    known: list[torch.Tensor],
    log_probs: list[torch.Tensor],
) -> None:
    chosen, same, divergence = [], [], []
    for (_, answer), truth, ours in zip(texts, known, log_probs, strict=True):
        chosen.append(ours.gather(1, torch.tensor(answer)[:, None])[:, 0])
        same.append(ours.argmax(dim=-1) == truth.argmax(dim=-1))
        divergence.append((truth.exp() * (truth - ours)).sum(dim=-1))
    perplexity = float((-torch.cat(chosen).mean()).exp())
    share, kl = float(torch.cat(same).float().mean()), float(torch.cat(divergence).mean())
    print(f"{name:24}{perplexity:12.3f}{share:15.1%}{kl:13.4f}", flush=True)


if __name__ == "__main__":
    main()
