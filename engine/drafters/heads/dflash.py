"""DFlash: a small block-diffusion model fills a whole block of draft tokens in one forward.

The draft model sees the target's hidden states of some layers as its context (keys and values of
every committed position), and a block of embeddings: the root's, then mask tokens. All rows of the
block look at each other and at the context; row i predicts the token i places after the root.

    context  h0 h1 h2 … hn-1      kept in the cache, computed once per position
    block    root mask mask mask  dropped after the draft
    drafts        d1   d2   d3    argmax of the target's lm_head at each mask

The network is transformers' (`MuseGlimmerAssistantModel`); the authors' checkpoints hold the same
network under other names and load as they are.
Lossless under sampling: drafts are argmaxes, so they follow from the committed text.
Source: arXiv:2602.06036, section 4; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from torch import Tensor
from torch.nn.functional import embedding

from engine.drafters.base import BuildContext, Drafter, Start, chain, root_only
from engine.drafters.method import MethodConfig
from engine.errors import DrafterError
from engine.model.cache import TreeCache
from engine.model.checkpoints import Checkpoint, read_checkpoint
from engine.model.target import Target
from engine.proposal import Needs, Outcome, Proposal

_RENAMED = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
"""Tensors of the authors' layout → transformers' names; all others agree."""


class DFlashConfig(MethodConfig):
    """Settings of DFlash; named as in TensorRT-LLM."""

    title: ClassVar[str] = "DFlash"
    summary: ClassVar[str] = (
        "A small block-diffusion model reads the target's hidden states and drafts a whole block "
        "in one forward."
    )
    paper: ClassVar[str | None] = "2602.06036"

    decoding_type: Literal["DFlash"] = "DFlash"
    speculative_model: str | None = Field(
        None, description="the draft model of this target: folder or hub id"
    )
    max_draft_len: int | None = Field(
        None, ge=1, le=64, description="most tokens to draft; None = the whole block"
    )
    mask_token_id: int | None = Field(
        None, ge=0, description="token id of the mask; None = what the checkpoint says"
    )
    target_layer_ids: tuple[int, ...] | None = Field(
        None, strict=False, description="target layers to read; None = what the checkpoint says"
    )

    def build(self, context: BuildContext) -> DFlashDrafter:
        location = context.weights(self.speculative_model, "the DFlash model")
        checkpoint = read_checkpoint(location)
        return DFlashDrafter(context, self, load_model(checkpoint, self, context.target))


def load_model(checkpoint: Checkpoint, settings: DFlashConfig, target: Target) -> Any:
    """transformers' DFlash model with the checkpoint's weights, in the target's dtype and device.

    Raises:
        DrafterError: it is no DFlash model, or one for another target, or transformers has none.
    """
    try:
        from transformers.models.muse_glimmer_assistant import (
            MuseGlimmerAssistantConfig,
            MuseGlimmerAssistantModel,
        )
    except ImportError as error:
        raise DrafterError(
            f"transformers {transformers.__version__} has no DFlash model "
            "(MuseGlimmerAssistantModel). Install a newer release: pip install -U transformers."
        ) from error
    values = model_values(checkpoint, settings, target)
    try:
        config = MuseGlimmerAssistantConfig(**values)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise DrafterError(
            f"{checkpoint.location}'s config.json is wrong: {reason[:200]}"
        ) from error
    model: Any = MuseGlimmerAssistantModel(config)
    tensors = {_RENAMED.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        got = tuple(tensors[name].shape) if name in tensors else None
        want = tuple(wanted[name].shape) if name in wanted else None
        if got != want:
            raise DrafterError(
                f"{checkpoint.location}: tensor {name} has shape {got}, but its config needs "
                f"{want}. It is not a DFlash checkpoint that can be used here."
            )
    model.load_state_dict(tensors)
    model.set_attn_implementation("sdpa")
    return model.to(target.device, target.dtype).eval()


def model_values(checkpoint: Checkpoint, settings: DFlashConfig, target: Target) -> dict[str, Any]:
    """Settings of the network, from either layout of `config.json`, checked against the target.

    Raises:
        DrafterError: something is missing, or belongs to another target; names both numbers.
    """
    config = checkpoint.config
    inner: Mapping[str, Any] = {**config, **(config.get("dflash_config") or {})}
    needed = {
        "block_size": inner.get("block_size"),
        "mask_token_id": settings.mask_token_id
        if settings.mask_token_id is not None
        else inner.get("mask_token_id"),
        "target_layer_ids": list(settings.target_layer_ids or ()) or inner.get("target_layer_ids"),
    }
    for name, value in needed.items():
        if value is None:
            settable = name in DFlashConfig.model_fields
            raise DrafterError(
                f"{checkpoint.location}'s config.json says no {name}. It is not a DFlash checkpoint"
                + (f", or an early one: set {name} yourself." if settable else ".")
            )
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim rms_norm_eps max_position_embeddings hidden_act layer_types"
    ).split()
    values = {name: config[name] for name in names if config.get(name) is not None}
    values |= {name: value for name, value in needed.items()}
    values.setdefault("layer_types", ["full_attention"] * int(config.get("num_hidden_layers", 0)))
    if config.get("sliding_window") is not None:
        values["sliding_window"] = config["sliding_window"]
    values["rope_parameters"] = config.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", 10_000.0),
        **(config.get("rope_scaling") or {}),
    }
    _check_fits(checkpoint.location, values, target)
    return values


def _check_fits(location: str, values: Mapping[str, Any], target: Target) -> None:
    layers: Sequence[int] = values["target_layer_ids"]
    if values.get("hidden_size") != target.hidden_size:
        raise DrafterError(
            f"{location} has hidden size {values.get('hidden_size')}, but {target.name} has "
            f"{target.hidden_size}. This draft model was made for another target."
        )
    if not all(0 <= layer < target.num_layers - 1 for layer in layers):
        raise DrafterError(
            f"{location} reads target layers {list(layers)}, but {target.name} offers 0 to "
            f"{target.num_layers - 2}. This draft model was made for another target."
        )
    table: Any = target.embedding.weight
    rows = len(table)
    if values["mask_token_id"] >= rows:
        raise DrafterError(
            f"mask_token_id is {values['mask_token_id']}, but {target.name}'s embedding has "
            f"{rows} rows. This draft model was made for another target."
        )


class DFlashDrafter(Drafter):
    """Keeps the context's keys and values, and fills one block per step."""

    def __init__(self, context: BuildContext, config: DFlashConfig, model: Any) -> None:
        self.config = config
        # Output of layer i = input of layer i + 1.
        self.needs = Needs(layers=tuple(i + 1 for i in model.config.target_layer_ids))
        self._model = model
        self._target = context.target
        self._masks = [model.config.mask_token_id] * (model.config.block_size - 1)
        self._cache = TreeCache(model.config.num_hidden_layers)
        self._pending: list[Tensor] = []
        self._root = 0

    def start(self, start: Start) -> None:
        assert start.output.layers is not None
        self._cache.free()
        self._pending = [start.output.layers]
        self._root = start.root

    def propose(self, max_depth: int) -> Proposal:
        length = min(len(self._masks), self.config.max_draft_len or max_depth, max_depth)
        if length < 1:
            return root_only(self._root, self._target.device)
        hidden = self._fill_block()[1 : length + 1]
        best = self._target.output(hidden).float().softmax(dim=-1).max(dim=-1)
        return chain(self._root, best.indices, best.values)

    def _fill_block(self) -> Tensor:
        """`(block_size, hidden)` output of the block's rows; the cache gains the new context."""
        device = self._target.device
        context = torch.cat(self._pending)
        ids = torch.tensor([self._root, *self._masks], device=device)
        begin, num_rows = self._cache.length, len(context) + len(ids)
        self._cache.reserve(num_rows)
        positions = torch.arange(begin, begin + num_rows, device=device)
        out: Tensor = self._model(
            noise_embeds=self._embedded(ids)[None],
            context_hidden_states=context[None],
            attention_mask={
                "full_attention": None,
                "sliding_attention": self._within_window(begin + num_rows, len(ids)),
            },
            position_ids=positions[None],
            past_key_values=self._cache,
        ).last_hidden_state[0]
        self._cache.commit(tuple(range(len(context))))
        self._pending = []
        return out

    def _embedded(self, ids: Tensor) -> Tensor:
        """The target's embeddings `(n, hidden)`, without the norm that some targets put on them."""
        module: Any = self._target.embedding
        rows: Tensor = (
            embedding(ids, module.weight) if hasattr(module, "embed_norm") else module(ids)
        )
        return rows

    def _within_window(self, num_keys: int, num_queries: int) -> Tensor | None:
        """Mask `(1, 1, queries, keys)`: keys at most `sliding_window` away from the last rows."""
        window = self._model.config.sliding_window
        if num_keys <= window:
            return None
        keys = torch.arange(num_keys, device=self._target.device)
        near: Tensor = (keys[-num_queries:, None] - keys).abs() <= window
        return near[None, None]

    def observe(self, outcome: Outcome) -> None:
        assert outcome.output.layers is not None
        rows = torch.tensor(outcome.path, device=self._target.device)
        self._pending.append(outcome.output.layers[rows])
        self._root = outcome.next_root

    def finish(self) -> None:
        self._cache.free()
        self._pending = []

    def close(self) -> None:
        self.finish()
        self._model = None
