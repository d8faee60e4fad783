"""One forward of the target over new rows: on transformers' modules, or a faster backend.

`ModulesForward` runs any model: `MaskBuilder` makes its mask, `tree_attention` is its attention
where the model needs no other, `FeatureTap` captures the hidden states that a drafter needs.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from ctypes import CDLL
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine.model.backend import Backend
from engine.model.cache import TreeCache
from engine.model.kv import KVBuffers
from engine.model.layer_types import CHUNKED, FULL, NO_KV_CACHE, SLIDING, has_attention
from engine.proposal import Needs, TargetOutput


class Rows(NamedTuple):
    """New rows of a forward.

    Attributes:
        tokens, positions: `(n,)` int64.
        visible: `(n, n)` bool, whether row i attends to row j; None = causal.
    """

    tokens: Tensor
    positions: Tensor
    visible: Tensor | None = None


def block_causal(positions: Tensor, segments: Tensor) -> Tensor:
    """Attention mask `(n, n)` bool of several texts in one row: causal within each."""
    same = segments[:, None] == segments[None]
    return same & (positions[:, None] >= positions[None])


class Forward(ABC):
    """Runs the target over rows after the cache's committed ones and stores their keys and values.

    Attributes:
        backend: what it runs on.
        kernels: the compiled kernels that it calls, which drafters may use; None = none.
    """

    backend: Backend
    kernels: CDLL | None = None

    @abstractmethod
    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        """Run n rows, which fit the cache's capacity; `last_only`: logits of the last row only."""

    @abstractmethod
    def output(self, hidden: Tensor) -> Tensor:
        """Hidden states `(…, hidden)` after the final norm, times the output matrix: `(…, vocab)`.

        `LogitTransform` makes logits of them.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the weights."""

    def new_cache(self, rows: int) -> TreeCache | None:
        """An empty cache of the backend's own type for about `rows` rows; None = any will do."""
        return None

    def draft_chain(
        self,
        tokens: Tensor,
        cache: TreeCache,
        levels: int,
        min_prob: float = 0.0,
        *,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """The greedy continuation of these tokens, which are not in the cache yet.

        The rows of all but the last token are committed.

        Args:
            tokens: `(n,)` int64.
            levels: maximum number of tokens; fewer once the path's probability is below `min_prob`.
            ids: `(size,)` int64, the only tokens allowed; None = all. A matrix of their rows is
                cached, so that the others cost nothing.

        Returns:
            Tokens `(m,)` and their log-probs; None = not supported, decode token by token.
        """
        return None

    def ragged_batch(self, capacity: int) -> RaggedBatch | None:
        """A batch of texts with room for `capacity` tokens in all; None = not supported."""
        return None


class RaggedBatch:
    """Keys and values of several texts, each in its own segment of the buffers' rows.

    Attributes:
        name: of the backend, for people.
    """

    def __init__(self, name: str, kv: KVBuffers, run: Callable[..., TargetOutput]) -> None:
        """`run` takes the buffers first."""
        self.name, self.kv, self._run = name, kv, run

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        text_starts: Tensor,
        *,
        needs: Needs | None = None,
        num_logits: int = 0,
    ) -> TargetOutput:
        """Run new tokens of any texts; a text's earlier tokens must precede them or be stored.

        Args:
            tokens: `(n,)` int64.
            positions: `(n,)` int64, within each row's text; what is stored there is overwritten.
            text_starts: `(n,)` int64, where the row's text begins in the buffer.
            num_logits: number of last rows that get logits.
        """
        rows = (tokens, positions, text_starts.contiguous())
        return self._run(self.kv, *rows, needs or Needs(), num_logits)

    def repeat(self, length: int, *, every: int) -> None:
        """Copy the buffer's first `length` tokens to every multiple of `every`."""
        self.kv.repeat(length, every=every)


class ModulesForward(Forward):
    """transformers' own modules: any model that it supports, on any device."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        weights: str = "",
        why_not: Mapping[str, str] | None = None,
    ) -> None:
        """Run a model.

        Args:
            weights: their storage format, for the run log, unless they are plain tensors.
            why_not: as in `Backend`.
        """
        name = ", ".join(filter(None, ("transformers' modules", weights)))
        self.backend = Backend(name, why_not or {})
        self._model: transformers.PreTrainedModel | None = model
        self._masks = MaskBuilder(model)
        self._takes_mask = has_attention(model.config.get_text_config())
        self._features = FeatureTap(model)
        self._skips_rows = bool(getattr(model.config.get_text_config(), "num_kv_shared_layers", 0))
        self._counts_rows = model.config.get_text_config().model_type in COUNT_ROWS
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in parameters

    @property
    def adds_mask(self) -> bool:
        """Whether the model's mask is additive; else it is boolean."""
        return bool(self._masks.additive)

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        assert self._model is not None
        mask = None
        if self._takes_mask:
            mask = self._masks.build(*rows[1:], cache.length, self._model.dtype)
        return self.masked(rows, mask, cache, needs, last_only=last_only)

    def masked(
        self, rows: Rows, mask: Any, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        """As `__call__`, given the model's own `attention_mask`."""
        assert self._model is not None
        tokens, positions, _ = rows
        self._features.capture(needs)
        if self._counts_rows:
            numbers = torch.arange(len(positions), device=positions.device)
            cache.position_shifts = positions - numbers - cache.length
        logits_to_keep: int | slice = 1 if last_only else 0
        if last_only and self._skips_rows and (needs.hidden or needs.layers):
            # Given an int, Gemma's shared layers skip all rows but the last.
            logits_to_keep = slice(-1, None)
        out = self._model(
            input_ids=tokens[None],
            attention_mask=mask,
            logits_to_keep=logits_to_keep,
            # With `use_cache` MiniMax accepts its own cache class only; all models write to theirs.
            use_cache=self._model.config.model_type != "minimax",
            cache=cache,
            **({"position_ids": positions[None]} if self._takes_positions else {}),
        )
        return TargetOutput(out.logits[0], *self._features.take(tokens.device))

    def output(self, hidden: Tensor) -> Tensor:
        assert self._model is not None
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits.to(hidden.device)

    def close(self) -> None:
        self._features.close()
        self._model = None


class MaskBuilder:
    """Builds a model's mask or masks: one in all or one per layer type, boolean or additive.

    Models with mixed layer types look their mask up by type; others take a single mask. `eager`
    attention adds the mask to the scores, all other implementations take booleans.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        config = model.config.get_text_config()
        types = set(config.layer_types or ()) if _has_setting(config, "layer_types") else set()
        self.is_per_type = bool(types) and config.model_type not in ONE_MASK
        has_window = types & {*SLIDING} if types else _has_setting(config, "sliding_window")
        self.window = _window(config) if has_window else None
        self.chunk = getattr(config, "attention_chunk_size", None)
        self.all_sliding = self.window is not None and types <= {*SLIDING, *NO_KV_CACHE}
        self.additive = config._attn_implementation == "eager"

    def build(
        self, positions: Tensor, visible: Tensor | None, length: int, dtype: torch.dtype
    ) -> Any:
        """The value of transformers' `attention_mask`; None where plain causal attention suffices.

        Args:
            positions: `(n,)` of the new rows.
            visible: `(n, n)` bool, among the new rows; None = causal.
            length: committed rows, at positions 0 … length-1, visible to every new row.
        """
        n = len(positions)
        is_cut = any(limit and length + n > limit for limit in (self.window, self.chunk))
        is_plain = (n == 1 or length == 0) and not is_cut
        if visible is None and is_plain and not self.additive:
            return self._by_type(None, None, None) if self.is_per_type else None
        if visible is None:
            visible = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
        full = torch.cat([visible.new_ones(n, length), visible], dim=1)
        keys = torch.cat([torch.arange(length, device=positions.device), positions])
        return self.for_model(full[None], keys, positions[None], dtype)

    def for_model(self, full: Tensor, keys: Tensor, positions: Tensor, dtype: torch.dtype) -> Any:
        """The model's mask or masks, given that of full attention.

        Args:
            full: `(batch, queries, keys)` bool.
            keys: `(keys,)` positions of the keys.
            positions: `(batch, queries)` positions of the queries.
        """
        sliding = chunked = full
        if self.window is not None:
            sliding = full & (keys > positions[..., None] - self.window)
        if self.chunk is not None:
            chunked = full & (keys // self.chunk == positions[..., None] // self.chunk)
        if self.is_per_type:
            return self._by_type(*(self._as_tensor(m, dtype) for m in (full, sliding, chunked)))
        return self._as_tensor(sliding if self.all_sliding else full, dtype)

    def _by_type(
        self, full: Tensor | None, sliding: Tensor | None, chunked: Tensor | None
    ) -> dict[str, Tensor | None]:
        pairs = ((FULL, full), (SLIDING, sliding), (CHUNKED, chunked), (NO_KV_CACHE, None))
        return {name: mask for names, mask in pairs for name in names}

    def _as_tensor(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.additive:
            return mask[:, None]
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]


def _has_setting(config: Any, name: str) -> bool:
    """Whether its class has a setting; models do not read others that a config.json may have."""
    return hasattr(type(config), name) or name in type(config).attribute_map


def _window(config: Any) -> int | None:
    """Width of sliding-window attention; None = it is off, or the model ignores it (Moshi)."""
    if getattr(config, "use_sliding_window", True) is False or config.model_type == "moshi":
        return None
    window = int(getattr(config, "sliding_window", None) or 0)
    return window if window > 0 else None


COUNT_ROWS = ("llama4_text", "inkling_text", "inkling2_text")
"""Their attention layers derive a row's position from the number of rows in the cache."""
ONE_MASK = ("recurrent_gemma",)
"""Their layers are of several types and share one mask."""
EAGER_ONLY = ("doge", "inkling_text")
"""Their attention takes a position bias or a mask per head, though transformers' SDPA runs them."""


def prepare_attention(model: transformers.PreTrainedModel) -> None:
    """Select `tree_attention`, or `eager` where the model needs what it does not support."""
    config = model.config.get_text_config()
    if not has_attention(config):
        return
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if softcap or config.model_type in EAGER_ONLY or not model._supports_sdpa:
        model.set_attn_implementation("eager")
        return
    transformers.AttentionInterface.register("tree_sdpa", tree_attention)
    model.set_attn_implementation("tree_sdpa")


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention of `n` new rows over a long cache, with an explicit mask, without copying keys.

    transformers repeats every key/value head for its group of query heads before masked attention,
    which copies the whole cache in every layer. Here the query heads of a group are laid out as
    extra query rows of their key/value head instead.

    Args:
        query: `(batch, heads, n, head_dim)`.
        key, value: `(batch, kv_heads, rows, head_dim)`, new rows last.
        attention_mask: `(batch, 1, n, rows)` bool, True = attends, or float32, added to the scores;
            None = causal for a prompt (n == rows), everything for one row. It may be repeated for
            the query heads of a group.

    Returns:
        `(batch, n, heads, head_dim)`, None (attention weights are never computed).
    """
    if attention_mask is None and query.shape[2] > 1:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    batch, heads, n, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * n, head_dim)
    if attention_mask is not None and attention_mask.shape[2] != groups * n:
        attention_mask = attention_mask[:, :, :n].repeat(1, 1, groups, 1)
    if attention_mask is not None and attention_mask.is_floating_point():
        scale = head_dim**-0.5 if scaling is None else scaling
        out = _attend_by_products(packed[0], key[0], value[0], attention_mask[0], scale)
    else:
        out = scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(batch, heads, n, value.shape[3]).transpose(1, 2).contiguous(), None


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention of few rows as two matrix products, which use the whole device.

    Fused kernels give a head to one multiprocessor, however long the context is.

    Args:
        query: `(kv_heads, n, head_dim)`.
        mask: `(1, n, rows)` float32, added to the scores.
    """
    if query.is_cuda and query.dtype != torch.float32:
        scores = torch.baddbmm(mask, query, key.mT, torch.float32, alpha=scale)
    else:
        scores = torch.baddbmm(mask.to(query.dtype), query, key.mT, alpha=scale)
    return torch.bmm(scores.softmax(dim=-1).to(value.dtype), value)


class FeatureTap:
    """Captures hidden states of a model's forwards by hooks."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        # OPT's language model calls its decoder directly, not the base model around it.
        self._decoder = decoder_of(model)
        self._to_output = _before_output(model)
        self._layers = decoder_layers(model)
        self._hidden: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}
        self._installed = Needs()
        self._hooks: list[Any] = []

    def capture(self, needs: Needs) -> None:
        """Capture these features in every forward from now on."""
        if needs == self._installed:
            return
        self.close()
        if needs.hidden:
            self._hooks.append(self._decoder.register_forward_hook(self._keep_hidden))
        for i in needs.layers:
            if i == len(self._layers):
                hook = self._layers[-1].register_forward_hook(self._keep_last)
            else:
                keep = functools.partial(self._keep_input, i)
                hook = self._layers[i].register_forward_pre_hook(keep, with_kwargs=True)
            self._hooks.append(hook)
        self._installed = needs

    def take(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """`hidden (rows, hidden)` and `layers (rows, k * hidden)` of the forward just run.

        Args:
            device: where they go; layers may be on several.
        """
        hidden, self._hidden = self._hidden, None
        layers = [self._inputs[i][0].to(device) for i in self._installed.layers]
        self._inputs.clear()
        return (
            None if hidden is None else hidden[0].to(device),
            torch.cat(layers, dim=-1) if layers else None,
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._installed = Needs()

    def _keep_hidden(self, module: nn.Module, args: Any, out: Any) -> None:
        self._hidden = self._to_output(out.last_hidden_state)

    def _keep_last(self, module: nn.Module, args: Any, out: Any) -> None:
        """The last layer's output, before the final norm: the input of layer `num_layers`."""
        self._inputs[len(self._layers)] = out[0] if isinstance(out, tuple) else out

    def _keep_input(self, i: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._inputs[i] = args[0] if args else kwargs["hidden_states"]


def decoder_of(model: transformers.PreTrainedModel) -> nn.Module:
    """The module from token ids to the last hidden state.

    Llama 4 returns itself, and ModernBERT its output matrix, which it calls `decoder`.
    """
    decoder: Any = model.get_decoder()
    others = (model, model.get_output_embeddings())
    module = model.model if any(decoder is other for other in others) else decoder
    assert isinstance(module, nn.Module)
    return module


def _before_output(model: transformers.PreTrainedModel) -> nn.Module:
    """What ModernBERT computes between the last hidden state and the output matrix."""
    is_between = model.config.get_text_config().model_type == "modernbert-decoder"
    module = model.lm_head if is_between else nn.Identity()
    assert isinstance(module, nn.Module)
    return module


def decoder_layers(model: transformers.PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers, found by its length: a vision tower may have as many."""
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return nn.ModuleList()
