"""What roll-back costs on hybrid models: levels against branches against plain decoding.

    python -m benchmarks.hybrid [--context 256] [--rounds 9] [--families granitemoehybrid,…]

Random models of about 150 M parameters, float32, in one process; the contestants take turns within
each round. Prints the median step (verify and commit of half the path) by shape of the tree, what
of it is the commit, and the bytes that a step holds besides the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model.forward import prepare_attention
from engine.model.recurrent import Way
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import ChoiceTree, TreeShape

SIZE = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_5_text": {
        "layer_types": KINDS,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 3},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 3,
        "mamba_n_heads": 24,
        "mamba_d_state": 64,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
    },
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}
WIDE = ChoiceTree.parse(
    [[0, 0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 2], [1, 1], [2, 0], [3]]
)
SHAPES = {
    "plain": TreeShape.chain(0),
    "chain of 2": TreeShape.chain(2),
    "chain of 4": TreeShape.chain(4),
    "chain of 8": TreeShape.chain(8),
    f"tree of {len(WIDE)}": WIDE.shape,
    "star of 16": TreeShape([-1, *[0] * 16]),
}


def random_target(family: str) -> Target:
    """A model of the family with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    prepare_attention(model)
    return Target(model, None, name=family)


def step(target: Target, context: int, shape: TreeShape) -> tuple[float, float, int]:
    """Seconds of verify and of commit, and bytes held between them."""
    cache = target.new_cache(context + len(shape))
    target.prefill([i % 1000 for i in range(context)], cache, Needs())
    tokens = torch.arange(len(shape))
    began = time.perf_counter()
    target.verify(Proposal(tokens, shape), cache, Needs()).logits.argmax(dim=-1).tolist()
    verified = time.perf_counter()
    held = 0 if cache.recurrent is None else cache.recurrent.pending_bytes
    deepest = (0, *shape.path_to(len(shape) - 1))
    cache.commit(deepest[: len(deepest) // 2 + 1])
    return verified - began, time.perf_counter() - verified, held


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--families", default=",".join(FAMILIES))
    options = parser.parse_args()
    ways: tuple[Way, ...] = ("levels", "branches")
    for family in options.families.split(","):
        target = random_target(family)
        count = sum(p.numel() for p in target.model.parameters())
        print(f"{family}, {count / 1e6:.0f} M parameters, {target.device_name}")
        print(f"  {'':14}{'':10}{'step':>10}{'commit':>10}{'held':>12}")
        taken: dict[tuple[str, Way], list[tuple[float, float, int]]] = {}
        for _ in range(options.rounds + 1):
            for way in ways:
                target.recurrent.go(way)
                if target.recurrent.way == way:
                    for name, shape in SHAPES.items():
                        found = step(target, options.context, shape)
                        taken.setdefault((name, way), []).append(found)
        for (name, way), rounds in taken.items():
            verify, commit, held = (
                statistics.median(each[1:]) for each in zip(*rounds, strict=True)
            )
            step_ms, commit_ms = 1000 * (verify + commit), 1000 * commit
            print(f"  {name:14}{way:10}{step_ms:8.1f} ms{commit_ms:7.1f} ms{held / 2**20:8.1f} MiB")


if __name__ == "__main__":
    main()
