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

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.config import setting
from engine.drafters.base import BuildContext, root_only
from engine.drafters.blocks.base import BlockMethod
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.features import FeatureDrafter
from engine.drafters.heads.layer import HeadCache, HeadLayer, HeadSpec
from engine.drafters.heads.vocabulary import Vocabulary
from engine.drafters.method import draft_len
from engine.errors import DrafterError
from engine.kernels.cpu.operators import pack_linears
from engine.model.kinds import ATTENTION
from engine.model.target import Target
from engine.proposal import Needs, Proposal

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
    """Sizes of a block model; `windows`: how far each layer looks, None = all."""

    spec: HeadSpec
    num_features: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, found: HeadCheckpoint, num_features: int, target: Target) -> BlockShape:
        """As a checkpoint says; DrafterError for layers that no such model has."""
        spec = found.layer_spec(target.hidden_size)
        count = found.stated("num_hidden_layers", found.layers.num_hidden_layers)
        kinds = found.options.layer_types or ("full_attention",) * count
        if len(kinds) != count or not set(kinds) <= ATTENTION:
            raise DrafterError(
                f"{found.location}: layer_types in config.json must name {count} layers, each one "
                f"of {', '.join(sorted(ATTENTION))}."
            )
        window = found.options.sliding_window
        return cls(
            spec, num_features, tuple(window if kind.startswith("sl") else None for kind in kinds)
        )


class DFlashModel(nn.Module):
    """Decoder layers that all read the same context."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        spec, windows, num_features = shape.spec, shape.windows, shape.num_features
        norms = (nn.RMSNorm(spec.hidden, eps=spec.eps) for _ in windows)
        layers = (HeadLayer(spec, spec.hidden, index) for index in range(len(windows)))
        self.fc = nn.Linear(num_features * spec.hidden, spec.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden, eps=spec.eps)
        self.input_norms, self.layers = nn.ModuleList(norms), nn.ModuleList(layers)
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.eps)
        self.windows = windows
        self.aliases = {
            f"input_norms.{i}": f"layers.{i}.input_layernorm" for i in range(len(windows))
        }

    def forward(self, features: Tensor, block: Tensor, past: HeadCache) -> Tensor:
        """Outputs `(m, hidden)` of a block; the cache gains the rows of context and block.

        Args:
            features: `(n, layers * hidden)` of the target, behind the cache's rows.
            block: `(m, hidden)` embedded tokens behind them.
        """
        context = self.hidden_norm(self.fc(features))
        keys = torch.arange(past.length + len(features) + len(block), device=block.device)
        for norm, layer, window in zip(self.input_norms, self.layers, self.windows, strict=True):
            near = (keys[-len(block) :, None] - keys).abs() <= (window or len(keys))
            rows = torch.cat([context, norm(block)])
            block = layer(rows, block, keys[past.length :], past, near)
        normed: Tensor = self.norm(block)
        return normed


class DFlashDrafter(FeatureDrafter):
    """Keeps the context's keys and values, and fills one block per step.

    Raises DrafterError: it is no DFlash model, or one for another target.
    """

    _first = 1
    """Row of the block that says the first token; row 0 is the root's."""

    def __init__(
        self, context: BuildContext, config: FeatureBlockMethod, found: HeadCheckpoint
    ) -> None:
        target = context.target
        block_size = _stated(found, "block_size", found.options.block_size)
        mask = found.mask_token(config.mask_token_id, len(target.embedding.get_parameter("weight")))
        layers = _layers_read(found, config, target)
        self.config, self._target = config, target
        # Output of layer i = input of layer i + 1.
        self.needs = Needs(layers=tuple(i + 1 for i in layers))
        self._vocabulary = Vocabulary(None, target.vocab_size)
        self._masks = [mask] * (block_size - 1)
        self._model: DFlashModel | None = self._load(
            found, BlockShape.of(found, len(layers), target)
        )
        found.check_all_read()
        pack_linears(self._model, target.kernels)
        self._cache = HeadCache(len(self._model.layers))

    def _load(self, found: HeadCheckpoint, shape: BlockShape) -> DFlashModel:
        return found.load(lambda: DFlashModel(shape), self._target)

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
        return self.config.fill(self.text[-1], self._target.output(filled), self._vocabulary)

    def _embedded(self, ids: Tensor) -> Tensor:
        """The target's embeddings `(n, hidden)`, without the norm that some targets put on them."""
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
    """Layers of the target whose outputs the model reads.

    Raises DrafterError: nothing says which, or the target is another one.
    """
    said, made = found.options, "This draft model was made for another target."
    hidden = found.layers.hidden_size
    if hidden != target.hidden_size:
        raise DrafterError(
            f"{found.location} has hidden size {hidden}, but {target.name} has "
            f"{target.hidden_size}. {made}"
        )
    # speculators names the layers' inputs.
    inputs = said.aux_hidden_state_layer_ids
    outputs = tuple(i - 1 for i in inputs) if inputs else said.target_layer_ids
    layers = _stated(found, "target_layer_ids", config.target_layer_ids, outputs)
    if not all(0 <= layer < target.num_layers - 1 for layer in layers):
        raise DrafterError(
            f"{found.location} reads target layers {list(layers)}, but {target.name} offers 0 to "
            f"{target.num_layers - 2}. {made}"
        )
    return layers
