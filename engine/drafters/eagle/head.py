"""EAGLE's draft network: one Llama-style layer that continues the target's features.

Entry j joins what the target saw at position j with the token that followed it, `(feature f_j,
token t_j+1)`, and predicts the token after that. To look further ahead the layer is fed its own
output in place of a feature:

    base entries   (f_0, t_1) (f_1, t_2) … (f_N-1, root)    the target's features; they stay cached
    tree entries   (output of its parent's entry, token)    one per expanded draft node; transient

A tree entry of depth d sits at position N + d - 1 and sees all base entries, its expanded ancestors
and itself. Sources: arXiv:2401.15077, section 3; arXiv:2503.01840, section 3.1.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.drafters.heads.layer import HeadCache, HeadLayer, HeadSpec, Past, within
from engine.drafters.heads.vocabulary import DraftOutput, TokenEmbedding, Vocabulary
from engine.kernels.cpu.decoder import Decoder, DecoderWeights, Factors, HeadInput
from engine.kernels.cpu.operators import NativeLinear, pack_linears


class DraftHead(nn.Module):
    """The base of EAGLE-1/2 and EAGLE-3 heads.

    The target's embedding and output matrices are no parameters of this module, so training and
    saving a head leave them alone.
    """

    layer: HeadLayer
    embedding: TokenEmbedding
    vocabulary: Vocabulary
    decoder: Decoder | None = None
    feeds_normed = False
    """Whether an output is normalised before the next depth is fed with it."""
    packed_bits = 8
    """Of the weights that compiled kernels read."""

    def use_kernels(self, kernels: ctypes.CDLL | None) -> None:
        """Let compiled kernels run it, one call per level of the draft, if they can.

        Args:
            kernels: as `Target.kernels`; None = change nothing.
        """
        pack_linears(self, kernels, bits=self.packed_bits)
        if kernels is not None:
            parts = self.parts()
            self.decoder = None if parts is None else Decoder(kernels, parts)

    @abstractmethod
    def parts(self) -> DecoderWeights | None:
        """The weights for the kernels, once its matrices are packed; None if they cannot run it."""

    def _parts(
        self, head_input: HeadInput, *, norm: Tensor | None, lm_head: Any
    ) -> DecoderWeights | None:
        layer, spec, embedding = self.layer.packed(), self.layer.spec, self.embedding.for_kernels
        if layer is None or embedding is None or not isinstance(lm_head, NativeLinear):
            return None
        return DecoderWeights(
            layers=[layer],
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            eps=spec.eps,
            factors=Factors(query=spec.head_dim**-0.5, embedding=1.0, residual=1.0, logits=1.0),
            norm=norm,
            embedding=embedding,
            lm_head=lm_head.matrix,
            vocab=self.vocabulary.size,
            rotary=self.layer.rotary,
            rotary_dim=spec.head_dim,
            head_input=head_input,
        )

    def fuse(self, features: Tensor) -> Tensor:
        """Target features `(n, feature width)` → the hidden vectors of entries."""
        return features

    @abstractmethod
    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden vectors and embedded tokens, `(n, hidden)` each → the layer's input, residual."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """`(n, hidden)` → `(n, draft vocabulary)`."""

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        past: Past,
        mask: Tensor | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Outputs `(n, hidden)` of n entries; other arguments as `HeadLayer.forward`.

        Args:
            hidden: `(n, hidden)`, fused features or earlier outputs.
            last_only: all entries leave keys and values, but only the last one gets an output.
        """
        embedded = self.embedding(tokens).to(hidden.dtype)
        x, residual = self.join(hidden, embedded)
        if last_only:
            residual = residual[-1:]
        out: Tensor = self.layer(x, residual, positions, past, mask)
        return out

    def predict(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        past: HeadCache,
        visible: Tensor | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Outputs `(m, hidden)` of n entries and their logits `(m, draft vocabulary)`.

        Args:
            positions: `(n,)`.
            visible: `(n, w)` bool, which of the last w rows each entry sees, the new ones included,
                beside all earlier ones; None = all before it.
            last_only: all entries leave keys and values, but only the last one is wanted: m = 1.
        """
        if self.decoder is None:
            mask = self._mask(len(tokens), past.length, visible, last_only=last_only)
            out: Tensor = self(hidden, tokens, positions, past, mask, last_only=last_only)
            return out, self.logits(out)
        past.reserve(len(tokens))
        num_outputs, slots = 1 if last_only else len(tokens), self.decoder.behind(past, visible)
        result = self.decoder.run(
            tokens, positions, slots, states=hidden, taps=(1,), num_logits=num_outputs
        )
        outputs = result.hidden if self.feeds_normed else result.layers
        assert outputs is not None
        return outputs[-num_outputs:], result.logits

    def _mask(
        self, count: int, length: int, visible: Tensor | None, *, last_only: bool
    ) -> Tensor | None:
        """Rows that `count` entries behind `length` rows see, `(m, rows)`; None = all before."""
        window = self.layer.spec.window
        if window is None and (last_only or visible is None):
            return None
        if visible is None:
            device = self.embedding.device
            visible = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        earlier = length + count - visible.shape[1]
        visible = torch.cat([visible.new_ones(count, earlier), visible], dim=1)
        return within(visible[-1:] if last_only else visible, window)


class Eagle1Head(DraftHead):
    """EAGLE-1 and EAGLE-2: embedding and feature are merged by one linear layer.

    The output approximates the target's next feature, so the target's own `lm_head` reads it.
    """

    def __init__(self, spec: HeadSpec, lm_head: DraftOutput, *, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * spec.hidden, spec.hidden, bias=bias)
        self.layer = HeadLayer(spec, spec.hidden)
        self.vocabulary = lm_head.vocabulary
        self._lm_head = lm_head

    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        return x, x

    def logits(self, outputs: Tensor) -> Tensor:
        return self._lm_head(outputs)

    def parts(self) -> DecoderWeights | None:
        if not isinstance(self.fc, NativeLinear):
            return None
        head_input = HeadInput(fusion=self.fc.matrix)
        return self._parts(head_input, norm=None, lm_head=self._lm_head.packed)


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """How an EAGLE-3 head fuses features and where it normalises.

    Attributes:
        num_features: captured layers; 0 = the target's last hidden state takes their place.
        feature_width: width of one captured layer of the target.
        norm_before_residual: the residual is the normed hidden vector (`speculators`' default).
        norm_before_fc: one norm over all captured layers before they are fused.
        norm_each_feature: a norm per captured layer before they are fused.
        norm_output: the normed output is what the next depth is fed (EAGLE-3.1).
        others: further layers (P-EAGLE).
    """

    layer: HeadSpec
    num_features: int
    feature_width: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_feature: bool = False
    norm_output: bool = False
    others: tuple[HeadSpec, ...] = ()


class Eagle3Head(DraftHead):
    """EAGLE-3: several layers' features fused, own norm and output matrix, own vocabulary."""

    aliases: Mapping[str, str] = {n: f"layers.0.{n}" for n in ("hidden_norm", "input_layernorm")}
    packed_bits = 4
    """4 bits cost the shipped heads 0.3% of MAT (EAGLE-2 would lose 2.4%) and halve the reading."""
    max_layers: ClassVar[int] = 1

    def __init__(self, spec: Eagle3Spec, lm_head: DraftOutput | None) -> None:
        """`lm_head`: the target's; None = the head has one of its own."""
        super().__init__()
        layer, width = spec.layer, spec.num_features * spec.feature_width
        self.spec, self.feeds_normed = spec, spec.norm_output
        self.vocabulary = Vocabulary(None, spec.draft_vocab_size)
        if spec.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=layer.eps)
        if spec.norm_each_feature:
            norms = (
                nn.RMSNorm(spec.feature_width, eps=layer.eps) for _ in range(spec.num_features)
            )
            self.fc_norm = nn.ModuleList(norms)
        if spec.num_features:
            self.fc = nn.Linear(width, layer.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self.input_layernorm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self.layer = HeadLayer(layer, 2 * layer.hidden)
        self.norm = nn.RMSNorm(layer.hidden, eps=layer.eps)
        self._shared = lm_head
        if lm_head is None:
            self.lm_head = nn.Linear(layer.hidden, spec.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        if not self.spec.num_features:
            return features
        if self.spec.norm_before_fc:
            features = self.input_norm(features)
        if self.spec.norm_each_feature:
            parts = features.chunk(self.spec.num_features, dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self.spec.norm_before_residual else hidden

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out = super().forward(*args, **options)
        return self.norm(out) if self.spec.norm_output else out

    def logits(self, outputs: Tensor) -> Tensor:
        lm_head = self._shared or self.lm_head
        logits: Tensor = lm_head(outputs if self.spec.norm_output else self.norm(outputs))
        return logits

    def parts(self) -> DecoderWeights | None:
        head_input = HeadInput(
            embedding_norm=self.input_layernorm.weight.detach().float(),
            hidden_norm=self.hidden_norm.weight.detach().float(),
            normed_input=self.spec.norm_before_residual,
        )
        lm_head = self._shared.packed if self._shared else self.lm_head
        return self._parts(head_input, norm=self.norm.weight.detach().float(), lm_head=lm_head)


class HeadEntries:
    """A text's entries in a head: base entries that stay, tree entries that do not.

    Attributes:
        output: `(1, hidden)`, the output of the last base entry: it predicts the children of the
            root.
        logits: `(1, draft vocab)` of those children.
    """

    output: Tensor
    logits: Tensor

    def __init__(self, head: DraftHead, cache: HeadCache) -> None:
        """`cache`: base entries; more are added."""
        self.head, self.vocabulary = head, head.vocabulary
        self._cache, self._num_base = cache, cache.length

    def feed_base(self, features: Tensor, tokens: Tensor) -> None:
        """Add base entries and forget the tree of the last step.

        Only keys and values of a base entry outlive it, and of the outputs only the last one is
        ever read.

        Args:
            features: `(n, width)` of the target; `tokens (n,)` follow them, the last is the root.
        """
        cache, head = self._cache, self.head
        begin, end = self._num_base, self._num_base + len(tokens)
        cache.truncate(begin)
        positions = torch.arange(begin, end, device=tokens.device)
        fused = head.fuse(features)
        self.output, self.logits = head.predict(fused, tokens, positions, cache, last_only=True)
        self._num_base = cache.length = end

    def chain(
        self, features: Tensor, tokens: Tensor, levels: int, min_prob: float
    ) -> tuple[Tensor, Tensor] | None:
        """`feed_base`, and a greedy chain of drafts behind it, in one call of the kernels.

        Args:
            levels: most tokens; fewer where the path is less probable than `min_prob`.

        Returns:
            Drafted tokens `(m,)` and their log-probs; None, and nothing was done: no kernels.
        """
        head, decoder, cache = self.head, self.head.decoder, self._cache
        if decoder is None:
            return None
        begin = self._num_base
        cache.truncate(begin)
        cache.reserve(len(tokens) + levels)
        drafts = decoder.chain(
            tokens,
            decoder.behind(cache),
            levels=levels,
            min_prob=min_prob,
            states=head.fuse(features),
            feeds_normed=head.feeds_normed,
            ids=head.vocabulary.ids,
        )
        self._num_base = cache.length = begin + len(tokens)
        return drafts

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs `(n, hidden)` of n tree entries of one depth, and logits of their children.

        Args:
            hidden: `(n, hidden)` output of the entry that each node's token was predicted from.
            ancestors: `(n, m)` bool over the m tree entries fed since the last base entry, these n
                last: who is an ancestor of, or is, each of the n. None for a chain, which has only
                ancestors.
        """
        positions = torch.full_like(tokens, self._num_base + depth - 1)
        outputs = self.head.predict(hidden, tokens, positions, self._cache, ancestors)
        self._cache.length += len(tokens)
        return outputs
