"""The whole forward of Llama-like decoders in one call of the kernels in `native.cpp`.

A row's results are the same, bit by bit, whatever rows are computed with it: a draft tree is
verified with exactly the logits of plain decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from engine.kernels.cpu.gguf import Blocks
from engine.kernels.cpu.operators import EVEN, Matrix, MatrixStruct, NativeLinear
from engine.kernels.cpu.weights import Codes
from engine.model.cache import TreeCache
from engine.model.forward import Forward, RaggedBatch
from engine.proposal import Needs, TargetOutput

KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Exactly these: a subclass may differ in any line."""
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the length of the text."""
ROTARY_BLOCK = 2048
"""The table of rotary positions grows to the next multiple of this many."""
ALIGNMENT = 64


class _Layer(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "width", "threads", "vocab")),
        ("eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(_Layer)),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("lm_head", MatrixStruct),
        ("joining", c_void_p),
    ]


class _Call(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "context")),
        ("visible", c_void_p),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("begins", "columns")),
        *((name, c_int32) for name in ("first_logit", "num_taps")),
        *((name, c_void_p) for name in ("tokens", "states", "rotary", "cache")),
        *((name, c_void_p) for name in ("taps", "tapped", "normed", "logits")),
        *((name, c_void_p) for name in ("log_totals", "best", "scratch")),
    ]


def why_not(model: PreTrainedModel) -> str | None:
    """What the kernels lack for this model, in words; None if nothing."""
    config, base = model.config.get_text_config(), _base(model)
    if type(model) not in KNOWN:
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


class _RotaryTable:
    """Cosines and sines of every position, as the model's own module makes them."""

    def __init__(self, module: Any) -> None:
        """`module`: its frequencies do not depend on the length."""
        self._module = module
        self._table = torch.empty(0)

    def rows(self, positions: Tensor) -> Tensor:
        """Of these `(n,)`: cosines of one half of a head, then its sines, `(n, head_dim)`."""
        count = -(-(int(positions.max()) + 1) // ROTARY_BLOCK) * ROTARY_BLOCK
        if count > len(self._table):
            both = self._module(torch.empty(0), torch.arange(count)[None])
            self._table = torch.cat([part[0].chunk(2, dim=-1)[0] for part in both], dim=-1)
        return self._table[positions]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the rows of a forward are kept, and what they see; see `Call` in the kernels."""

    buffer: Tensor
    capacity: int
    context: int
    visible: Tensor | None = None
    begins: Tensor | None = None
    columns: Tensor | None = None


class _NativeBatch(RaggedBatch):
    def __init__(
        self, run: Callable[[Tensor, Tensor, _Place, Needs, int], TargetOutput], buffer: Tensor
    ) -> None:
        self._run, self._buffer, self.capacity = run, buffer, buffer.shape[2]

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
        columns = begins + positions
        longest = int(positions.max()) + 1
        context = max(0, longest - len(tokens))
        place = _Place(self._buffer, self.capacity, context, begins=begins, columns=columns)
        return self._run(tokens, positions, place, needs or Needs(), len(tokens) - num_logits)


class NativeForward(Forward):
    """Runs a model that `why_not` has nothing against, in one call per forward.

    Attributes:
        kernels: the library that it calls.
    """

    kernels: ctypes.CDLL

    def __init__(
        self, model: PreTrainedModel, kernels: ctypes.CDLL, codes: Codes | None = None
    ) -> None:
        """Pack the model's matrices; its linear modules become parts of them.

        Args:
            codes: of its matrices; None = they stay in bfloat16.
        """
        self.kernels = kernels
        self._codes = codes
        self._held: list[Any] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._rotary = _RotaryTable(_base(model).rotary_emb)
        self._layers = (_Layer * len(_base(model).layers))()
        self._model: Any = self._describe(model)
        self._lm_head: Any = model.get_output_embeddings()
        self.name = "native" if codes is None else f"native, q{codes.bits}"

    # ---- weights

    def _describe(self, model: PreTrainedModel) -> _Model:
        base, config = _base(model), model.config.get_text_config()
        struct: Any
        for i, (struct, layer) in enumerate(zip(self._layers, base.layers, strict=True)):
            attention, mlp, at = layer.self_attn, layer.mlp, f"layers.{i}"
            struct.qkv = self._stack(attention, ["q_proj", "k_proj", "v_proj"], at)
            struct.out = self._stack(attention, ["o_proj"], at)
            struct.gate_up = self._stack(mlp, ["gate_proj", "up_proj"], at)
            struct.down = self._stack(mlp, ["down_proj"], at)
            struct.input_norm = self._address(layer.input_layernorm)
            struct.mlp_norm = self._address(layer.post_attention_layernorm)
            struct.query_norm = self._address(getattr(attention, "q_norm", None))
            struct.key_norm = self._address(getattr(attention, "k_norm", None))
        attention = base.layers[0].self_attn
        return _Model(
            len(base.layers),
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            config.intermediate_size,
            torch.get_num_threads(),
            len(base.embed_tokens.weight),
            base.norm.variance_epsilon,
            attention.scaling,
            self._layers,
            self._address(base.norm),
            self._address(base.embed_tokens),
            self._stack(
                model, ["lm_head"], "", keep=self._codes is None or self._codes.keeps(model.lm_head)
            ),
            None,
        )

    def _stack(
        self, owner: Any, names: Sequence[str], at: str, *, keep: bool = False
    ) -> MatrixStruct:
        """One matrix of several linear modules, which become its parts."""
        linears = [getattr(owner, name) for name in names]
        weights = [linear.weight.detach() for linear in linears]
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = zip(linears, weights, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if x.bias is None else x.bias for x, w in parts])
        whole: Tensor | Blocks
        if self._codes is None:
            whole = torch.cat(weights)
        else:
            named = zip(names, linears, strict=True)
            whole = Blocks.joined([self._codes.of(f"{at}.{name}", one) for name, one in named])
        matrix = Matrix.of(whole, bias)
        self._held.append(matrix)
        sizes = [linear.out_features for linear in linears]
        for name, linear, part in zip(names, linears, matrix.split(sizes), strict=True):
            setattr(owner, name, NativeLinear(linear, self.kernels, part, keep=keep))
        return matrix.struct

    def _address(self, module: Any) -> int | None:
        """Of a module's weight, which is held."""
        if module is None:
            return None
        weight: Tensor = module.weight.detach()
        self._held.append(weight)
        return weight.data_ptr()

    # ---- forwards

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> TargetOutput:
        model = self._model
        assert model is not None
        buffer = cache.whole(model.kv_heads, model.head_dim, torch.bfloat16)
        first = len(tokens) - 1 if last_only else 0
        if visible is not None:
            visible = visible.contiguous()
        place = _Place(buffer, cache.capacity, cache.length, visible=visible)
        return self._run(tokens, positions, place, needs, first)

    def output(self, hidden: Tensor) -> Tensor:
        rows = hidden.to(torch.bfloat16).reshape(-1, hidden.shape[-1])
        logits: Tensor = self._lm_head.float_product(rows).unflatten(0, hidden.shape[:-1])
        return logits

    def ragged_batch(self, capacity: int) -> RaggedBatch:
        model = self._model
        assert model is not None
        shape = (2 * model.num_layers, model.kv_heads, capacity, model.head_dim)
        return _NativeBatch(self._run, torch.empty(shape, dtype=torch.bfloat16))

    def _run(
        self, tokens: Tensor, positions: Tensor, place: _Place, needs: Needs, first: int
    ) -> TargetOutput:
        """One forward; logits of the rows from `first` on."""
        model = self._model
        assert model is not None
        n, hidden = len(tokens), model.hidden
        tokens = tokens.contiguous()
        rotary = self._rotary.rows(positions)
        taps = torch.tensor(needs.layers, dtype=torch.int32)
        tapped = torch.empty(n, len(needs.layers) * hidden, dtype=torch.bfloat16)
        normed = torch.empty(n, hidden, dtype=torch.bfloat16)
        logits = torch.empty(n - first, model.lm_head.out)
        totals, best = torch.empty(n - first), torch.empty(n - first, dtype=torch.int64)
        model.threads = torch.get_num_threads()

        def address(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        call = _Call(
            n=n,
            context=place.context,
            visible=address(place.visible),
            capacity=place.capacity,
            begins=address(place.begins),
            columns=address(place.columns),
            first_logit=first,
            num_taps=len(needs.layers),
            tokens=address(tokens),
            rotary=address(rotary),
            cache=address(place.buffer),
            taps=address(taps),
            tapped=address(tapped),
            normed=address(normed),
            logits=address(logits),
            log_totals=address(totals),
            best=address(best),
            scratch=self._room(model, n, place.context + n),
        )
        self.kernels.forward(ctypes.byref(model), ctypes.byref(call))
        return TargetOutput(
            logits[:, : model.vocab],
            normed if needs.hidden else None,
            tapped if needs.layers else None,
            totals,
            best,
        )

    def _room(self, model: Any, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = self.kernels.scratch_bytes(ctypes.byref(model), n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT

    def close(self) -> None:
        self._model = self._lm_head = None
        self._held.clear()
        self._scratch = torch.empty(0, dtype=torch.uint8)
