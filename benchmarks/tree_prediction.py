"""Fitted trees against stock trees, and measured tok/s against what the Tree page predicts.

    python -m benchmarks.tree_prediction [--prompts 12] [--tokens 96] [--rounds 3] [--dtype auto]

For every shipped drafter that fills a choice tree, in one process: trees are fitted to two thirds
of the texts of the shipped rank table, and measured by real runs on prompts of the other third.
First the MAT of every published tree beside the fitted tree of the same size; then the tree that is
predicted to be the fastest here: its tok/s beside the prediction, prompt by prompt, and beside
plain decoding, which takes turns with it, so that drift of the machine hits both alike. The latency
curves are measured anew before every round: a shared machine changes its speed within a minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import load
from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.metrics import Metrics, measure
from engine.model.target import Target
from engine.tree import ChoiceTree
from engine.tuning.experience import ExperienceStore
from engine.tuning.latency import Prediction, StepLatency
from engine.tuning.ranks import RankTable
from engine.tuning.search import SIZES, BestTree, best_trees
from playground.trees.sources import SHIPPED
from presets import MethodPreset, TreePreset

EVERY = 3
"""One text in so many is held out."""


@dataclass(slots=True)
class Contestant:
    """A drafter with its tree, and its runs: per round, one per prompt."""

    title: str
    drafter: Drafter
    num_nodes: int
    runs: list[list[Metrics]] = field(default_factory=list)

    @property
    def mat(self) -> float:
        """Over all prompts, a step counting once; rounds repeat the same steps."""
        steps = sum(one.num_steps for one in self.runs[0])
        return 1 + sum(one.num_accepted for one in self.runs[0]) / steps


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"prompts": 1, "tokens": 8, "rounds": 1},
        target=TARGET,
        dtype="auto",
        prompts=12,
        tokens=96,
        rounds=3,
    )
    target = load(options.target, options.dtype)
    bench = BuildContext(target, presets.resolve, lambda spec: target, locate=presets.locate)
    print(f"{target.name} {target.dtype_name} on {target.device_name}, {options.tokens} tokens")
    for name, preset in presets.methods().items():
        file = SHIPPED / f"{name}.npz"
        if preset.target == (TARGET if options.smoke else options.target) and file.is_file():
            _report(preset, RankTable.from_bytes(file.read_bytes()), bench, options)


def _report(
    preset: MethodPreset, table: RankTable, bench: BuildContext, options: argparse.Namespace
) -> None:
    config, target = preset.config, bench.target
    texts = range(table.num_texts)
    fitted = table.select([text for text in texts if text % EVERY != EVERY - 1])
    held = table.select(texts[EVERY - 1 :: EVERY])
    prompts = _prompts(held, target, options.prompts)
    print(
        f"\n{preset.title}: fitted to {fitted.num_texts} texts, measured on {len(prompts)} of the "
        f"{held.num_texts} held out, {options.rounds} rounds, interleaved"
    )

    def timed() -> StepLatency:
        return ExperienceStore(None).measure(config, bench)

    latency = timed()

    def tok_s(point: BestTree) -> float:
        return latency.predict_config(config.with_tree(point.tree), point.mat).tok_s

    best = max(best_trees(fitted, SIZES[: 2 if options.smoke else None]), key=tok_s).tree
    published = _published(config, table)[: 2 if options.smoke else None]
    pairs = [(preset.name, preset.tree) for preset in published]
    contestants: dict[str, Contestant] = {}
    for title, tree in pairs:
        contestants[title] = _contestant(title, config, tree, bench)
        title = f"fitted, {len(tree)}"
        contestants.setdefault(
            title, _contestant(title, config, best_trees(fitted, (len(tree),))[0].tree, bench)
        )
    contestants["best"] = _contestant(f"best here, {len(best)}", config, best, bench)
    plain = Contestant("plain", AutoregressiveConfig().build(bench), 0)
    _run([*contestants.values(), plain], target, prompts, tokens=options.tokens)
    _print_mats(contestants, pairs)
    clocks = []
    for one in (contestants["best"], plain):
        one.runs = []
    for _ in range(options.rounds):
        clocks.append(timed())
        _run([contestants["best"], plain], target, prompts, tokens=options.tokens)
    expected = [
        clock.predict_config(config.with_tree(best), contestants["best"].mat) for clock in clocks
    ]
    _print_prediction(contestants["best"], plain, expected)


def _published(config: MethodConfig, table: RankTable) -> list[TreePreset]:
    """The method's trees that were not fitted to this target, if the table can replay them.

    Their names end with the method that they were published for, if it is only one.
    """
    others = {"medusa", "eagle"} - {config.decoding_type.lower()}
    return [
        preset
        for preset in presets.trees().values()
        if preset.measured is None
        and preset.name.rpartition("-")[2] not in others
        and preset.tree.depth <= table.depths
        and preset.tree.max_rank < table.num_ranks
    ]


def _prompts(held: RankTable, target: Target, count: int) -> list[list[int]]:
    """Prompts behind the held-out texts, spread over the kinds of task."""
    sources = held.about["sources"]
    step = max(1, len(sources) // count)
    prompts = []
    for source in sources[::step][:count]:
        suite, _, name = str(source).partition("/")
        prompt = next(p for p in presets.suites()[suite].prompts if p.id == name)
        prompts.append(target.encode_chat([{"role": "user", "content": prompt.turns[0]}]))
    return prompts


def _contestant(
    title: str, config: MethodConfig, tree: ChoiceTree, bench: BuildContext
) -> Contestant:
    return Contestant(title, config.with_tree(tree).build(bench), len(tree))


def _run(
    contestants: Sequence[Contestant], target: Target, prompts: Sequence[list[int]], *, tokens: int
) -> None:
    """Everybody answers every prompt in turn; the runs are one more round of theirs."""
    limits = Limits(max_new_tokens=tokens)
    for one in contestants:
        one.runs.append([])
    for prompt in prompts:
        for one in contestants:
            one.runs[-1].append(measure(decode(target, one.drafter, prompt, limits=limits)))


def _print_mats(
    contestants: dict[str, Contestant], pairs: Sequence[tuple[str, ChoiceTree]]
) -> None:
    print(f"  {'published tree':28}{'nodes':>6}{'MAT':>8}{'fitted':>8}{'':>9}")
    for title, tree in pairs:
        stock, fitted = contestants[title].mat, contestants[f"fitted, {len(tree)}"].mat
        print(f"  {title:28}{len(tree):6}{stock:8.3f}{fitted:8.3f}{fitted / stock - 1:+9.1%}")


def _print_prediction(best: Contestant, plain: Contestant, expected: Sequence[Prediction]) -> None:
    """tok/s beside the round's prediction, from each prompt's own MAT: what is off is the clock."""
    parts = ", ".join(f"{one.draft_ms:.1f} + {one.verify_ms:.1f}" for one in expected)
    print(f"  {best.title} nodes: predicted draft + verify, ms per step by round: {parts}")
    print(f"    {'prompt':>6}{'MAT':>7}{'measured tok/s':>16}{'/ predicted':>13}{'plain':>8}")
    ratios, plains, speedups = [], [], []
    for number, first in enumerate(best.runs[0]):
        mat = 1 + first.num_accepted / first.num_steps
        mine = [rounds[number].tok_s or 0.0 for rounds in best.runs]
        theirs = [rounds[number].tok_s or 0.0 for rounds in plain.runs]
        steps = [one.step_ms / (1000 * mat) for one in expected]
        ratios.append(_median(a * step for a, step in zip(mine, steps, strict=True)))
        plain_steps = [1 / one.plain_tok_s for one in expected]
        plains.append(_median(a * step for a, step in zip(theirs, plain_steps, strict=True)))
        speedups.append(_median(a / b for a, b in zip(mine, theirs, strict=True)))
        print(
            f"    {number + 1:6}{mat:7.2f}{_median(mine):16.1f}{ratios[-1]:13.2f}"
            f"{_median(theirs):8.1f}"
        )
    print(
        f"  measured / predicted: median {_median(ratios):.3f} (plain decoding: "
        f"{_median(plains):.3f}); over plain decoding: measured {_median(speedups):.2f}, "
        f"predicted {_median(one.speedup for one in expected):.2f}"
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
