"""A target's whole forward in one call of the kernels in `native.cpp`.

A row's results are bit-identical, whatever rows are computed with it: a draft tree is verified with
exactly the logits of plain decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.kernels.cpu.decoder import Decoder, DecoderWeights, Factors, KVSlots, Layer
from engine.kernels.cpu.operators import FORMATS, MULTIPLE, Matrix, NativeEmbedding, NativeLinear
from engine.model.backend import Backend
from engine.model.cache import TreeCache
from engine.model.forward import Forward, RaggedBatch, Rows
from engine.model.kv import KVBuffers
from engine.model.logits import LogitTransform
from engine.proposal import Needs, TargetOutput

NAMES = "Llama Mistral Qwen2 Qwen3 Gemma2 Gemma3 Phi3 SmolLM3 Olmo2 Granite".split()
FAMILIES = {f"{name}ForCausalLM" for name in NAMES}
"""Models whose modules `decoder_weights` reads; exactly these, since subclasses may differ."""
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Types of rotary positions whose frequencies do not depend on the length of the text."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layer types that may have rotary positions of their own."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
"""Name → `Activation` in the kernels."""


def unsupported_reason(model: transformers.PreTrainedModel) -> str | None:
    """Why the kernels do not support this model; None if they do."""
    config = model.config.get_text_config()
    base: Any = model.base_model
    kind = type(model)  # not by `getattr(transformers, …)`, which imports every family
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is computed by transformers' modules"
    if model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"the compiled kernels compute in bfloat16, not {dtype}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}, not silu or gelu_pytorch_tanh"
    types = base.rotary_emb.rope_type
    types = set(types.values()) if isinstance(types, dict) else {types}
    if not types <= FIXED_ROTARY:
        dynamic = min(types - FIXED_ROTARY)
        return f"its rotary positions ({dynamic}) depend on the length of the text"
    rotary_dim = 2 * len(_frequencies(base)[0][1])
    head_dim = int(base.layers[0].self_attn.head_dim)
    sizes = (head_dim, config.hidden_size, config.intermediate_size, rotary_dim)
    if any(size % MULTIPLE for size in sizes):
        return f"heads and layers must be multiples of {MULTIPLE} wide, got {sizes}"
    return None


def _activation(config: Any) -> Any:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _frequencies(base: Any) -> list[tuple[str | None, Tensor]]:
    """Rotary frequencies per layer type, or of all layers, under None."""
    by_type = ((kind, getattr(base.rotary_emb, f"{kind}_inv_freq", None)) for kind in LAYER_TYPES)
    tables: list[tuple[str | None, Tensor]] = [
        (k, values) for k, values in by_type if values is not None
    ]
    return tables or [(None, base.rotary_emb.inv_freq)]


class NativeForward(Forward):
    """Runs a supported model in one call per forward."""

    kernels: ctypes.CDLL

    def __init__(self, model: transformers.PreTrainedModel, *, weights: str = "") -> None:
        """Run a model whose matrices are packed.

        Args:
            weights: their quantization, as a short name.
        """
        self._lm_head: Any = model.get_output_embeddings()
        self.kernels = self._lm_head.matrix.kernels
        self._decoder: Decoder | None = Decoder(self.kernels, decoder_weights(model))
        self._restricted: tuple[Tensor, Decoder] | None = None
        name = f"native, {weights}" if weights else "native"
        self.backend = Backend(name, row_invariant=True)

    # ---- forwards

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        slots = self.decoder.behind(cache, rows.visible)
        return self.run(*rows[:2], slots, needs, 1 if last_only else len(rows.tokens))

    @torch.inference_mode()
    def draft_chain(
        self,
        tokens: Tensor,
        cache: TreeCache,
        levels: int,
        min_prob: float = 0.0,
        *,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        cache.reserve(len(tokens) + levels)
        decoder = self.decoder if ids is None else self._restricted_to(ids)
        slots = decoder.behind(cache)
        chain = decoder.chain(tokens, slots, levels=levels, min_prob=min_prob, ids=ids)
        cache.length += len(tokens) + len(chain[0]) - 1
        return chain

    def _restricted_to(self, ids: Tensor) -> Decoder:
        """A decoder with the same layers, whose output matrix has only these tokens' rows."""
        if self._restricted is None or not torch.equal(self._restricted[0], ids):
            rows = self._lm_head.matrix.rows(ids)
            bits = 16 if self._lm_head.matrix.format == FORMATS[16] else 8
            matrix = Matrix.of(self.kernels, rows, bits=bits)
            restricted = replace(self.decoder.weights, lm_head=matrix, vocab=len(ids))
            self._restricted = ids, Decoder(self.kernels, restricted)
        return self._restricted[1]

    def output(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits: Tensor = self._lm_head.matrix.product(rows).unflatten(0, hidden.shape[:-1])
        return logits

    def ragged_batch(self, capacity: int) -> RaggedBatch:
        kv = KVBuffers(len(self.decoder.weights.layers), capacity)
        self.decoder.buffer(kv)  # here: made in inference mode, only that could change it
        return RaggedBatch("compiled kernels, all rows in one call", kv, self._read_texts)

    def _read_texts(
        self,
        kv: KVBuffers,
        tokens: Tensor,
        positions: Tensor,
        text_starts: Tensor,
        needs: Needs,
        num_logits: int,
    ) -> TargetOutput:
        """Run a ragged batch; a row's results are bit-identical to those of its text alone."""
        context = max(0, int(positions.max()) + 1 - len(tokens))
        columns = text_starts + positions
        buffer = self.decoder.buffer(kv)
        slots = KVSlots(buffer, context, text_starts=text_starts, columns=columns)
        return self.run(tokens, positions, slots, needs, num_logits)

    def run(
        self, tokens: Tensor, positions: Tensor, slots: KVSlots, needs: Needs, num_logits: int
    ) -> TargetOutput:
        """One forward; logits of the last `num_logits` rows."""
        out = self.decoder.run(tokens, positions, slots, taps=needs.layers, num_logits=num_logits)
        return replace(
            out,
            hidden=out.hidden if needs.hidden else None,
            layers=out.layers if needs.layers else None,
        )

    @property
    def decoder(self) -> Decoder:
        assert self._decoder is not None, "closed"
        return self._decoder

    def close(self) -> None:
        self._decoder = self._lm_head = self._restricted = None


def decoder_weights(model: transformers.PreTrainedModel) -> DecoderWeights:
    """The kernels' description of a supported model whose matrices are packed."""
    config = model.config.get_text_config()
    base: Any = model.base_model
    attention = base.layers[0].self_attn
    tables = _frequencies(base)
    embedding = base.embed_tokens
    packed = isinstance(embedding, NativeEmbedding)
    scale = embedding.scale if packed else getattr(embedding, "scalar_embed_scale", 1.0)
    norms = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    transform = LogitTransform.of(config)

    def rotary(count: int) -> Tensor:
        rows = torch.arange(count)[None]
        kinds = ([] if kind is None else [kind] for kind, _ in tables)
        both = (base.rotary_emb(torch.empty(0), rows, *kind) for kind in kinds)
        parts = [torch.cat([x[0].float().chunk(2, -1)[0] for x in pair], dim=-1) for pair in both]
        table = torch.stack(parts)
        return torch.nn.functional.pad(table, (0, attention.head_dim - table.shape[-1]))

    return DecoderWeights(
        layers=[_layer(layer, config, [kind for kind, _ in tables]) for layer in base.layers],
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        intermediate=config.intermediate_size,
        eps=config.rms_norm_eps,
        factors=Factors(
            query=attention.scaling,
            embedding=float(scale) * float(getattr(config, "embedding_multiplier", 1.0)),
            residual=getattr(config, "residual_multiplier", 1.0),
            logits=transform.factor,
            score_cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
            logit_cap=transform.softcap or 0.0,
        ),
        norm=_norm(base.norm),
        embedding=embedding.matrix if packed else embedding.weight.detach(),
        lm_head=_matrix(model.get_output_embeddings()),
        vocab=embedding.num_embeddings,
        rotary=rotary,
        rotary_dim=2 * len(tables[0][1]),
        activation=ACTIVATIONS[_activation(config)],
        all_head_norms=norms[0] is not None and len(norms[0]) != attention.head_dim,
    )


def _layer(layer: Any, config: Any, tables: Sequence[str | None]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
    # In Llama-like models the norm named after attention precedes the MLP.
    last = getattr(layer, "post_feedforward_layernorm", None)
    after = _norm(layer.post_attention_layernorm)
    before_mlp = after if last is None else _norm(getattr(layer, "pre_feedforward_layernorm", None))
    kind, rotates = getattr(attention, "layer_type", None), getattr(attention, "use_rope", True)
    window = getattr(attention, "sliding_window", None)
    if config.model_type in ("mistral", "phi3"):  # their config has one for all layers
        window = getattr(config, "sliding_window", None)
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
        rotary=(tables.index(kind) if kind in tables else 0) if rotates else -1,
        window=window or 0,
    )


def _matrix(module: Any) -> Matrix:
    assert isinstance(module, NativeLinear)
    return module.matrix


def _norm(module: Any) -> Tensor | None:
    """A norm's multiplier, float32; Gemma's weights are offset by -1."""
    if module is None:
        return None
    weight: Tensor = module.weight.detach().float()
    return weight + 1 if type(module).__name__.startswith("Gemma") else weight
