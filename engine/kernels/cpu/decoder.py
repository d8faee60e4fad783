"""A decoder with packed matrices, a target or a draft head, run by `native.cpp` in one call.

A row's results are bit-identical, whatever rows are computed with it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.operators import Matrix, MatrixStruct, Struct, call, fields
from engine.model.cache import TreeCache
from engine.model.kv import KVBuffers
from engine.proposal import TargetOutput

ROTARY_BLOCK = 2048
"""The table of rotary positions grows to the next multiple of this many."""
ALIGNMENT = 64


class Layer(Struct):
    """A decoder layer: matrices, and weights of norms in float32.

    Fields:
        qkv: query, key and value, in one matrix or in three; gate_up: gate and up.
        input_norm, attention_norm, mlp_norm, output_norm: `(hidden,)` before and after attention,
            before and after the MLP; None = none.
        query_norm, key_norm: `(head_dim,)`, per head, or spanning all heads; None = none.
        rotary: index of its rotary table; -1 = no rotary positions.
        window: size of the sliding window, the row itself included; 0 = unlimited.
    """

    _fields_ = [
        ("qkv", MatrixStruct * 3),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct * 2),
        ("down", MatrixStruct),
        *fields(c_void_p, "input_norm attention_norm mlp_norm output_norm query_norm key_norm"),
        *fields(c_int32, "rotary window"),
    ]


class Factors(Struct):
    """Multipliers of a decoder's activations, and soft caps.

    Fields:
        query: of queries, such as 1 / sqrt(head_dim).
        residual: of the outputs of attention and MLP.
        score_cap, logit_cap: `cap · tanh(x / cap)` of attention scores and of logits; 0 = none.
    """

    _fields_ = fields(c_float, "embedding query residual logits score_cap logit_cap")


class HeadInput(Struct):
    """How a draft head joins the embedding of a token with a hidden state.

    Fields:
        fusion: `(hidden, 2 hidden)`, maps both to the first layer's input; without it, the layer's
            `qkv` reads both, and the residual stream is the hidden state.
        embedding_norm, hidden_norm: `(hidden,)`, applied before; None = none.
        normed_input: without `fusion`: the residual stream is the normalised hidden state.
    """

    _fields_ = [
        ("fusion", MatrixStruct),
        *fields(c_void_p, "embedding_norm hidden_norm"),
        ("normed_input", c_int32),
    ]


class _ModelStruct(Struct):
    _fields_ = [
        *fields(c_int32, "num_layers hidden heads kv_heads head_dim intermediate threads vocab"),
        *fields(c_int32, "activation rotary_dim all_head_norms"),
        ("eps", c_float),
        ("factors", Factors),
        ("layers", POINTER(Layer)),
        *fields(c_void_p, "norm embedding"),
        ("packed_embedding", MatrixStruct),
        ("lm_head", MatrixStruct),
        ("head_input", POINTER(HeadInput)),
    ]


class _CallStruct(Struct):
    _fields_ = [
        *fields(c_int32, "n context num_masked"),
        ("visible", c_void_p),
        ("capacity", c_int64),
        *fields(c_void_p, "text_starts columns"),
        *fields(c_int32, "first_logit num_taps"),
        *fields(c_void_p, "tokens states rotary"),
        ("rotary_stride", c_int64),
        *fields(c_void_p, "cache taps tap_states normed logits logsumexp best scratch"),
    ]


class _ChainStruct(Struct):
    _fields_ = [
        *fields(c_int32, "levels feeds_normed"),
        ("min_log_prob", c_float),
        *fields(c_void_p, "ids tokens log_probs"),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A decoder's weights and sizes.

    Attributes:
        intermediate: width of the MLP.
        norm: `(hidden,)` float32, before the output matrix; None = none.
        embedding: `(tokens, hidden)` bfloat16, or packed.
        vocab: logits per row; the matrix may be padded.
        rotary: count → `(tables, count, head_dim)` float32, per position the cosines of half of
            `rotary_dim`, then the sines, padded.
        rotary_dim: the rotated part of a head.
        activation: `Activation` in the kernels; 0 = SiLU.
        all_head_norms: whether query and key norms span all heads.
    """

    layers: Sequence[Layer]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    factors: Factors
    norm: Tensor | None
    embedding: Tensor | Matrix
    lm_head: Matrix
    vocab: int
    rotary: Callable[[int], Tensor]
    rotary_dim: int
    activation: int = 0
    all_head_norms: bool = False
    head_input: HeadInput | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVSlots:
    """Where a forward's rows are stored, and which keys they see; see `NewRows` in the kernels.

    Attributes:
        buffer: `(2 · layers, kv_heads, capacity, head_dim)` bfloat16.
        context: rows in it before the new ones.
        visible: `(n, w)` bool, which of the last w rows, the new ones included, each of the n sees
            besides all earlier ones; None = causal.
        text_starts, columns: for many texts at once: `(n,)` int64, the buffer's columns where a
            row's text begins and where the row is stored.
    """

    buffer: Tensor
    context: int
    visible: Tensor | None = None
    text_starts: Tensor | None = None
    columns: Tensor | None = None


class Decoder:
    def __init__(self, kernels: ctypes.CDLL, weights: DecoderWeights) -> None:
        self.kernels, self.weights = kernels, weights
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._rotary = torch.empty(0, 0, 0)
        values = {one.name: getattr(weights, one.name) for one in dataclasses.fields(weights)}
        del values["rotary"]
        if isinstance(weights.embedding, Matrix):
            values["packed_embedding"] = values.pop("embedding")
        values |= {
            "num_layers": len(weights.layers),
            "layers": (Layer * len(weights.layers))(*weights.layers),
            "head_input": weights.head_input and ctypes.pointer(weights.head_input),
        }
        self._model = _ModelStruct(**values)

    def buffer(self, kv: KVBuffers) -> Tensor:
        """The buffer of `KVSlots`, allocated on the first call."""
        return kv.shared(self.weights.kv_heads, self.weights.head_dim)

    def behind(self, cache: TreeCache, visible: Tensor | None = None) -> KVSlots:
        """Slots behind a cache's committed rows, where there is room; `visible` as in `KVSlots`."""
        return KVSlots(self.buffer(cache.kv), cache.length, visible)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: KVSlots,
        *,
        states: Tensor | None = None,
        taps: Sequence[int] = (),
        num_logits: int,
    ) -> TargetOutput:
        """One forward over n new rows; their keys and values are stored.

        Args:
            tokens, positions: `(n,)` int64.
            states: `(n, hidden)` bfloat16, hidden states beside the tokens, for a draft head.
            taps: layers whose inputs are returned; `num_layers` = the last layer's output.
            num_logits: number of last rows that get logits.
        """
        rotary = self._rotary_rows(positions)
        arguments, output = self._arguments(tokens, rotary, slots, states, taps, num_logits)
        arguments.scratch = self._scratch_address(len(tokens), slots.context + len(tokens))
        call(self.kernels.forward, self._model, arguments)
        return output

    def chain(
        self,
        tokens: Tensor,
        slots: KVSlots,
        *,
        levels: int,
        min_prob: float = 0.0,
        states: Tensor | None = None,
        feeds_normed: bool = False,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft a greedy chain after n new rows: tokens `(m,)` and log-probs.

        The rows of all but the last drafted token are stored after the new ones.

        Args:
            tokens: `(n,)` int64.
            slots: of the text's next rows, with capacity for `levels` more.
            levels: maximum number of tokens; fewer once the path's probability is below `min_prob`.
            states: `(n, hidden)`, hidden states beside the tokens; those beside drafted tokens are
                the last layer's output, or the normalised one (`feeds_normed`).
            ids: `(vocabulary,)` int64, the token of each row of the output matrix; None = index.
        """
        n, end = len(tokens), slots.context + len(tokens) + levels
        rotary = self._rotary_rows(torch.arange(slots.context, end))
        taps = () if states is None else (len(self.weights.layers),)
        arguments, _ = self._arguments(tokens, rotary, slots, states, taps, 1)
        arguments.scratch = self._scratch_address(n, end)
        drafted, log_probs = torch.empty(levels, dtype=torch.int64), torch.empty(levels)
        chain = _ChainStruct(
            levels=levels,
            feeds_normed=feeds_normed,
            min_log_prob=math.log(min_prob) if min_prob > 0 else -math.inf,
            ids=ids,
            tokens=drafted,
            log_probs=log_probs,
        )
        count = call(self.kernels.draft_chain, self._model, arguments, chain)
        return drafted[:count], log_probs[:count]

    def _arguments(
        self,
        tokens: Tensor,
        rotary: Tensor,
        slots: KVSlots,
        states: Tensor | None,
        taps: Sequence[int],
        num_logits: int,
    ) -> tuple[_CallStruct, TargetOutput]:
        """A forward's arguments, without scratch memory, and the output it will fill."""
        model, n, hidden = self._model, len(tokens), self.weights.hidden
        tokens = tokens.contiguous()
        visible = None if slots.visible is None else slots.visible.contiguous()
        states = None if states is None else states.to(torch.bfloat16).contiguous()
        tap_layers = torch.tensor(taps, dtype=torch.int32)
        tap_states = torch.empty(n, len(taps) * hidden, dtype=torch.bfloat16)
        normed = torch.empty(n, hidden, dtype=torch.bfloat16)
        logits, totals = torch.empty(num_logits, model.lm_head.out), torch.empty(num_logits)
        best = torch.empty(num_logits, dtype=torch.int64)
        model.threads = torch.get_num_threads()
        arguments = _CallStruct(
            n=n,
            context=slots.context,
            num_masked=0 if visible is None else visible.shape[1] - n,
            visible=visible,
            capacity=slots.buffer.shape[2],
            text_starts=slots.text_starts,
            columns=slots.columns,
            first_logit=n - num_logits,
            num_taps=len(taps),
            tokens=tokens,
            states=states,
            rotary=rotary,
            rotary_stride=rotary[0].numel(),
            cache=slots.buffer,
            taps=tap_layers,
            tap_states=tap_states,
            normed=normed,
            logits=logits,
            logsumexp=totals,
            best=best,
        )
        output = TargetOutput(logits[:, : model.vocab], normed, tap_states, totals, best)
        return arguments, output

    def _rotary_rows(self, positions: Tensor) -> Tensor:
        """Rows `(tables, n, head_dim)` of the rotary tables, which grow as needed."""
        count = -(-(int(positions.max()) + 1) // ROTARY_BLOCK) * ROTARY_BLOCK
        if count > self._rotary.shape[1]:
            self._rotary = self.weights.rotary(count)
        return self._rotary[:, positions]

    def _scratch_address(self, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = call(self.kernels.scratch_bytes, self._model, n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
