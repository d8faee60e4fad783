"""The target tokens that a head drafts: all, those it was made for, or the most frequent ones.

Multiplying by the whole vocabulary is most of a small head's work, and almost all of its drafts are
among the most frequent tokens. The target verifies with its whole vocabulary, so only rare drafts
are lost. Source: arXiv:2502.14856 (FR-Spec), section 3.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from engine.drafters.texts import UNRANKED, rank_of
from engine.errors import DrafterError, first_line
from engine.kernels.cpu.operators import Matrix, NativeEmbedding, NativeLinear, packed_linear
from engine.model.checkpoints import local_file
from engine.model.files import read_json, read_pickle
from engine.model.logits import LogitTransform
from engine.model.packed import weight_of, weight_rows
from engine.model.target import Target

FILE = "draft_vocab.json"
"""Beside a head's weights: token ids, the most frequent first."""
DraftVocab = Annotated[
    int | None,
    Field(
        ge=16,
        le=1 << 20,
        title="Draft vocabulary",
        description="draft only this many of the most frequent tokens that the head's files list "
        "(FR-Spec); None = all of them, or the whole vocabulary if they list none",
    ),
]


class Vocabulary:
    """The tokens of a draft network's logits, in their order.

    Attributes:
        ids: `(size,)` int64, the target's id of each logit; None = all of its tokens.
        size: number of logits.
    """

    def __init__(self, ids: Tensor | None, vocab_size: int) -> None:
        """`vocab_size`: of the target."""
        self.ids, self._vocab_size = ids, vocab_size
        self.size = vocab_size if ids is None else len(ids)
        self._indices: Tensor | None = None
        if ids is not None:
            self._indices = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
            self._indices[ids] = torch.arange(len(ids), device=ids.device)

    @classmethod
    def beside(
        cls, location: str, target: Target, size: int | None, token_map: str | None = None
    ) -> Vocabulary:
        """The tokens listed in a file beside a head's weights; all tokens without such a file.

        Args:
            size: keep only the `size` most frequent; None = all.
            token_map: another file, as FR-Spec publishes them; by `local_file`.

        Raises DrafterError: a size without a file, or a file that does not list token ids.
        """
        path = Path(location).expanduser()
        file = (path if path.is_dir() else path.parent) / FILE
        if token_map is not None:
            file = local_file(token_map)
        elif not (path.exists() and file.exists()):
            if size is None:
                return cls(None, target.vocab_size)
            raise DrafterError(
                f"draft_vocab is {size}, but {location} has no {FILE} that says which tokens are "
                "the most frequent. Leave it empty, or train the head with this program."
            )
        try:
            is_json = file.suffix == ".json"
            values = read_json(file) if is_json else read_pickle(file, torch.device("cpu"))
            ids = torch.as_tensor(values, dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DrafterError(
                f"{file} must be a list of token ids: {first_line(error)}."
            ) from error
        inside = ids.ndim == 1 and len(ids) > 0 and 0 <= ids.min() <= ids.max() < target.vocab_size
        if not inside or len(ids.unique()) < len(ids):
            raise DrafterError(
                f"{file} must list different token ids below {target.vocab_size}, the target's "
                "vocabulary."
            )
        return cls(ids[:size].to(target.device), target.vocab_size)

    @property
    def key(self) -> str:
        """A short hash of the token ids."""
        if self.ids is None:
            return "all"
        return hashlib.sha256(self.ids.cpu().numpy().tobytes()).hexdigest()[:16]

    def index(self, tokens: Tensor) -> Tensor:
        """Ids of the target → indices of logits, −1 for those outside."""
        return tokens if self._indices is None else self._indices[tokens]

    def target_ids(self, indices: Tensor) -> Tensor:
        """Indices of logits → ids of the target."""
        return indices if self.ids is None else self.ids[indices]

    def rank_of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """As `texts.rank_of`, of tokens by the target's ids; `UNRANKED` for those outside."""
        indices = self.index(tokens)
        return torch.where(indices < 0, UNRANKED, rank_of(logits, indices.clamp_min(0)))

    def spread(self, probs: Tensor) -> Tensor:
        """Probabilities `(n, size)` → probabilities of all of the target's tokens `(n, vocab)`."""
        if self.ids is None:
            return probs
        return probs.new_zeros(len(probs), self._vocab_size).index_copy_(1, self.ids, probs)


class TokenEmbedding:
    """Embeddings `(n, hidden)` of tokens, unscaled, by a matrix that stays as the target holds it.

    Attributes:
        table: `(tokens, hidden)`, or the target's packed module.
    """

    def __init__(self, table: Tensor | NativeEmbedding) -> None:
        self.table = table

    @classmethod
    def of(cls, module: nn.Module) -> TokenEmbedding:
        """The target's."""
        return cls(module if isinstance(module, NativeEmbedding) else weight_of(module))

    def __call__(self, tokens: Tensor) -> Tensor:
        if isinstance(self.table, Tensor):
            return embedding(tokens, self.table)
        return self.table.rows(tokens)

    @property
    def device(self) -> torch.device:
        return self.table.device if isinstance(self.table, Tensor) else torch.device("cpu")

    @property
    def width(self) -> int:
        """Size of an embedding."""
        table = self.table
        return table.shape[1] if isinstance(table, Tensor) else table.embedding_dim

    @property
    def for_kernels(self) -> Tensor | Matrix | None:
        """The matrix, where the compiled kernels can read it."""
        if isinstance(self.table, NativeEmbedding):
            return self.table.matrix
        is_plain = isinstance(self.table, Tensor) and self.table.dtype == torch.bfloat16
        return self.table if is_plain else None


class DraftOutput:
    """Hidden vectors `(…, hidden)` → logits `(…, size)` of the tokens that are drafted.

    Attributes:
        transform: of the products with the output matrix.
        packed: the matrix in the kernels' format; None without kernels, and where its products are
            not the logits.
    """

    packed: NativeLinear | None

    def __init__(self, target: Target, vocabulary: Vocabulary | None = None) -> None:
        """`vocabulary`: None = all tokens."""
        self.vocabulary = vocabulary or Vocabulary(None, target.vocab_size)
        self._whole, self._part = target.output, torch.empty(0)
        head: nn.Module | None = target.lm_head
        self._bias: Tensor | None = getattr(head, "bias", None)
        if (ids := self.vocabulary.ids) is not None:
            self._part = weight_rows(target.lm_head, ids)
            self._bias = None if self._bias is None else weight_rows(target.lm_head, ids, "bias")
            head = packed_linear(self._part, self._bias, target.kernels)
        self.transform = LogitTransform.of(target.config)
        self._head = head if isinstance(head, NativeLinear) else None
        self.packed = self._head if self.transform.is_identity else None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.transform(self._products(hidden))

    def _products(self, hidden: Tensor) -> Tensor:
        if self.vocabulary.ids is None:
            return self._whole(hidden)
        if self._head is None:
            return linear(hidden, self._part, self._bias)
        rows = self._head.matrix.product(hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], self.vocabulary.size)
