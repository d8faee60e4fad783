"""The whole forward of Llama-like decoders in one call of the kernels in `native.cpp`.

A row's results are the same, bit by bit, whatever rows are computed with it: a draft tree is
verified with exactly the logits of plain decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from engine.kernels.cpu.decoder import Decoder, DecoderWeights, KVSlots, Layer
from engine.kernels.cpu.gguf import QuantizedMatrix
from engine.kernels.cpu.operators import EVEN, Matrix, NativeLinear
from engine.kernels.cpu.weights import QuantizedWeights
from engine.model.cache import TreeCache
from engine.model.forward import Forward, RaggedBatch, Rows
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Exactly these: a subclass may differ in any line."""
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of the text."""


def why_not(model: PreTrainedModel) -> str | None:
    """What the kernels lack for this model, in words; None if nothing."""
    config, base = model.config.get_text_config(), _base(model)
    if type(model) not in (getattr(transformers, name) for name in KNOWN):
        return f"{type(model).__name__} is computed by transformers' modules"
    if model.dtype != torch.bfloat16:
        return f"they compute in bfloat16, not {str(model.dtype).removeprefix('torch.')}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    head_dim = int(base.layers[0].self_attn.head_dim)
    if base.rotary_emb.rope_type not in FIXED_ROTARY:
        kind = base.rotary_emb.rope_type
        return f"its rotary positions ({kind}) depend on the length of the text"
    if 2 * len(base.rotary_emb.inv_freq) != head_dim:
        return "its rotary positions cover a part of each head only"
    kinds = {getattr(layer.self_attn, "layer_type", None) for layer in base.layers}
    if "sliding_attention" in kinds or getattr(config, "sliding_window", None) is not None:
        return "they have no sliding-window attention"
    sizes = (head_dim, config.hidden_size, config.intermediate_size)
    if any(size % EVEN for size in sizes):
        return f"heads and layers must be multiples of {EVEN} wide, got {sizes}"
    return None


def _base(model: PreTrainedModel) -> Any:
    return model.base_model


class _NativeBatch(RaggedBatch):
    """Rows of any texts in one call; a row's results are bit by bit those of its text alone."""

    name = "compiled kernels, all rows in one call"

    def __init__(self, forward: NativeForward, buffer: Tensor) -> None:
        self._forward, self._buffer, self.capacity = forward, buffer, buffer.shape[2]

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        begins: Tensor,
        *,
        needs: Needs | None = None,
        num_logits: int = 0,
    ) -> TargetOutput:
        begins = begins.contiguous()
        longest = int(positions.max()) + 1
        context = max(0, longest - len(tokens))
        slots = KVSlots(self._buffer, context, begins=begins, columns=begins + positions)
        return self._forward.run(tokens, positions, slots, needs or Needs(), num_logits)

    def repeat(self, length: int, *, every: int) -> None:
        texts = self._buffer.unflatten(2, (-1, every))
        texts[:, :, 1:, :length] = texts[:, :, :1, :length]


class NativeForward(Forward):
    """Runs a model that `why_not` has nothing against, in one call per forward.

    Attributes:
        kernels: the library that it calls.
    """

    kernels: ctypes.CDLL
    row_invariant = True

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: ctypes.CDLL,
        quantized: QuantizedWeights | None = None,
    ) -> None:
        """Pack the model's matrices; its linear modules become parts of them.

        Args:
            quantized: its matrices; None = they stay in bfloat16.
        """
        self.kernels = kernels
        self._quantized: QuantizedWeights | None = quantized
        self._decoder: Decoder | None = Decoder(kernels, self._weights(model))
        self._lm_head: Any = model.get_output_embeddings()
        self._narrow: tuple[Tensor, Decoder] | None = None
        self.name = "native" if quantized is None else f"native, q{quantized.bits}"
        self._quantized = None  # it maps the file

    # ---- weights

    def _weights(self, model: PreTrainedModel) -> DecoderWeights:
        base, config = _base(model), model.config.get_text_config()
        attention = base.layers[0].self_attn

        def rotary(count: int) -> Tensor:
            both = base.rotary_emb(torch.empty(0), torch.arange(count)[None])
            return torch.cat([part[0].chunk(2, dim=-1)[0] for part in both], dim=-1)

        keep = self._quantized is None or self._quantized.keeps_plain(model.lm_head)
        return DecoderWeights(
            layers=[self._layer(layer, f"layers.{i}") for i, layer in enumerate(base.layers)],
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            width=config.intermediate_size,
            eps=base.norm.variance_epsilon,
            scale=attention.scaling,
            norm=_weight(base.norm),
            embedding=base.embed_tokens.weight.detach(),
            lm_head=self._stack(model, ["lm_head"], "", keep=keep),
            vocab=len(base.embed_tokens.weight),
            rotary=rotary,
        )

    def _layer(self, layer: Any, at: str) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            qkv=self._stack(attention, ["q_proj", "k_proj", "v_proj"], at),
            out=self._stack(attention, ["o_proj"], at),
            gate_up=self._stack(mlp, ["gate_proj", "up_proj"], at),
            down=self._stack(mlp, ["down_proj"], at),
            input_norm=_weight(layer.input_layernorm),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            query_norm=_weight(getattr(attention, "q_norm", None)),
            key_norm=_weight(getattr(attention, "k_norm", None)),
        )

    def _stack(self, owner: Any, names: Sequence[str], at: str, *, keep: bool = False) -> Matrix:
        """One matrix of several linear modules, which become its parts."""
        linears = [getattr(owner, name) for name in names]
        weights = [linear.weight.detach() for linear in linears]
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = zip(linears, weights, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if x.bias is None else x.bias for x, w in parts])
        whole: Tensor | QuantizedMatrix
        if self._quantized is None:
            whole = torch.cat(weights)
        else:
            named = zip(names, linears, strict=True)
            whole = QuantizedMatrix.joined(
                [self._quantized.of(f"{at}.{name}", one) for name, one in named]
            )
        matrix = Matrix.of(whole, bias)
        sizes = [linear.out_features for linear in linears]
        for name, linear, part in zip(names, linears, matrix.split(sizes), strict=True):
            setattr(owner, name, NativeLinear(linear, self.kernels, part, keep=keep))
        return matrix

    # ---- forwards

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        slots, num_logits = (
            KVSlots(self._buffer(cache), cache.length, rows.visible),
            len(rows.tokens),
        )
        return self.run(*rows[:2], slots, needs, 1 if last_only else num_logits)

    def _buffer(self, cache: TreeCache) -> Tensor:
        weights = self._held.weights
        return cache.whole(weights.kv_heads, weights.head_dim, torch.bfloat16)

    def draft_chain(
        self,
        tokens: Tensor,
        cache: TreeCache,
        levels: int,
        min_prob: float,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        decoder = self._held if ids is None else self._saying(ids)
        slots = KVSlots(self._buffer(cache), cache.length)
        return decoder.chain(tokens, cache.length, slots, levels=levels, min_prob=min_prob, ids=ids)

    def _saying(self, ids: Tensor) -> Decoder:
        """One with the same layers, whose output matrix has the rows of these tokens only."""
        if self._narrow is None or not torch.equal(self._narrow[0], ids):
            rows = self._lm_head.weight.detach()[ids].to(torch.bfloat16)
            bits = self._lm_head.matrix.bits
            matrix = Matrix.of(rows if bits == 16 else QuantizedMatrix.quantize(rows, bits), None)
            narrow = replace(self._held.weights, lm_head=matrix, vocab=len(ids))
            self._narrow = ids, Decoder(self.kernels, narrow)
        return self._narrow[1]

    def output(self, hidden: Tensor) -> Tensor:
        rows = hidden.to(torch.bfloat16).reshape(-1, hidden.shape[-1])
        logits: Tensor = self._lm_head.float_product(rows).unflatten(0, hidden.shape[:-1])
        return logits

    def ragged_batch(self, capacity: int) -> RaggedBatch:
        weights = self._held.weights
        shape = (2 * len(weights.layers), weights.kv_heads, capacity, weights.head_dim)
        return _NativeBatch(self, torch.empty(shape, dtype=torch.bfloat16))

    def run(
        self, tokens: Tensor, positions: Tensor, slots: KVSlots, needs: Needs, num_logits: int
    ) -> TargetOutput:
        """One forward; logits of the last `num_logits` rows."""
        output = self._held.run(tokens, positions, slots, taps=needs.layers, num_logits=num_logits)
        return replace(
            output,
            hidden=output.hidden if needs.hidden else None,
            layers=output.layers if needs.layers else None,
        )

    @property
    def _held(self) -> Decoder:
        assert self._decoder is not None, "closed"
        return self._decoder

    def close(self) -> None:
        self._decoder = self._lm_head = self._narrow = None


def _weight(module: Any) -> Tensor | None:
    weight: Tensor | None = None if module is None else module.weight.detach()
    return weight
