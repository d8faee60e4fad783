"""A text's log: its committed tokens, and the target's features of their rows.

The decode loop writes it. Drafting sessions read it when they draft, each from its own cursor:

    tokens    p0 p1 p2 | r  a  b  x         prompt, then committed; the last one is the root
    rows       0  1  2   3  4  5            computed by the target: all but the root's
    features  f0 f1 f2  f3 f4 f5            what `Needs` asks for; f5 is what predicted x
    cursor             ^ 3                  its reader has rows 0 … 2

Rejected rows are never in it. Rows that every reader has read are dropped, but for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.proposal import Needs, Outcome, SharedRows, TargetOutput
from engine.tree import upload

MAX_LOGITS = 1 << 24
"""The most numbers of the logits that are kept; those of older rows are dropped."""


@dataclass(slots=True, eq=False)
class Cursor:
    """A reader's place: the first row whose features it has not read."""

    row: int = 0


class FeatureLog:
    """One text's log.

    Attributes:
        tokens: prompt, then committed; the last one is the root, as soon as there is one.
        num_prompt: tokens of the prompt.
        num_cached: prompt tokens that were in the target's cache; None = no prefix caching, and
            drafters read the whole prompt, too.
        prompt_logits: `(1, vocab)` of the prompt's last row; None before it was read.
        shared: keys and values of the layers in `Needs.shared`.
    """

    prompt_logits: Tensor | None = None

    def __init__(
        self,
        prompt_ids: Sequence[int],
        needs: Needs,
        device: torch.device,
        *,
        num_cached: int | None = None,
        keeps_all: bool = False,
    ) -> None:
        """`keeps_all`: rows are never dropped."""
        self.tokens = list(prompt_ids)
        self.num_prompt, self.num_cached = len(prompt_ids), num_cached
        self.shared: tuple[SharedRows, ...] = ()
        self._needs, self._device, self._keeps_all = needs, device, keeps_all
        self._cursors: list[Cursor] = []
        self._parts: list[TargetOutput] = []
        self._first = self._end = 0
        self._logits: list[Tensor] = []

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt]

    # ---- what the loop writes

    def read_prompt(self, output: TargetOutput) -> None:
        """Add the next rows of the prompt: of a forward, or restored from a prefix cache."""
        self.prompt_logits = output.logits[-1:]
        self._logits = [self.prompt_logits]
        self._add(output)

    def begin(self, root: int) -> None:
        """The first token behind the prompt, which was read."""
        self.tokens.append(root)

    def commit(self, outcome: Outcome) -> None:
        """Add a step: its accepted rows and its committed tokens."""
        self.tokens.extend(outcome.committed)
        output = outcome.output
        if self._needs.logits:
            self._logits.append(output.at(outcome.path).logits)
            while sum(part.numel() for part in self._logits[:-1]) > MAX_LOGITS:
                del self._logits[0]
        self._add(output, outcome.path)

    def _add(self, output: TargetOutput, path: Sequence[int] | None = None) -> None:
        """Add rows of a forward; None = all of them."""
        if self._needs.shared:
            self.shared = output.shared
        if not self._needs.has_features:
            return
        features = output.features
        if path is not None and len(path) < features.num_feature_rows:
            features = features.at(path)
        self._parts.append(features)
        self._end += features.num_feature_rows
        if self._keeps_all:
            return
        least = min((cursor.row for cursor in self._cursors), default=self._end)
        while len(self._parts) > 1 and self._first + self._parts[0].num_feature_rows <= least:
            self._first += self._parts.pop(0).num_feature_rows

    # ---- what sessions read

    def open_cursor(self) -> Cursor:
        """A new reader's place, at the beginning."""
        cursor = Cursor()
        self._cursors.append(cursor)
        return cursor

    def unread(self, cursor: Cursor) -> tuple[Tensor, Tensor]:
        """Features `(n, width)` from the cursor on, and the token after each row `(n,)`.

        The cursor stays: who has read the rows moves it.
        """
        features = features_of(self.rows(cursor.row))
        tokens = torch.tensor(self.tokens[cursor.row + 1 :])
        return features, upload(tokens, self._device)

    def rows(self, begin: int = 0) -> TargetOutput:
        """Features of the rows from this one on."""
        first, parts = self._end, list[TargetOutput]()
        while first > begin:
            part = self._parts[-1 - len(parts)]
            first -= part.num_feature_rows
            parts.append(part)
        joined = parts[0] if len(parts) == 1 else TargetOutput.joined(parts[::-1])
        return joined if first == begin else joined.at(slice(begin - first, None))

    def last_row(self) -> Tensor:
        """Features `(1, width)` of the row that predicted the root."""
        return features_of(self._parts[-1])[-1:]

    def take_logits(self) -> Tensor:
        """Logits `(n, vocab)` of the last rows: at first the prompt's last one, later those of all
        tokens committed since they were taken. For one reader."""
        logits, self._logits = torch.cat(self._logits), []
        return logits


def features_of(output: TargetOutput) -> Tensor:
    """The features `(rows, width)` that a drafter asked for."""
    features = output.hidden if output.layers is None else output.layers
    assert features is not None, "the drafter needs no features"
    return features
