"""Whether any method is ever slower than plain decoding, on any target, kind of question and law.

    python -m benchmarks.never_slower --prompts QUESTIONS.jsonl [--target TARGET] [--methods a,b]
        [--per-kind 3] [--tokens 128] [--temperature 0.7] [--rounds 1] [--fresh]

TARGET is a preset, a folder, a hub id or a GGUF file. Methods are presets at their defaults,
`drafting: auto`; without `--methods` all shipped ones for the target. On every question each
method takes turns with plain decoding, which goes first on every other question; one process for
all; each answer ends where the target ends it. Of several rounds each question's median one counts,
so that a moment in which the machine did something else does not. What was learnt earlier on this
machine is used; `--fresh` begins every round with nothing. Prints, for every method, plain
decoding's time over its own: of all questions and of each kind, `!` where the 95% interval over
questions lies below 0.97; how many steps drafted; the median over runs of predicted over realised
speed; the most that a run lost against plain decoding by its own account; and how many greedy texts
differ from plain decoding's.
The row of `plain` is plain decoding in turns with itself: what it shows is noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import presets
from benchmarks import TARGET, read_options
from benchmarks.models import build_context, encode_question, load
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.metrics import measure
from engine.model.target import Target
from engine.steps import End
from engine.tuning.controller import ControlledDrafter, build_drafter
from engine.tuning.experience import ExperienceStore
from playground.experiments.prompts import read_suite_file
from playground.host import paths
from playground.host.speedup import Counts, Speedup, ratio_of_counts

CHAT = "writing roleplay reasoning math coding extraction stem humanities"
"""Categories that Spec-Bench reports as one kind, of many turns."""
WARM_UP = "Write the numbers from one to twenty as words, and then backwards."
LEAST = 0.97
"""No kind of question may be slower than this."""
Question = tuple[str, int]
"""Kind and number of a question."""


@dataclass
class Row:
    """What a method did, by question."""

    runs: dict[Question, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Tokens and seconds, a pair per round."""
    steps: int = 0
    drafted: int = 0
    predicted: list[float] = field(default_factory=list)
    lost_ms: float = 0.0
    differ: int = 0

    def typical(self, question: Question) -> tuple[int, float]:
        """The round of median speed; of an even number, the faster one of two."""
        runs = sorted(self.runs[question], key=lambda run: run[0] / run[1])
        return runs[len(runs) // 2]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        tokens, seconds = zip(*map(self.typical, self.runs), strict=True)
        return float(sum(tokens) / sum(seconds))

    def speedup(self, plain: Row, kind: str | None = None) -> Speedup:
        """Over plain decoding in turns with it."""
        keys = [one for one in self.runs if one in plain.runs and kind in {None, one[0]}]
        return ratio_of_counts([Counts(*self.typical(one), *plain.typical(one)) for one in keys])


def questions(target: Target, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """So many first turns of each kind, as token ids."""
    suite = read_suite_file(options.prompts) if options.prompts else presets.suites()["tasks"]
    kinds: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in suite.prompts:
        ids = encode_question(target, prompt.turns[0])
        if len(ids) + options.tokens < target.context_len:
            kinds["chat" if prompt.category in CHAT.split() else prompt.category].append(ids)
    return {kind: some[: options.per_kind] for kind, some in kinds.items()}


def run(
    target: Target, drafter: Drafter, ids: Sequence[int], question: Question, row: Row,
    sampling: Sampling, tokens: int,
) -> tuple[int, ...]:  # fmt: skip
    """Answer one question; the tokens of the answer."""
    limits = Limits(max_new_tokens=tokens)
    records = list(decode(target, drafter, ids, sampling=sampling, limits=limits))
    metrics, end = measure(records), records[-1]
    assert isinstance(end, End)
    if metrics.tok_s is None:
        return end.output_ids
    row.runs[question].append((metrics.num_new_tokens - 1, metrics.decode_s))
    row.steps += metrics.num_steps
    row.drafted += metrics.num_steps - sum(metrics.bypasses.values())
    if metrics.expected_tok_s:
        row.predicted.append(metrics.expected_tok_s / metrics.tok_s)
    if isinstance(drafter, ControlledDrafter):
        row.lost_ms = max(row.lost_ms, drafter.loss_ms)
    return end.output_ids


def methods_for(name: str) -> list[str]:
    """Presets that are shipped with their weights, or need none."""
    own = [
        key
        for key, preset in presets.methods().items()
        if preset.config.decoding_type != "Autoregressive"
        and preset.target in {None, *presets.same_model(presets.resolve(name))}
    ]
    return [key for key in own if not presets.methods()[key].untrained]


def main() -> None:
    """Measure and print."""
    options = read_options(
        __doc__,
        smoke={"methods": "ngram,token-recycling", "per_kind": 1, "tokens": 8},
        target=TARGET,
        methods="",
        prompts=None,
        per_kind=3,
        tokens=128,
        temperature=0.0,
        rounds=1,
        fresh=False,
    )
    target = load(options.target)
    context, kinds = build_context(target), questions(target, options)
    names = options.methods.split(",") if options.methods else methods_for(options.target)
    names = ["plain", *names]
    plain = presets.methods()["plain"].config.build(context)
    rows = {one: (Row(), Row()) for one in names}
    sampling = Sampling(temperature=options.temperature)
    folder = None if options.fresh or options.smoke else paths.cache_dir() / "drafting"
    for _ in range(options.rounds):
        # Made anew: some methods remember the answers of the round before.
        store = ExperienceStore(folder, presets.priors())
        drafters = [build_drafter(presets.methods()[one].config, context, store) for one in names]
        for drafter in (plain, *drafters):
            ids = encode_question(target, WARM_UP)
            run(target, drafter, ids, ("", 0), Row(), sampling, 24)
        for kind, some in kinds.items():
            for index, ids in enumerate(some):
                for one, drafter in zip(names, drafters, strict=True):
                    turns = list(zip((drafter, plain), rows[one], strict=True))
                    texts = {
                        run(target, turn, ids, (kind, index), row, sampling, options.tokens)
                        for turn, row in (turns if index % 2 else turns[::-1])
                    }
                    rows[one][0].differ += sampling.greedy and len(texts) > 1
    speeds = sorted(row.rate for _, row in rows.values())
    print(
        f"{target.name} {target.dtype_name} on {target.device_name}, {sampling.words}, at most "
        f"{options.tokens} tokens for each of {sum(map(len, kinds.values()))} questions, "
        f"{options.rounds} rounds; plain {speeds[0]:.1f} to {speeds[-1]:.1f} tok/s"
    )
    show(rows, tuple(kinds))


def show(rows: Mapping[str, tuple[Row, Row]], kinds: Sequence[str]) -> None:
    """A line per method, of its runs and plain decoding's in turns with them."""
    print(f"  {'':26}{'all':>6}{'':14}" + "".join(f"{kind[:13]:>14}" for kind in kinds))
    for name, (row, plain) in rows.items():
        by_kind = [row.speedup(plain, kind) for kind in kinds]
        total = row.speedup(plain)
        predicted = statistics.median(row.predicted) if row.predicted else float("nan")
        print(
            f"  {name:26}{total.ratio:6.2f} ({total.interval})"
            + "".join(
                f"{one.ratio:13.2f}{'!' if one.high is not None and one.high < LEAST else ' '}"
                for one in by_kind
            )
            + f"  drafted {row.drafted / max(1, row.steps):.0%}, predicted {predicted:.2f}, "
            f"most lost {row.lost_ms:.0f} ms, {row.differ} texts differ"
        )


if __name__ == "__main__":
    main()
