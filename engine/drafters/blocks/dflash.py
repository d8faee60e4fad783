"""DFlash: a small block-diffusion model fills a whole block of draft tokens in one forward.

The draft model sees the target's hidden states of some layers as its context (keys and values of
every committed position), and a block of embeddings: the root's, then mask tokens. All rows of the
block look at each other and at the context; row i predicts the token i places after the root.

    context  h0 h1 h2 … hn-1      kept in the cache, computed once per position
    block    root mask mask mask  dropped after the draft
    drafts        d1   d2   d3    by the target's lm_head at each mask: a chain, or a tree

Source: arXiv:2602.06036, section 4; z-lab/dflash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.config import setting
from engine.drafters.base import BuildContext, root_only
from engine.drafters.blocks.base import BlockMethod
from engine.drafters.eagle.checkpoint import draft_vocabulary, own_embedding
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.features import FeatureDrafter
from engine.drafters.heads.layer import HeadCache, HeadLayer, HeadSpec
from engine.drafters.heads.output import DraftOutput
from engine.drafters.method import draft_len
from engine.errors import DrafterError
from engine.kernels.cpu.operators import pack_linears
from engine.model.kinds import FULL, SLIDING
from engine.model.target import Target
from engine.proposal import Needs, Proposal

OF_TRANSFORMERS = "muse_glimmer_assistant"
"""Type of the one such model that transformers itself has, whose windows are its own."""
_Setting = TypeVar("_Setting")


class FeatureBlockMethod(BlockMethod):
    """What methods share whose block model reads hidden states of the target."""

    main_settings: ClassVar[str] = "size max_draft_len use_dynamic_tree"

    speculative_model: str | None = setting(
        None, "Block model", "the draft model of this target: folder or hub id"
    )
    max_draft_len: int | None = draft_len(None, "; None = the whole block")
    target_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Target layers",
        "target layers to read; None = what the checkpoint says",
        strict=False,
    )


class DFlashConfig(FeatureBlockMethod):
    """Settings of DFlash; named as in TensorRT-LLM."""

    title: ClassVar[str] = "DFlash"
    summary: ClassVar[str] = (
        "A small block-diffusion model reads the target's hidden states and drafts a whole block "
        "in one forward."
    )
    paper: ClassVar[str | None] = "2602.06036"

    decoding_type: Literal["DFlash"] = "DFlash"

    def build(self, context: BuildContext) -> DFlashDrafter:
        found = HeadCheckpoint.read(context.weights(self.speculative_model, "the DFlash model"))
        return DFlashDrafter(context, self, found)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block model.

    Attributes:
        layers: what each layer is.
        num_features: layers of the target that are read.
        num_outputs: rows of an output matrix of its own; None = the target's.
    """

    layers: tuple[HeadSpec, ...]
    num_features: int
    num_outputs: int | None = None

    @property
    def spec(self) -> HeadSpec:
        return self.layers[0]


def layers_of(found: HeadCheckpoint, target: Target) -> tuple[HeadSpec, ...]:
    """What a checkpoint says of each layer; DrafterError for layers that no such model has.

    Layers of the type sliding_attention are causal and others are not, unless the config says
    otherwise; `use_swa` gives the others windows alone. As vLLM's qwen3_dflash.py reads it.
    """
    config, spec = found.config, found.layer_spec(target.hidden_size)
    count = found.stated("num_hidden_layers", config.num_hidden_layers)
    windows = found.windows(count, config.swa_window_size, all_slide=config.use_swa)
    stated = (config.is_causal, config.causal, config.dflash_query_causal)
    causal = next((one for one in stated if one is not None), None)
    kinds = config.layer_types or FULL[:1] * count
    both_ways = config.sliding_window_non_causal
    if found.model_type == OF_TRANSFORMERS:  # a window does not count the row itself
        both_ways, windows = True, tuple(window and window + 1 for window in windows)
    usual = [kind in SLIDING and not both_ways for kind in kinds]
    return tuple(
        replace(spec, window=window, causal=own if causal is None else causal)
        for window, own in zip(windows, usual, strict=True)
    )


class DFlashModel(nn.Module):
    """Decoder layers that all read the same context."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        spec, count = shape.spec, len(shape.layers)
        norms = (nn.RMSNorm(spec.hidden, eps=spec.eps) for _ in range(count))
        layers = (HeadLayer(own, spec.hidden, index) for index, own in enumerate(shape.layers))
        self.fc = nn.Linear(shape.num_features * spec.hidden, spec.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden, eps=spec.eps)
        self.input_norms, self.layers = nn.ModuleList(norms), nn.ModuleList(layers)
        self.norm, self.specs = nn.RMSNorm(spec.hidden, eps=spec.eps), shape.layers
        if shape.num_outputs is not None:
            self.lm_head = nn.Linear(spec.hidden, shape.num_outputs, bias=False)
        self.aliases = {f"input_norms.{i}": f"layers.{i}.input_layernorm" for i in range(count)}

    def forward(self, features: Tensor, block: Tensor, past: HeadCache) -> Tensor:
        """Outputs `(m, hidden)` of a block; the cache gains the rows of context and block.

        Args:
            features: `(n, layers * hidden)` of the target, behind the cache's rows.
            block: `(m, hidden)` embedded tokens behind them.
        """
        context = self.hidden_norm(self.fc(features))
        keys = torch.arange(past.length + len(features) + len(block), device=block.device)
        ahead = keys - keys[-len(block) :, None]
        for norm, layer, own in zip(self.input_norms, self.layers, self.specs, strict=True):
            seen = ahead.abs() < (own.window or len(keys))
            if own.causal:
                seen &= ahead <= 0
            rows = torch.cat([context, norm(block)])
            block = layer(rows, block, keys[past.length :], past, seen)
        normed: Tensor = self.norm(block)
        return normed


class DFlashDrafter(FeatureDrafter):
    """Keeps the context's keys and values, and fills one block per step.

    Raises DrafterError: it is no DFlash model, or one for another target.
    """

    from_anchor: ClassVar[bool] = False
    """Whether the root's own row says the first token, where the config does not tell."""

    def __init__(
        self, context: BuildContext, config: FeatureBlockMethod, found: HeadCheckpoint
    ) -> None:
        target, said = context.target, found.config
        block_size = _stated(found, "block_size", said.block_size)
        mask = found.mask_token(config.mask_token_id, found.num_embeddings(target))
        inputs = _layers_read(found, config, target)
        found.check_vocabulary(target)
        self.config, self._target = config, target
        self.needs = Needs(layers=inputs)
        anchor = self.from_anchor if said.sample_from_anchor is None else said.sample_from_anchor
        self._first = 0 if anchor else 1
        self._masks = [mask] * (block_size - 1)
        self._vocabulary, own_output = draft_vocabulary(found, target)
        num_outputs = self._vocabulary.size if own_output else None
        shape = BlockShape(layers_of(found, target), len(inputs), num_outputs)
        self._model: DFlashModel | None = self._load(found, shape)
        self._embedding = self._own_embedding(found)
        self._output = DraftOutput(target, self._vocabulary)
        found.check_all_read()
        pack_linears(self._model, target.kernels)
        self._cache = HeadCache(len(self._model.layers))

    def _load(self, found: HeadCheckpoint, shape: BlockShape) -> DFlashModel:
        said = found.config
        self._scale = said.output_multiplier * said.logit_scale
        self._softcap = said.final_logit_softcapping
        return found.load(lambda: DFlashModel(shape), self._target)

    def _own_embedding(self, found: HeadCheckpoint) -> Tensor | None:
        has_own = found.has("embed_tokens.weight")
        return own_embedding(found, self._target, self._target.hidden_size) if has_own else None

    def _resume(self, rows: int) -> int:
        self._cache.truncate(rows)
        return self._cache.length

    def propose(self, max_depth: int) -> Proposal:
        most = len(self._masks) + 1 - self._first
        length = min(most, self.config.max_draft_len or most, max_depth)
        if length < 1:
            return root_only(self.text[-1], self._target.device)
        assert self._model is not None
        features, _ = self.unread()
        block = torch.tensor([self.text[-1], *self._masks], device=self._target.device)
        filled = self._model(features, self._embedded(block), self._cache)
        # The block's own keys and values are dropped.
        self._cache.length += len(features)
        self._unread = ()
        return self._drafted(filled[self._first :][:length])

    def _drafted(self, filled: Tensor) -> Proposal:
        """The draft that hidden vectors `(places, hidden)` of a block make."""
        logits = self._logits(filled)
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return self.config.fill(self.text[-1], logits, self._vocabulary)

    def _logits(self, filled: Tensor) -> Tensor:
        """`(places, hidden)` → `(places, draft vocabulary)`."""
        own = getattr(self._model, "lm_head", None)
        logits: Tensor = self._output(filled) if own is None else own(filled)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        """Embeddings `(n, hidden)`: its own, or the target's without the norm some put on them."""
        if self._embedding is not None:
            return embedding(ids, self._embedding)
        module: Any = self._target.embedding
        rows: Tensor = (
            embedding(ids, module.weight) if hasattr(module, "embed_norm") else module(ids)
        )
        return rows

    def close(self) -> None:
        self.finish()
        self._cache.free()
        self._model = None


def _stated(found: HeadCheckpoint, name: str, *said: _Setting | None) -> _Setting:
    """The first that says a setting: the user, or the checkpoint's config.

    Raises DrafterError: none does.
    """
    value = next((value for value in said if value is not None), None)
    if value is None:
        settable = name in DFlashConfig.model_fields
        raise DrafterError(
            f"{found.location}'s config.json says no {name}. It is not a DFlash checkpoint"
            + (f", or an early one: set {name} yourself." if settable else ".")
        )
    return value


def _layers_read(
    found: HeadCheckpoint, config: FeatureBlockMethod, target: Target
) -> tuple[int, ...]:
    """Layers of the target whose inputs the model reads; input i is output i - 1.

    Raises DrafterError: nothing says which, or the target is another one.
    """
    said, made = found.config, "This draft model was made for another target."
    hidden = said.hidden_size
    if hidden != target.hidden_size:
        raise DrafterError(
            f"{found.location} has hidden size {hidden}, but {target.name} has "
            f"{target.hidden_size}. {made}"
        )
    # speculators names the layers' inputs; NVIDIA both.
    both = (said.aux_hidden_state_layer_ids, said.eagle_aux_hidden_state_layer_ids)
    inputs = both[0] or both[1]
    outputs = said.target_layer_ids or tuple(i - 1 for i in inputs) or None
    layers = _stated(found, "target_layer_ids", config.target_layer_ids, outputs)
    if not all(0 <= layer < target.num_layers - 1 for layer in layers):
        raise DrafterError(
            f"{found.location} reads target layers {list(layers)}, but {target.name} offers 0 to "
            f"{target.num_layers - 2}. {made}"
        )
    return tuple(layer + 1 for layer in layers)
