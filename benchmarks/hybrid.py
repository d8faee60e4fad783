"""What roll-back costs on hybrid models, beside what the Tree page predicts of it.

    python -m benchmarks.hybrid [--families lfm2,…] [--rounds 3] [--tokens 40] [--context 256]

Random models of about 150 M parameters, float32, in one process, and real runs of scripted drafts
that are right for some of their depth. The shapes take turns within each round, before which the
latency is measured anew. Prints medians by shape: the mean acceptance length, the step and what of
it is the roll-back, what is predicted of the step by the tree's shape and by its rows alone, and
tok/s, measured and predicted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import read_options
from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import Drafter, DraftSession
from engine.metrics import measure
from engine.model.forward import prepare_attention
from engine.model.target import Target
from engine.proposal import Budget, Proposal
from engine.steps import End
from engine.tree import ChoiceTree, TreeShape
from engine.tuning.latency import StepLatency
from engine.tuning.timing import comb_tree, measure_curve

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
DEPTHS = {7: (1, 2, 4, 6), 15: (1, 2, 4, 6, 10)}
SHAPES = {
    **{f"chain of {n}" if n else "plain": TreeShape.chain(n) for n in (0, 1, 2, 4, 8)},
    **{f"{n} nodes, {d} deep": comb_tree(n + 1, d) for n, ds in DEPTHS.items() for d in ds},
    f"published, {len(WIDE)} nodes, {WIDE.depth} deep": WIDE.shape,
    "binary, 14 nodes, 3 deep": TreeShape([-1, *[i // 2 for i in range(14)]]),
}


def random_target(family: str) -> Target:
    """A model of the family with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    prepare_attention(model)
    return Target(model, None, name=family)


class _ScriptedSession(DraftSession["_Scripted"]):
    _right = 0

    def propose(self, budget: Budget) -> Proposal:
        text, shape = self.drafter.text, self.drafter.shape
        tokens, done = [self.root, *range(1, len(shape))], len(self.text) - self.log.num_prompt
        depths = shape.depths.tolist()
        path = shape.path_to(depths.index(max(depths)))
        for depth, node in enumerate(path):
            is_right = depth < self._right and done + depth < len(text)
            tokens[node] = text[done + depth] if is_right else 0
        self._right = (self._right + 1) % (shape.max_depth + 1)
        return Proposal(torch.tensor(tokens), shape)


class _Scripted(Drafter):
    """Drafts one shape; its first path is right for 0, 1, … all of its tokens, step by step."""

    session = _ScriptedSession

    def __init__(self, text: Sequence[int], shape: TreeShape) -> None:
        self.text, self.shape = text, shape


def report(target: Target, options: argparse.Namespace) -> None:
    """Print steps and tok/s of real runs beside the prediction, by shape."""
    prompt = [i % 1000 for i in range(options.context - options.tokens // 2)]
    limits = Limits(max_new_tokens=options.tokens, ignore_eos=True)
    longer = Limits(max_new_tokens=options.tokens + 32, ignore_eos=True)
    plain = _Scripted([], TreeShape.chain(0))
    *_, end = decode(target, plain, prompt, limits=longer)
    assert isinstance(end, End)
    rows = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24)
    timings: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(options.rounds):
        curve = measure_curve(target, rows=rows, context_len=options.context)
        latency = StepLatency(curve, 0.0, 0.0)
        for name, shape in SHAPES.items():
            run = measure(decode(target, _Scripted(end.output_ids, shape), prompt, limits=limits))
            nodes, depth = len(shape) - 1, shape.max_depth
            assert run.mat and run.tok_s and run.quiet_split
            by_shape, by_rows = (
                latency.predict(run.mat, num_nodes=nodes, depth=d) for d in (depth, nodes)
            )
            step_ms, back_ms = (
                1000 * part for part in (run.quiet_split.total_s, run.quiet_split.rollback_s)
            )
            row = (
                run.mat,
                step_ms,
                back_ms,
                by_shape.step_ms,
                by_rows.step_ms,
                run.tok_s,
                by_shape.tok_s,
            )
            timings.setdefault(name, []).append(row)
    heads = ("MAT", "step ms", "roll-back", "predicted", "by rows", "tok/s", "predicted")
    print(f"  {'':22}" + "".join(f"{head:>10}" for head in heads))
    for name, rounds in timings.items():
        figures = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"  {name:22}" + "".join(f"{figure:10.2f}" for figure in figures))


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"context": 32, "rounds": 1, "families": "lfm2", "tokens": 8},
        context=256,
        rounds=3,
        families=",".join(FAMILIES),
        tokens=40,
    )
    if options.smoke:
        SIZE.update(vocab_size=1024, hidden_size=96, intermediate_size=96)
    for family in options.families.split(","):
        target = random_target(family)
        count = sum(p.numel() for p in target.model.parameters())
        print(f"{family}, {count / 1e6:.0f} M parameters, {target.device_name}")
        report(target, options)


if __name__ == "__main__":
    main()
