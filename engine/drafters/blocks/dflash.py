"""DFlash: a small block-diffusion model fills a whole block of draft tokens in one forward.

The draft model reads the target's hidden states of some layers as its context (keys and values of
every committed position), and a block of embeddings: the root's, then mask tokens. All rows of the
block attend to each other and to the context; row i predicts the token i positions after the root.

    context  h0 h1 h2 … hn-1      kept in the cache, computed once per position
    block    root mask mask mask  dropped after the draft
    drafts        d1   d2   d3    by the target's lm_head at each mask: a chain, or a tree

Source: arXiv:2602.06036, section 4; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from engine.config import setting
from engine.drafters.base import BuildContext
from engine.drafters.blocks.base import BlockDrafter, BlockMethod
from engine.drafters.heads.checkpoint import HeadCheckpoint
from engine.drafters.heads.layer import HeadCache, HeadLayer, HeadSpec
from engine.drafters.heads.vocabulary import DraftOutput, TokenEmbedding
from engine.drafters.method import draft_len
from engine.errors import DrafterError
from engine.kernels.cpu.operators import pack_linears
from engine.model.layer_types import FULL, SLIDING
from engine.proposal import Budget, Needs, Proposal
from engine.tree import upload

OF_TRANSFORMERS = "muse_glimmer_assistant"
"""Type of the one such model that transformers itself has."""


class FeatureBlockMethod(BlockMethod):
    """The settings of methods whose block model reads hidden states of the target."""

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

    def checkpoint(self, context: BuildContext) -> HeadCheckpoint:
        location = context.weights(self.speculative_model, f"the {self.title} model")
        return HeadCheckpoint.read(location, context.target, self.decoding_type)


class DFlashConfig(FeatureBlockMethod):
    """Settings of DFlash; named as in TensorRT-LLM."""

    title = "DFlash"
    summary = (
        "A small block-diffusion model reads the target's hidden states and drafts a whole block "
        "in one forward."
    )
    paper = "2602.06036"

    decoding_type: Literal["DFlash"] = "DFlash"

    def build(self, context: BuildContext) -> DFlashDrafter:
        return DFlashDrafter(self, self.checkpoint(context))


def layers_of(checkpoint: HeadCheckpoint) -> tuple[HeadSpec, ...]:
    """A checkpoint's layers; DrafterError for layers that no such model has.

    Layers of the type sliding_attention are causal and others are not, unless the config says
    otherwise; `use_swa` gives the others windows alone. As vLLM's qwen3_dflash.py reads it.
    """
    config, specs = checkpoint.config, checkpoint.layer_specs(checkpoint.target.hidden_size)
    flags = (config.is_causal, config.causal, config.dflash_query_causal)
    causal = next((flag for flag in flags if flag is not None), None)
    kinds = config.layer_types or FULL[:1] * len(specs)
    bidirectional = config.sliding_window_non_causal
    if checkpoint.model_type == OF_TRANSFORMERS:  # its windows do not count the row itself
        bidirectional = True
        specs = tuple(replace(spec, window=spec.window and spec.window + 1) for spec in specs)
    defaults = [kind in SLIDING and not bidirectional for kind in kinds]
    return tuple(
        replace(spec, causal=default if causal is None else causal)
        for spec, default in zip(specs, defaults, strict=True)
    )


class DFlashModel(nn.Module):
    """Decoder layers that all read the same context."""

    def __init__(
        self, layers: tuple[HeadSpec, ...], num_features: int, num_outputs: int | None
    ) -> None:
        """Args:
        num_features: layers of the target that are read.
        num_outputs: rows of an output matrix of its own; None = the target's.
        """
        super().__init__()
        self.specs, count = layers, len(layers)
        hidden, eps = layers[0].hidden, layers[0].eps
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.input_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(count))
        self.layers = nn.ModuleList(HeadLayer(own, hidden, i) for i, own in enumerate(layers))
        if num_outputs is not None:
            self.lm_head = nn.Linear(hidden, num_outputs, bias=False)
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
            visible = ahead.abs() < (own.window or len(keys))
            if own.causal:
                visible &= ahead <= 0
            rows = torch.cat([context, norm(block)])
            block = layer(rows, block, keys[past.length :], past, visible)
        normed: Tensor = self.norm(block)
        return normed


class DFlashDrafter(BlockDrafter):
    """Keeps the context's keys and values, and fills one block per step.

    Raises DrafterError: it is no DFlash model, or one for another target.
    """

    from_anchor: ClassVar[bool] = False
    """Whether the root's own row predicts the first token, unless the config says otherwise."""

    def __init__(self, config: FeatureBlockMethod, checkpoint: HeadCheckpoint) -> None:
        self.config, self._target = config, checkpoint.target
        self.device, hidden_size = self._target.device, self._target.hidden_size
        hint = "It is not a DFlash checkpoint."
        block_size = checkpoint.required("block_size", hint=hint)
        self._masks = [checkpoint.mask_token(config.mask_token_id)] * (block_size - 1)
        inputs = _layer_inputs(checkpoint, config)
        self.needs = Needs(layers=inputs)
        anchor = checkpoint.config.sample_from_anchor
        self._first = 0 if (self.from_anchor if anchor is None else anchor) else 1
        self.max_len = min(block_size - self._first, config.max_draft_len or block_size)
        self._vocabulary, own_output = checkpoint.vocabulary()
        num_outputs = self._vocabulary.size if own_output else None
        layers = layers_of(checkpoint)
        self._model = checkpoint.load(
            lambda: self._network(checkpoint, DFlashModel(layers, len(inputs), num_outputs))
        )
        module = self._target.embedding
        self._embedding: Callable[[Tensor], Tensor] = module
        if self.from_anchor or checkpoint.has("embed_tokens.weight"):
            self._embedding = checkpoint.embedding(hidden_size)
        elif hasattr(module, "embed_norm"):  # a norm that some targets put on their embeddings
            self._embedding = TokenEmbedding.of(module)
        self._output = DraftOutput(self._target, self._vocabulary)
        checkpoint.check_all_read()
        pack_linears(self._model, self._target.kernels)

    def new_cache(self) -> HeadCache:
        return HeadCache(len(self._model.layers))

    def _network(self, checkpoint: HeadCheckpoint, model: DFlashModel) -> DFlashModel:
        """The model with all parts of the method, whose settings are read."""
        self._softcap = checkpoint.config.final_logit_softcapping
        return model

    def fill(
        self, features: Tensor, tokens: Tensor, root: int, budget: Budget, cache: HeadCache
    ) -> Proposal:
        block = upload(torch.tensor([root, *self._masks]), self.device)
        outputs = self._model(features, self._embedding(block), cache)
        # The block's own keys and values are dropped.
        cache.length += len(features)
        return self._drafted(outputs[self._first :][: budget.depth], root, budget)

    def _drafted(self, outputs: Tensor, root: int, budget: Budget) -> Proposal:
        """The draft from hidden vectors `(positions, hidden)` of a block."""
        logits = self._logits(outputs)
        if self._softcap and not self._output.transform.softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return self.config.fill(root, logits, self._vocabulary)

    def _logits(self, outputs: Tensor) -> Tensor:
        """`(positions, hidden)` → `(positions, draft vocabulary)`."""
        own = getattr(self._model, "lm_head", None)
        logits: Tensor = self._output(outputs) if own is None else own(outputs)
        return logits


def _layer_inputs(checkpoint: HeadCheckpoint, method: FeatureBlockMethod) -> tuple[int, ...]:
    """Layers of the target whose inputs the model reads; input i is output i - 1.

    Raises DrafterError: neither names them, or it was made for another target.
    """
    config, location, target = checkpoint.config, checkpoint.location, checkpoint.target
    checkpoint.agree(hidden_size=target.hidden_size)
    # speculators names the layers' inputs; NVIDIA both.
    candidates = (config.aux_hidden_state_layer_ids, config.eagle_aux_hidden_state_layer_ids)
    outputs = tuple(i - 1 for i in candidates[0] or candidates[1]) or None
    hint = "It is not a DFlash checkpoint, or an early one: set target_layer_ids yourself."
    settings = (method.target_layer_ids, config.target_layer_ids or None, outputs)
    layers = checkpoint.required("target_layer_ids", *settings, hint=hint)
    if not all(0 <= layer < target.num_layers - 1 for layer in layers):
        raise DrafterError(
            f"{location} reads target layers {list(layers)}, but {target.name} offers 0 to "
            f"{target.num_layers - 2}. This draft model was made for another target."
        )
    return tuple(layer + 1 for layer in layers)
