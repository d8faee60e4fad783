"""One forward of the target over new rows: by transformers' modules, or by something faster.

`ModulesForward` runs any model: `MaskBuilder` makes the mask that it takes, `tree_attention` is its
attention wherever that lacks nothing, `FeatureTap` reads what a drafter wants to see.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from ctypes import CDLL
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine.model.cache import TreeCache
from engine.model.kinds import CHUNKED, FULL, NO_KV_CACHE, SLIDING, attends
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel


class Rows(NamedTuple):
    """New rows of a forward.

    Attributes:
        tokens, positions: `(n,)` int64.
        visible: `(n, n)` bool, who sees whom among the rows; None = causal.
    """

    tokens: Tensor
    positions: Tensor
    visible: Tensor | None = None


class Forward(ABC):
    """Runs the target over rows behind the cache's committed ones and stores their keys and values.

    Attributes:
        name: what runs, for the log of a run.
        kernels: the compiled kernels that it calls, for drafters to use; None = none.
        row_invariant: whether a row's bits are the same whatever rows are computed with it.
    """

    name: str
    kernels: CDLL | None = None
    row_invariant = False

    @abstractmethod
    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        """Run n rows, for which the cache has room; `last_only`: logits of the last row only."""

    @abstractmethod
    def output(self, hidden: Tensor) -> Tensor:
        """Logits `(…, vocab)` of hidden states `(…, hidden)` after the final norm."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the weights."""

    def new_cache(self, rows: int) -> TreeCache | None:
        """An empty cache of its own for about `rows` rows; None = any cache will do."""
        return None

    def draft_chain(
        self,
        tokens: Tensor,
        cache: TreeCache,
        levels: int,
        min_prob: float,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """As `Target.draft_chain`, but that nothing is committed; None = token by token."""
        return None

    def ragged_batch(self, capacity: int) -> RaggedBatch | None:
        """Room for many texts, `capacity` tokens in all; None = it reads one text at a time."""
        return None

    def environment(self) -> dict[str, Any]:
        """What the log of a run says about it: what is used, or why not, and memory in bytes."""
        return {"forward": self.name}


class RaggedBatch(ABC):
    """Keys and values of several texts, each at its own place in a buffer of `capacity` tokens.

    Attributes:
        name: what runs, in words.
    """

    name: str
    capacity: int

    @abstractmethod
    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        begins: Tensor,
        *,
        needs: Needs | None = None,
        num_logits: int = 0,
    ) -> TargetOutput:
        """Read new tokens of any texts; earlier ones of a text were read before, or come before.

        Args:
            tokens: `(n,)` int64.
            positions: `(n,)` int64, within each row's text; what was read there is overwritten.
            begins: `(n,)` int64, where the row's text begins in the buffer.
            num_logits: how many of the last rows get logits.
        """

    @abstractmethod
    def repeat(self, length: int, *, every: int) -> None:
        """Copy the buffer's first `length` tokens to every multiple of `every`."""


class ModulesForward(Forward):
    """transformers' own modules: any model that it supports, on any device."""

    name = "transformers' modules"

    def __init__(self, model: PreTrainedModel, *, weights: str = "") -> None:
        """`weights`: how they are held, for the log of a run, where that is not plain."""
        if weights:
            self.name = f"{self.name}, {weights}"
        self._model: PreTrainedModel | None = model
        self._masks = MaskBuilder(model)
        self._takes_mask = attends(model.config.get_text_config())
        self._features = FeatureTap(model)
        self._cuts_rows = bool(getattr(model.config.get_text_config(), "num_kv_shared_layers", 0))
        self._counts_rows = model.config.get_text_config().model_type in COUNT_ROWS
        takes = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in takes
        self._cache_name = cache_argument(model)

    @property
    def adds_mask(self) -> bool:
        """Whether the model adds its mask to the scores; else it takes a boolean one."""
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
        """The same with the mask that the model takes."""
        assert self._model is not None
        tokens, positions, _ = rows
        self._features.capture(needs)
        if self._counts_rows:
            numbers = torch.arange(len(positions), device=positions.device)
            cache.shifts = positions - numbers - cache.length
        logits_to_keep: int | Tensor = 1 if last_only else 0
        if last_only and self._cuts_rows and (needs.hidden or needs.layers):
            # Told as a number, Gemma's shared layers leave out all rows but the last.
            logits_to_keep = torch.tensor([len(tokens) - 1], device=tokens.device)
        out = self._model(
            input_ids=tokens[None],
            attention_mask=mask,
            logits_to_keep=logits_to_keep,
            # With `use_cache` MiniMax takes its own class of cache only; what is given, all write.
            use_cache=self._model.config.model_type != "minimax",
            **{self._cache_name: cache},
            **({"position_ids": positions[None]} if self._takes_positions else {}),
        )
        return TargetOutput(out.logits[0], *self._features.take())

    def output(self, hidden: Tensor) -> Tensor:
        assert self._model is not None
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def close(self) -> None:
        self._features.close()
        self._model = None


def cache_argument(module: nn.Module) -> str:
    """Name under which a model or layer of transformers takes its cache.

    It is `cache` from 5.24 on; before, and in code that comes with a checkpoint,
    `past_key_values`, or `cache_params` where there is a recurrent state.
    """
    takes = inspect.signature(type(module).forward).parameters
    return next((name for name in ("cache", "cache_params") if name in takes), "past_key_values")


class MaskBuilder:
    """Knows whether a model wants one mask or one per layer type, boolean or additive.

    Models with mixed layer types look their mask up by type; models without look at one mask.
    Attention by `eager` functions adds the mask to the scores, all others take booleans.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        self.per_kind = bool(kinds) and _looks_up_by_kind(model)
        self.window, self.chunk = _window(config), getattr(config, "attention_chunk_size", None)
        self.all_sliding = self.window is not None and kinds <= {*SLIDING, *NO_KV_CACHE}
        self.additive = config._attn_implementation == "eager"

    def build(
        self, positions: Tensor, visible: Tensor | None, length: int, dtype: torch.dtype
    ) -> Any:
        """Mask for transformers' `attention_mask`; None where plain causal attention will do.

        Args:
            positions: `(n,)` of the new rows.
            visible: `(n, n)` bool among the new rows; None = causal.
            length: committed rows, at positions 0 … length-1, visible to every new row.
        """
        n = len(positions)
        crosses_window = self.window is not None and length + n > self.window
        crosses_chunk = self.chunk is not None and length + n > self.chunk
        plain = (n == 1 or length == 0) and not crosses_window and not crosses_chunk
        if visible is None and plain and not self.additive:
            return self._by_kind(None, None, None) if self.per_kind else None
        if visible is None:
            visible = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
        full = torch.cat([visible.new_ones(n, length), visible], dim=1)
        sliding = chunked = full
        keys = torch.cat([torch.arange(length, device=positions.device), positions])
        if self.window is not None and crosses_window:
            sliding = full & (keys[None, :] > positions[:, None] - self.window)
        if self.chunk is not None and crosses_chunk:
            chunked = full & (keys[None, :] // self.chunk == positions[:, None] // self.chunk)
        return self.as_wanted(full[None], sliding[None], dtype, chunked[None])

    def as_wanted(
        self, full: Tensor, sliding: Tensor, dtype: torch.dtype, chunked: Tensor | None = None
    ) -> Any:
        """Masks `(batch, queries, keys)` bool of each layer type, as the model takes them."""
        if self.per_kind:
            chunked = full if chunked is None else chunked
            return self._by_kind(*(self._finish(mask, dtype) for mask in (full, sliding, chunked)))
        return self._finish(sliding if self.all_sliding else full, dtype)

    def _by_kind(
        self, full: Tensor | None, sliding: Tensor | None, chunked: Tensor | None
    ) -> dict[str, Tensor | None]:
        kinds = ((FULL, full), (SLIDING, sliding), (CHUNKED, chunked), (NO_KV_CACHE, None))
        return {name: mask for names, mask in kinds for name in names}

    def _finish(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.additive:
            return mask[:, None]
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]


def _window(config: Any) -> int | None:
    """Width of sliding-window attention, if any layer uses it."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = int(getattr(config, "sliding_window", None) or 0)
    return window if window > 0 else None


def _looks_up_by_kind(model: PreTrainedModel) -> bool:
    bodies = {type(model.base_model), type(decoder_of(model))}
    return any("causal_mask_mapping" in inspect.getsource(body.forward) for body in bodies)


COUNT_ROWS = ("llama4_text", "inkling_text", "inkling2_text")
"""Their attention layers do not take a row's position but count the cache's rows."""
EAGER_ONLY = ("gpt_oss", "inkling_text", "inkling2_text")
"""Their attention takes sinks or a bias by position besides the mask."""


def prepare_attention(model: PreTrainedModel) -> None:
    """Select `tree_attention` where the model has nothing that it lacks."""
    config = model.config.get_text_config()
    if not attends(config):
        return
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if softcap or config.model_type in EAGER_ONLY:
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
        attention_mask: `(batch, 1, n, rows)` bool, True = may look; None = causal for a prompt
            (n == rows), everything for one row.

    Returns:
        `(batch, n, heads, head_dim)`, None (attention weights are never made).
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
    if attention_mask is not None and groups > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, n, value.shape[3]).transpose(1, 2).contiguous(), None


class FeatureTap:
    def __init__(self, model: PreTrainedModel) -> None:
        # OPT's language model calls its decoder directly, not the base model around it.
        self._decoder = decoder_of(model)
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
                hook = self._layers[i].register_forward_pre_hook(self._keeper(i), with_kwargs=True)
            self._hooks.append(hook)
        self._installed = needs

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """`hidden (rows, hidden)` and `layers (rows, k * hidden)` of the forward just run."""
        hidden, self._hidden = self._hidden, None
        layers = [self._inputs[i][0] for i in self._installed.layers]
        self._inputs.clear()
        return (
            None if hidden is None else hidden[0],
            torch.cat(layers, dim=-1) if layers else None,
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._installed = Needs()

    def _keep_hidden(self, module: nn.Module, args: Any, out: Any) -> None:
        self._hidden = out.last_hidden_state

    def _keep_last(self, module: nn.Module, args: Any, out: Any) -> None:
        """The last layer's output, before the final norm: the input of a layer that is not."""
        self._inputs[len(self._layers)] = out[0] if isinstance(out, tuple) else out

    def _keeper(self, i: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[i] = args[0] if args else kwargs["hidden_states"]

        return keep


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module from token ids to the last hidden state; Llama 4 names itself."""
    decoder: Any = model.get_decoder()
    module = model.model if decoder is model else decoder
    assert isinstance(module, nn.Module)
    return module


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's list of decoder layers, found by its length."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return nn.ModuleList()
