"""Trains EAGLE heads by the drafter's own forward, fed its own outputs over several depths.

Sources: arXiv:2401.15077, section 4 (features and tokens, noise); arXiv:2408.15766 (several depths
for EAGLE-1/2); arXiv:2503.01840, section 3.2 (training-time test).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.eagle_checkpoint import EagleCheckpoint
from engine.drafters.eagle_head import DraftHead
from engine.drafters.eagle_weights import load_eagle1, load_eagle3
from engine.errors import ConfigError
from engine.model.checkpoints import read_checkpoint
from engine.model.corpus import Corpus, Entry
from engine.model.target import Target
from engine.proposal import Needs
from engine.training import eagle_layouts
from engine.training.packs import Pack, frequent_tokens
from engine.training.recipe import TrainSettings
from engine.training.student import (
    HITS_SAMPLE,
    Judged,
    Lesson,
    Output,
    Student,
    Vocabulary,
    fill_up,
    no_hits,
)
from engine.training.unroll import unroll


class _EagleTraining(TrainSettings):
    depth_decay: float = Field(
        0.8, gt=0.0, le=1.0, description="weight of a depth's loss relative to the one before it"
    )
    chain_share: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="share of positions that are unrolled beyond the first depth; less is faster",
    )
    intermediate_size: int | None = Field(
        None, ge=1, le=1 << 17, description="width of the head's MLP; None = as the target's"
    )
    levels: int = Field(6, ge=1, le=32, description="drafted levels when evaluating")
    total_tokens: int = Field(59, ge=1, le=1024, description="drafted nodes when evaluating")
    top_k: int = Field(10, ge=1, le=64, description="children per node when evaluating")


class EagleTraining(_EagleTraining):
    """An EAGLE-1 head, which serves EAGLE-2 as well."""

    method: ClassVar[str] = "eagle"
    paper: ClassVar[str] = "2401.15077, 2406.16858, 2408.15766"

    depths: int = Field(
        3, ge=1, le=16, description="depths unrolled in training; 1 = EAGLE-1's own recipe"
    )
    feature_weight: float = Field(1.0, ge=0.0, le=100.0, description="weight of the feature loss")
    token_weight: float = Field(0.1, ge=0.0, le=100.0, description="weight of the token loss")
    noise: float = Field(
        0.1, ge=0.0, le=10.0, description="noise on features, ± so many standard deviations"
    )

    def student(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Student:
        return EagleStudent(self, target, self.vocabulary(target, corpus, entries))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> EagleConfig:
        return EagleConfig(
            speculative_model=str(folder),
            use_dynamic_tree=True,
            max_draft_len=self.levels,
            max_total_draft_tokens=self.total_tokens,
            dynamic_tree_max_topK=self.top_k,
        )


class Eagle3Training(_EagleTraining):
    """An EAGLE-3 head."""

    method: ClassVar[str] = "eagle3"
    paper: ClassVar[str] = "2503.01840"

    depths: int = Field(6, ge=1, le=16, description="depths of the training-time test")
    draft_vocab: int | None = Field(
        8192,
        ge=16,
        le=1 << 20,
        description="tokens it can draft, the corpus's most frequent; None = all, by the target's "
        "lm_head",
    )

    def student(self, target: Target, corpus: Corpus, entries: Sequence[Entry]) -> Student:
        if target.num_layers < 7:
            raise ConfigError(
                "EAGLE-3 reads three different layers, for which the target needs at least 7, but "
                f"{target.name} has {target.num_layers}. Train the method eagle for it."
            )
        if self.draft_vocab is None or self.draft_vocab >= target.vocab_size:
            return Eagle3Student(self, target, self.vocabulary(target, corpus, entries), own=False)
        ids = self._begun(target)
        if ids is None:
            ids = frequent_tokens(corpus, entries, self.draft_vocab, target.vocab_size)
        own = Vocabulary(ids.to(target.device), target.vocab_size)
        return Eagle3Student(self, target, own, own=True)

    def _begun(self, target: Target) -> Tensor | None:
        """The tokens that the drafter to go on from can draft, if it has its own vocabulary."""
        if self.begin_with is None:
            return None
        theirs, _ = load_eagle3(EagleCheckpoint(read_checkpoint(self.begin_with)), target)
        if theirs.d2t is None:
            return None
        return theirs.target_ids(torch.arange(theirs.draft_vocab_size, device=theirs.d2t.device))

    def decoding(self, folder: Path, rates: Sequence[Sequence[float]]) -> Eagle3Config:
        return Eagle3Config(
            speculative_model=str(folder),
            use_dynamic_tree=True,
            max_draft_len=self.levels,
            max_total_draft_tokens=self.total_tokens,
            dynamic_tree_max_topK=self.top_k,
        )


@dataclass(frozen=True, slots=True)
class _Depth:
    """A depth's outputs that have something to learn.

    Attributes:
        outputs: `(m, hidden)` float.
        entries: `(m,)` where they are in the pack.
        count: so many count; those behind them only fill up.
    """

    outputs: Tensor
    entries: Tensor
    count: int


def _depths(
    head: DraftHead,
    fused: Tensor,
    pack: Pack,
    settings: EagleTraining | Eagle3Training,
    generator: torch.Generator | None,
) -> Iterator[_Depth]:
    """The head's outputs, depth by depth.

    When training with fewer chains, they start in some of the dialogues, everywhere in these: few
    dialogues are read faster than few rows of each.
    """
    ahead, count = pack.ahead(2), len(pack.tokens)
    teaches = torch.zeros(count, dtype=torch.bool, device=ahead.device)
    teaches[ahead] = True
    starts = ahead
    if generator is not None and settings.chain_share < 1:
        starts = _some(starts, pack.segments, settings.chain_share, generator)
    chains = fill_up(starts)
    for depth, (entries, out) in enumerate(unroll(head, fused, pack, settings.depths, chains)):
        taught = teaches[entries]
        if depth:
            inside = starts + depth < count
            taught = taught[: len(starts)] & inside
            taught &= pack.segments[entries[: len(starts)]] == pack.segments[starts]
        rows = taught.nonzero()[:, 0]
        padded = fill_up(rows)
        yield _Depth(out[padded], entries[padded], len(rows))


def _some(starts: Tensor, segments: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Those of whole dialogues, drawn until they have about that share of all."""
    numbers, counts = segments[starts].unique(return_counts=True)
    order = torch.randperm(len(numbers), generator=generator).to(numbers.device)
    before = counts[order].cumsum(0) - counts[order]
    # The one that crosses the mark is taken as often as keeps the share right on average.
    left = share * len(starts) - before
    drawn = torch.rand(len(numbers), generator=generator).to(left.device)
    taken = numbers[order][left / counts[order] > drawn]
    return starts[torch.isin(segments[starts], taken)]


class EagleStudent(Student):
    """Learns the target's next feature, and through it the next token."""

    needs = Needs(hidden=True)

    def __init__(self, settings: EagleTraining, target: Target, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.settings = settings
        self.head = eagle_layouts.fresh_eagle1(target, settings.intermediate_size)
        # Its output is the layer's residual, which autocast would leave in bfloat16.
        self.head.fc.register_forward_hook(lambda module, args, out: out.float())
        self._target = target
        self.vocabulary = vocabulary
        self._output = Output.of(target, vocabulary.ids)

    def judge(self, pack: Pack, generator: torch.Generator | None) -> Judged:
        settings = self.settings
        hits, rows = no_hits(settings.depths, pack.hidden.device)
        loss, scale = pack.hidden.new_zeros(()), pack.hidden[: pack.length].std()
        fused = self.head.fuse(pack.hidden)
        if generator is not None and settings.noise:
            draws = torch.rand(fused.shape, generator=generator).to(fused.device)
            fused = fused + (2 * draws - 1) * settings.noise * scale
        sample = None if generator is None else HITS_SAMPLE
        for depth, found in enumerate(_depths(self.head, fused, pack, settings, generator)):
            outputs, count = found.outputs.float(), found.count
            goal = pack.hidden[found.entries + 1]
            near, far = outputs[:count] / scale, goal[:count] / scale
            wide = smooth_l1_loss(near, far, reduction="sum") / max(1, near.numel())
            wanted = self.vocabulary.place(pack.tokens[found.entries + 2])
            theirs = pack.likely[found.entries + 1]
            lesson = Lesson(outputs, self._output, theirs, wanted, count)
            tokens, hits[depth], rows[depth] = lesson.judge(sample=sample)
            both = settings.feature_weight * wide + settings.token_weight * tokens / max(1, count)
            loss = loss + settings.depth_decay**depth * both
        return Judged(loss, hits, rows)

    def load(self, folder: Path) -> None:
        found = EagleCheckpoint(read_checkpoint(str(folder)))
        self.head.load_state_dict(load_eagle1(found, self._target).state_dict())

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        eagle_layouts.save_eagle1(self.head, self._target, folder, dtype)

    def describe(self) -> dict[str, object]:
        return {"layers": 1, "embedding": "the target's", "depths": self.settings.depths}


class Eagle3Student(Student):
    """Learns the target's distribution over its own vocabulary, or over the target's."""

    def __init__(
        self, settings: Eagle3Training, target: Target, vocabulary: Vocabulary, *, own: bool
    ) -> None:
        """Args: own: whether `vocabulary` is the drafter's, with an output matrix of its own."""
        super().__init__()
        self.settings = settings
        count = target.num_layers
        self.needs = Needs(hidden=True, layers=(2, count // 2, count - 3))
        self.head = eagle_layouts.fresh_eagle3(
            target, vocabulary.ids if own else None, settings.intermediate_size
        )
        self._target = target
        self.vocabulary = vocabulary
        self._own = own
        self._shared = None if own else Output.of(target, vocabulary.ids)

    def judge(self, pack: Pack, generator: torch.Generator | None) -> Judged:
        assert pack.layers is not None
        settings = self.settings
        hits, rows = no_hits(settings.depths, pack.hidden.device)
        loss = pack.hidden.new_zeros(())
        fused = self.head.fuse(pack.layers).float()
        output = self._shared or Output(self.head.lm_head.weight)
        sample = None if generator is None else HITS_SAMPLE
        for depth, found in enumerate(_depths(self.head, fused, pack, settings, generator)):
            wanted = self.vocabulary.place(pack.tokens[found.entries + 2])
            # Where the true token cannot be drafted, what is left of the distribution misleads.
            theirs = pack.likely[found.entries + 1].weighted((wanted >= 0).float())
            normed = self.head.norm(found.outputs.float())
            lesson = Lesson(normed, output, theirs, wanted, found.count)
            tokens, hits[depth], rows[depth] = lesson.judge(sample=sample)
            loss = loss + settings.depth_decay**depth * tokens / max(1, found.count)
        return Judged(loss, hits, rows)

    def load(self, folder: Path) -> None:
        """Raises ConfigError besides: it reads other layers of the target."""
        theirs, layers = load_eagle3(EagleCheckpoint(read_checkpoint(str(folder))), self._target)
        if layers != self.needs.layers:
            raise ConfigError(
                f"{folder} reads layers {layers}, but this training shows {self.needs.layers}. "
                "Leave begin_with out."
            )
        state = {k: v for k, v in theirs.state_dict().items() if k != "d2t"}
        self.head.load_state_dict(state)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        ids = self.vocabulary.ids if self._own else None
        eagle_layouts.save_eagle3(self.head, self._target, ids, folder, dtype)

    def describe(self) -> dict[str, object]:
        return {
            "layers": 1,
            "draft vocabulary": self.head.draft_vocab_size,
            "output": "its own" if self._own else "shares the target's lm_head",
            "layers read (inputs of)": list(self.needs.layers),
            "depths": self.settings.depths,
        }
