"""The whole forward of a decoder in one call of the kernels in `native.cpp`.

A row's results are the same, bit by bit, whatever rows are computed with it: a draft tree is
verified with exactly the logits of plain decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels.cpu.decoder import Decoder, DecoderWeights, Factors, KVSlots, Layer
from engine.kernels.cpu.operators import EVEN, FORMATS, Matrix, NativeEmbedding, NativeLinear
from engine.model.cache import TreeCache
from engine.model.forward import Forward, RaggedBatch, Rows
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

NAMES = "Llama Mistral Qwen2 Qwen3 Gemma2 Gemma3 Phi3 SmolLM3 Olmo2 Granite".split()
FAMILIES = {f"{name}ForCausalLM" for name in NAMES}
"""Models whose modules `describe` reads; exactly these: a subclass may differ in any line."""
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of the text."""
KINDS = ("full_attention", "sliding_attention")
"""Of layers, where they have rotary positions of their own."""
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def why_not(model: PreTrainedModel) -> str | None:
    """What the kernels lack for this model, in words; None if nothing."""
    config, base = model.config.get_text_config(), _base(model)
    kind = type(model)  # not by `getattr(transformers, …)`, which imports every family
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is computed by transformers' modules"
    if model.dtype != torch.bfloat16:
        return f"they compute in bfloat16, not {str(model.dtype).removeprefix('torch.')}"
    if _activation(config) is None:
        return f"its activation is {_activation_name(config)}, not silu or gelu_pytorch_tanh"
    if getattr(config, "use_bidirectional_attention", False):
        return "its rows see those behind them"
    kinds = base.rotary_emb.rope_type
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    if not kinds <= FIXED_ROTARY:
        odd = min(kinds - FIXED_ROTARY)
        return f"its rotary positions ({odd}) depend on the length of the text"
    head_dim = int(base.layers[0].self_attn.head_dim)
    sizes = (head_dim, config.hidden_size, config.intermediate_size, _rotated(base))
    if any(size % EVEN for size in sizes):
        return f"heads and layers must be multiples of {EVEN} wide, got {sizes}"
    return None


def _base(model: PreTrainedModel) -> Any:
    return model.base_model


def _activation_name(config: Any) -> Any:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _activation(config: Any) -> str | None:
    return ACTIVATION_NAMES.get(_activation_name(config))


def _frequencies(base: Any) -> list[tuple[str | None, Tensor]]:
    """Rotary frequencies of each kind of layer that has its own; or those of all, named None."""
    own = ((kind, getattr(base.rotary_emb, f"{kind}_inv_freq", None)) for kind in KINDS)
    tables: list[tuple[str | None, Tensor]] = [
        (k, values) for k, values in own if values is not None
    ]
    return tables or [(None, base.rotary_emb.inv_freq)]


def _rotated(base: Any) -> int:
    """How much of a head its positions turn."""
    return 2 * len(_frequencies(base)[0][1])


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

    def __init__(self, model: PreTrainedModel, *, weights: str = "") -> None:
        """Run a model whose matrices are packed.

        Args:
            weights: how, in a word or two, if they are quantized.
        """
        decoder = describe(model)
        self._lm_head: Any = model.get_output_embeddings()
        self.kernels = self._lm_head.matrix.kernels
        self._decoder: Decoder | None = Decoder(self.kernels, decoder)
        self._narrow: tuple[Tensor, Decoder] | None = None
        self.name = f"native, {weights}" if weights else "native"

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
            rows = self._lm_head.matrix.rows(ids)
            bits = 16 if self._lm_head.matrix.format == FORMATS[16] else 8
            matrix = Matrix.of(self.kernels, rows, bits=bits)
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


def describe(model: PreTrainedModel) -> DecoderWeights:
    """A model that `why_not` has nothing against, whose matrices are packed, for the kernels."""
    base, config = _base(model), model.config.get_text_config()
    attention = base.layers[0].self_attn
    tables = _frequencies(base)
    embedding = base.embed_tokens
    packed = isinstance(embedding, NativeEmbedding)
    norms = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]

    def rotary(count: int) -> Tensor:
        rows = torch.arange(count)[None]
        kinds = ([] if kind is None else [kind] for kind, _ in tables)
        both = (base.rotary_emb(torch.empty(0), rows, *kind) for kind in kinds)
        parts = [torch.cat([x[0].float().chunk(2, -1)[0] for x in pair], dim=-1) for pair in both]
        turned = torch.stack(parts)
        return torch.nn.functional.pad(turned, (0, attention.head_dim - turned.shape[-1]))

    return DecoderWeights(
        layers=[_layer(layer, config, [kind for kind, _ in tables]) for layer in base.layers],
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        width=config.intermediate_size,
        eps=config.rms_norm_eps,
        factors=Factors(
            query=attention.scaling,
            embedding=_embedding_factor(embedding, config),
            residual=getattr(config, "residual_multiplier", 1.0),
            logits=1.0 / getattr(config, "logits_scaling", 1.0),
            score_cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        ),
        norm=_norm(base.norm),
        embedding=embedding.matrix if packed else embedding.weight.detach(),
        lm_head=_matrix(model.get_output_embeddings()),
        vocab=embedding.num_embeddings,
        rotary=rotary,
        rotated=_rotated(base),
        activation=str(_activation(config)),
        whole_norms=norms[0] is not None and len(norms[0]) != attention.head_dim,
    )


def _layer(layer: Any, config: Any, tables: Sequence[str | None]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
    # The norm after attention is in Llama's family the one before the MLP.
    last = getattr(layer, "post_feedforward_layernorm", None)
    after = _norm(layer.post_attention_layernorm)
    before_mlp = after if last is None else _norm(getattr(layer, "pre_feedforward_layernorm", None))
    kind = getattr(attention, "layer_type", None)
    return Layer(
        qkv=[_matrix(getattr(attention, name)) for name in qkv],
        out=_matrix(attention.o_proj),
        gate_up=[_matrix(getattr(mlp, name)) for name in gate_up],
        down=_matrix(mlp.down_proj),
        input_norm=_norm(getattr(layer, "input_layernorm", None)),
        attention_norm=None if last is None else after,
        mlp_norm=before_mlp,
        output_norm=_norm(last),
        query_norm=_norm(getattr(attention, "q_norm", None)),
        key_norm=_norm(getattr(attention, "k_norm", None)),
        rotary=_table(attention, kind, tables),
        window=_window(attention, config),
    )


def _table(attention: Any, kind: str | None, tables: Sequence[str | None]) -> int:
    if not getattr(attention, "use_rope", True):
        return -1
    return tables.index(kind) if kind in tables else 0


def _window(attention: Any, config: Any) -> int:
    """Keys that a layer's rows see at most; 0 = all."""
    own = getattr(attention, "sliding_window", config)
    if own is config:  # Mistral and Phi-3 have one for all layers
        own = getattr(config, "sliding_window", None) if _slides_always(config) else None
    return own or 0


def _slides_always(config: Any) -> bool:
    return config.model_type in ("mistral", "phi3")


def _embedding_factor(embedding: Any, config: Any) -> float:
    own = embedding.scale if isinstance(embedding, NativeEmbedding) else None
    if own is None:
        own = getattr(embedding, "scalar_embed_scale", 1.0)
    return float(own) * float(getattr(config, "embedding_multiplier", 1.0))


def _matrix(module: Any) -> Matrix:
    assert isinstance(module, NativeLinear)
    return module.matrix


def _norm(module: Any) -> Tensor | None:
    """What a norm multiplies by, float32; Gemma's keep it less 1."""
    if module is None:
        return None
    weight: Tensor = module.weight.detach().float()
    return weight + 1 if type(module).__name__.startswith("Gemma") else weight
