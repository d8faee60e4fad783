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

from engine.checkpoints import read_checkpoint
from engine.corpus import Corpus, Entry
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.eagle_checkpoint import EagleCheckpoint
from engine.drafters.eagle_head import DraftHead
from engine.drafters.eagle_weights import load_eagle1, load_eagle3
from engine.errors import ConfigError
from engine.proposal import Needs
from engine.target import Target
from engine.training import eagle_layouts
from engine.training.packs import Pack, Teacher, frequent_tokens, project
from engine.training.recipe import TrainSettings
from engine.training.student import (
    Judged,
    Student,
    Vocabulary,
    count_hits,
    no_hits,
    soft_loss,
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
class _Lesson:
    """What a depth's outputs are to learn.

    Attributes:
        outputs: `(m, hidden)` float.
        entries: `(m,)` where they are in the pack.
        places: `(m,)` where these entries are in `pack.ahead(2)`.
    """

    outputs: Tensor
    entries: Tensor
    places: Tensor


def _lessons(
    head: DraftHead,
    fused: Tensor,
    pack: Pack,
    settings: EagleTraining | Eagle3Training,
    generator: torch.Generator | None,
) -> Iterator[_Lesson]:
    """The outputs of every depth that have something to learn."""
    ahead, count = pack.ahead(2), len(pack.tokens)
    places = torch.full((count + 1,), -1, dtype=torch.long, device=ahead.device)
    places[ahead] = torch.arange(len(ahead), device=ahead.device)
    starts = (places[1:] >= 0).nonzero()[:, 0]
    if generator is not None and settings.chain_share < 1:
        drawn = torch.rand(len(starts), generator=generator) < settings.chain_share
        starts = starts[drawn.to(starts.device)]
    for depth, (entries, out) in enumerate(unroll(head, fused, pack, settings.depths, starts)):
        place = places[entries]
        if depth:
            stays = (entries == starts + depth) & (pack.segments[entries] == pack.segments[starts])
            place = place.where(stays, -1)
        rows = (place >= 0).nonzero()[:, 0]
        yield _Lesson(out[rows].float(), entries[rows], place[rows])


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
        self._vocabulary = vocabulary

    def judge(self, pack: Pack, teacher: Teacher, generator: torch.Generator | None) -> Judged:
        settings, ids = self.settings, self._vocabulary.ids
        hits, rows = no_hits(settings.depths, pack.hidden.device)
        loss, scale = pack.hidden.new_zeros(()), pack.hidden.std()
        fused = self.head.fuse(pack.hidden)
        if generator is not None and settings.noise:
            draws = torch.rand(fused.shape, generator=generator).to(fused.device)
            fused = fused + (2 * draws - 1) * settings.noise * scale
        ahead = pack.ahead(2)
        theirs = teacher.logits(pack.hidden[ahead + 1], ids).softmax(dim=-1)
        wanted = self._vocabulary.place(pack.tokens[ahead + 2])
        lessons = _lessons(self.head, fused, pack, settings, generator)
        for depth, lesson in enumerate(lessons):
            outputs, count = lesson.outputs, len(lesson.places)
            goal = pack.hidden[lesson.entries + 1]
            wide = smooth_l1_loss(outputs / scale, goal / scale, reduction="sum")
            features = wide / max(1, outputs.numel())
            logits = project(self._target, outputs, ids)
            tokens = soft_loss(logits, theirs[lesson.places]) / max(1, count)
            both = settings.feature_weight * features + settings.token_weight * tokens
            loss = loss + settings.depth_decay**depth * both
            hits[depth], rows[depth] = count_hits(logits, wanted[lesson.places]), count
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
        self._vocabulary = vocabulary
        self._own = own

    def judge(self, pack: Pack, teacher: Teacher, generator: torch.Generator | None) -> Judged:
        assert pack.layers is not None
        settings = self.settings
        hits, rows = no_hits(settings.depths, pack.hidden.device)
        loss = pack.hidden.new_zeros(())
        ahead = pack.ahead(2)
        theirs = teacher.logits(pack.hidden[ahead + 1], self._vocabulary.ids).softmax(dim=-1)
        wanted = self._vocabulary.place(pack.tokens[ahead + 2])
        fused = self.head.fuse(pack.layers).float()
        lessons = _lessons(self.head, fused, pack, settings, generator)
        for depth, lesson in enumerate(lessons):
            logits, count = self._logits(lesson.outputs), len(lesson.places)
            known = wanted[lesson.places] >= 0
            # Where the true token cannot be drafted, what is left of the distribution misleads.
            tokens = soft_loss(logits[known], theirs[lesson.places][known]) / max(1, count)
            loss = loss + settings.depth_decay**depth * tokens
            hits[depth], rows[depth] = count_hits(logits, wanted[lesson.places]), count
        return Judged(loss, hits, rows)

    def _logits(self, outputs: Tensor) -> Tensor:
        if self._own:
            return self.head.logits(outputs)
        return project(self._target, self.head.norm(outputs), self._vocabulary.ids)

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
        ids = self._vocabulary.ids if self._own else None
        eagle_layouts.save_eagle3(self.head, self._target, ids, folder, dtype)

    def describe(self) -> dict[str, object]:
        return {
            "layers": 1,
            "draft vocabulary": self.head.draft_vocab_size,
            "output": "its own" if self._own else "shares the target's lm_head",
            "layers read (inputs of)": list(self.needs.layers),
            "depths": self.settings.depths,
        }
