"""Fitted trees against stock trees, and measured tok/s against what the Tree page predicts.

    python -m benchmarks.tree_prediction [--prompts 12] [--tokens 96] [--rounds 3] [--dtype auto]

For every shipped drafter that fills a choice tree, in one process: trees are fitted to two thirds
of the texts of the shipped rank table, and measured by real runs on prompts of the other third.
First the MAT of every published tree beside the fitted tree of the same size; then the tree that is
predicted to be the fastest here: its tok/s beside the prediction, prompt by prompt, and beside
plain decoding, which takes turns with it, so that drift of the machine hits both alike. The latency
curves are measured right before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import presets
from engine.config import Limits, MethodConfig
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import Drafter, Workbench
from engine.loading import load_target
from engine.metrics import Metrics, measure
from engine.target import Target
from engine.tree import ChoiceTree
from engine.tuning.latency import bucket_of, measure_curve
from engine.tuning.ranks import RankTable
from engine.tuning.search import best_tree, curve
from engine.tuning.shape import draft_shape, with_tree
from engine.tuning.sizing import SIZES, fastest, predict_sizes
from engine.tuning.step_latency import Clock
from engine.tuning.step_timing import measure_draft, measure_other
from playground import paths
from playground.tuning.editor_sources import SHIPPED
from playground.tuning.fitting import hold_out, stock_trees
from presets import MethodPreset
from presets.choice_trees import TreePreset

EVERY = 3
"""One text in so many is held out."""


@dataclass(slots=True)
class Contestant:
    """A drafter with its tree, and the runs it made: one per prompt and round."""

    title: str
    drafter: Drafter
    num_nodes: int
    runs: list[list[Metrics]] = field(default_factory=list)

    @property
    def mat(self) -> float:
        """Over all prompts, a step counting once; rounds repeat the same steps."""
        firsts = [rounds[0] for rounds in self.runs]
        steps = sum(one.num_steps for one in firsts)
        return 1 + sum(one.num_accepted for one in firsts) / steps

    def tok_s(self, prompt: int) -> float:
        return statistics.median(one.tok_s or 0.0 for one in self.runs[prompt])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    target = load_target(
        presets.resolve(options.target), dtype=options.dtype, cache_dir=paths.cache_dir()
    )
    bench = Workbench(target, presets.resolve, lambda spec: target, locate=presets.locate)
    print(f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens")
    for name, preset in presets.methods().items():
        file = SHIPPED / f"{name}.npz"
        if preset.target == options.target and file.is_file():
            _report(preset, RankTable.from_bytes(file.read_bytes()), bench, options)


def _report(
    preset: MethodPreset, table: RankTable, bench: Workbench, options: argparse.Namespace
) -> None:
    config, target = preset.config, bench.target
    fitted, held = hold_out(table, EVERY)
    assert held is not None
    prompts = _prompts(held, target, options.prompts)
    context_len = round(statistics.mean(map(len, prompts)) + options.tokens / 2)
    print(
        f"\n{preset.title}: fitted to {fitted.num_texts} texts, measured on {len(prompts)} of the "
        f"{held.num_texts} held out, {options.rounds} rounds, interleaved"
    )
    clock = Clock(
        measure_curve(target, context_len=bucket_of(context_len)),
        measure_other(target, context_len=bucket_of(context_len)),
        measure_draft(config, bench, context_len=bucket_of(context_len)),
    )
    best = fastest(predict_sizes(curve(fitted, SIZES), config, clock)).point.tree
    pairs = [(s.title, s.tree) for s in stock_trees(table, config, _published())]
    made: dict[str, Contestant] = {}
    for title, tree in pairs:
        made[title] = _contestant(title, config, tree, bench)
        title = f"fitted, {len(tree)}"
        made.setdefault(title, _contestant(title, config, best_tree(fitted, len(tree)), bench))
    made["best"] = _contestant(f"best here, {len(best)}", config, best, bench)
    plain = Contestant("plain", AutoregressiveConfig().build(bench), 0)
    _run([*made.values(), plain], target, prompts, tokens=options.tokens, rounds=1)
    _run([made["best"], plain], target, prompts, tokens=options.tokens, rounds=options.rounds)
    _print_mats(made, pairs)
    _print_prediction(made["best"], plain, clock, with_tree(config, best))
    for one in (*made.values(), plain):
        one.drafter.close()


def _published() -> list[TreePreset]:
    """Trees that were not fitted to this target."""
    return [tree for tree in presets.trees().values() if tree.measured is None]


def _prompts(held: RankTable, target: Target, count: int) -> list[list[int]]:
    """Prompts behind the held-out texts, spread over the kinds of task."""
    sources = held.about["sources"]
    step = max(1, len(sources) // count)
    found = []
    for source in sources[::step][:count]:
        suite, _, name = str(source).partition("/")
        prompt = next(p for p in presets.suites()[suite].prompts if p.id == name)
        found.append(target.encode_chat([{"role": "user", "content": prompt.turns[0]}]))
    return found


def _contestant(title: str, config: MethodConfig, tree: ChoiceTree, bench: Workbench) -> Contestant:
    return Contestant(title, with_tree(config, tree).build(bench), len(tree))


def _run(
    contestants: Sequence[Contestant],
    target: Target,
    prompts: Sequence[list[int]],
    *,
    tokens: int,
    rounds: int,
) -> None:
    """Everybody answers every prompt in turn, so many rounds; what they did before is forgotten."""
    limits = Limits(max_new_tokens=tokens)
    for one in contestants:
        one.runs = [[] for _ in prompts]
    for _ in range(rounds):
        for number, prompt in enumerate(prompts):
            for one in contestants:
                records = decode(target, one.drafter, prompt, limits=limits)
                one.runs[number].append(measure(records))


def _print_mats(made: dict[str, Contestant], pairs: Sequence[tuple[str, ChoiceTree]]) -> None:
    print(f"  {'published tree':28}{'nodes':>6}{'MAT':>8}{'fitted':>8}{'':>9}")
    for title, tree in pairs:
        stock, fitted = made[title].mat, made[f"fitted, {len(tree)}"].mat
        print(f"  {title:28}{len(tree):6}{stock:8.3f}{fitted:8.3f}{fitted / stock - 1:+9.1%}")


def _print_prediction(
    best: Contestant, plain: Contestant, clock: Clock, config: MethodConfig
) -> None:
    """tok/s beside the prediction, from each prompt's own MAT: what is off is the clock's part."""
    shape = draft_shape(config)
    expected = clock.predict(best.mat, levels=shape.levels, num_nodes=shape.num_nodes)
    print(
        f"  {best.title} nodes: predicted draft {expected.draft_ms:.1f} + verify "
        f"{expected.verify_ms:.1f} + other {expected.other_ms:.1f} ms per step"
    )
    print(f"    {'prompt':>6}{'MAT':>7}{'predicted':>11}{'measured':>10}{'':>8}{'plain':>8}")
    ratios, plains, speedups = [], [], []
    for number, rounds in enumerate(best.runs):
        mat = 1 + rounds[0].num_accepted / rounds[0].num_steps
        predicted = 1000 * mat / expected.step_ms
        tok_s, plain_tok_s = best.tok_s(number), plain.tok_s(number)
        ratios.append(tok_s / predicted)
        plains.append(plain_tok_s / expected.plain_tok_s)
        speedups.append(tok_s / plain_tok_s)
        print(
            f"    {number + 1:6}{mat:7.2f}{predicted:11.1f}{tok_s:10.1f}{ratios[-1] - 1:+8.0%}"
            f"{plain_tok_s:8.1f}"
        )
    print(
        f"  measured / predicted: median {statistics.median(ratios):.3f} (plain decoding: "
        f"{statistics.median(plains):.3f}); over plain decoding: measured "
        f"{statistics.median(speedups):.2f}, predicted {expected.speedup:.2f}"
    )


if __name__ == "__main__":
    main()
