"""Measures a trained drafter by really decoding with it, on prompts that it was not trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import Limits
from engine.decode import decode
from engine.drafters.base import Workbench
from engine.drafters.method import MethodConfig
from engine.metrics import Tally
from engine.model.corpus import Corpus, Entry
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.training.dialogue import Frame, GivenPrompt
from engine.tuning.build import build_drafter


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to decode from."""

    category: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Acceptance on some prompts.

    Attributes:
        mat: 1 + accepted draft tokens / steps.
        num_tokens: new tokens behind it.
    """

    mat: float
    num_prompts: int
    num_tokens: int
    num_steps: int
    num_accepted: int


def held_out_questions(
    corpus: Corpus, entries: Sequence[Entry], per_category: int, room: int
) -> list[Question]:
    """The first turns of held-out dialogues, up to `per_category` of each category.

    Args:
        room: tokens that a prompt must leave in the longest text of the corpus.
    """
    taken: dict[str, list[Question]] = defaultdict(list)
    longest = corpus.manifest["settings"]["max_len"]
    for entry in sorted(entries, key=lambda e: e.number):
        if not entry.spans or len(taken[entry.category]) >= per_category:
            continue
        start = entry.spans[0][0]
        if 0 < start <= longest - min(room, longest // 2):
            ids = tuple(int(i) for i in corpus.tokens(entry)[:start])
            taken[entry.category].append(Question(entry.category, ids))
    return [question for category in sorted(taken) for question in taken[category]]


def given_questions(target: Target, prompts: Sequence[GivenPrompt]) -> list[Question]:
    """First turns of a file's prompts, framed by the chat template."""
    frame = Frame.of(target)
    return [
        Question(prompt.category, tuple(_encode(target, frame, prompt.turns[0])))
        for prompt in prompts
    ]


def _encode(target: Target, frame: Frame, turn: str) -> list[int]:
    if not frame.to_answer:
        return target.encode(turn)
    return target.encode_chat([{"role": "user", "content": turn}])


def score(
    target: Target,
    config: MethodConfig,
    questions: Sequence[Question],
    *,
    max_new_tokens: int = 128,
    cache_dir: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Score]:
    """Greedy acceptance per category, and overall under "overall".

    Args:
        cache_dir: where weights are kept if the drafter needs another model.
        progress: told how many prompts are done.

    Raises:
        DrafterError: the drafter does not fit the target.
    """
    companions: list[Target] = []

    def load(spec: TargetSpec) -> Target:
        device, dtype = str(target.device), target.companion_dtype
        companions.append(load_target(spec, dtype=dtype, device=device, cache_dir=cache_dir))
        return companions[-1]

    drafter = build_drafter(config, Workbench(target, TargetSpec.of_path_or_hub, load))
    limits = Limits(max_new_tokens=max_new_tokens)
    counted: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    try:
        for done, question in enumerate(questions, start=1):
            tally = Tally()
            for record in decode(target, drafter, question.prompt_ids, limits=limits):
                tally.add(record)
            metrics = tally.metrics
            counts = (metrics.num_new_tokens, metrics.num_steps, metrics.num_accepted)
            counted[question.category].append(counts)
            progress(done)
    finally:
        drafter.close()
        for companion in companions:
            companion.close()
    everything = [counts for category in counted.values() for counts in category]
    return {
        **{category: _score(counted[category]) for category in sorted(counted)},
        "overall": _score(everything),
    }


def _score(counts: Sequence[tuple[int, int, int]]) -> Score:
    tokens, steps, accepted = (sum(column) for column in zip(*counts, strict=True))
    mat = 1 + accepted / steps if steps else 1.0
    return Score(mat, len(counts), tokens, steps, accepted)


def lines(scores: dict[str, Score]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| category | MAT | new tokens | prompts |"
    yield "|---|---|---|---|"
    for category, one in scores.items():
        yield f"| {category} | {one.mat:.2f} | {one.num_tokens} | {one.num_prompts} |"
