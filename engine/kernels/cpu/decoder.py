"""A decoder with packed matrices, a target or a draft head, run by `native.cpp` in one call.

A row's results are bit-identical, whatever rows are computed with it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.operators import Matrix, MatrixStruct, fields
from engine.proposal import TargetOutput

ROTARY_BLOCK = 2048
"""The table of rotary positions grows to the next multiple of this many."""
ALIGNMENT = 64
ACTIVATIONS = ("silu", "gelu_tanh")


class Layer(Structure):
    """A decoder layer: matrices, and weights of norms in float32.

    Args:
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

    def __init__(
        self,
        qkv: Sequence[Matrix],
        out: Matrix,
        gate_up: Sequence[Matrix],
        down: Matrix,
        *,
        input_norm: Tensor | None = None,
        attention_norm: Tensor | None = None,
        mlp_norm: Tensor | None = None,
        output_norm: Tensor | None = None,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        rotary: int = 0,
        window: int = 0,
    ) -> None:
        norms = (input_norm, attention_norm, mlp_norm, output_norm, query_norm, key_norm)
        self._alive = (qkv, out, gate_up, down, norms)  # the struct holds their addresses
        super().__init__(
            tuple(matrix.struct for matrix in qkv),
            out.struct,
            tuple(matrix.struct for matrix in gate_up),
            down.struct,
            *map(_address, norms),
            rotary,
            window,
        )


class Factors(Structure):
    """Multipliers of a decoder's activations, and soft caps.

    Args:
        query: of queries, such as 1 / sqrt(head_dim).
        residual: of the outputs of attention and MLP.
        score_cap, logit_cap: `cap · tanh(x / cap)` of attention scores and of logits; 0 = none.
    """

    _fields_ = fields(c_float, "embedding query residual logits score_cap logit_cap")

    def __init__(
        self,
        query: float,
        *,
        embedding: float = 1.0,
        residual: float = 1.0,
        logits: float = 1.0,
        score_cap: float = 0.0,
        logit_cap: float = 0.0,
    ) -> None:
        super().__init__(embedding, query, residual, logits, score_cap, logit_cap)


class HeadInput(Structure):
    """How a draft head joins the embedding of a token with a hidden state.

    Args:
        fusion: `(hidden, 2 hidden)`, maps both to the first layer's input; None = its `qkv` reads
            both, and the residual stream is the hidden state.
        embedding_norm, hidden_norm: `(hidden,)`, applied before; None = none.
        normed_input: without `fusion`: the residual stream is the normalised hidden state.
    """

    _fields_ = [
        ("fusion", MatrixStruct),
        *fields(c_void_p, "embedding_norm hidden_norm"),
        ("normed_input", c_int32),
    ]

    def __init__(
        self,
        fusion: Matrix | None,
        embedding_norm: Tensor | None = None,
        hidden_norm: Tensor | None = None,
        *,
        normed_input: bool = False,
    ) -> None:
        self._alive = (fusion, embedding_norm, hidden_norm)
        norms = map(_address, (embedding_norm, hidden_norm))
        super().__init__(_struct(fusion), *norms, normed_input)


class _ModelStruct(Structure):
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


class _CallStruct(Structure):
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


class _ChainStruct(Structure):
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
        lm_head: None = no logits.
        vocab: logits per row; the matrix may be padded.
        rotary: count → `(tables, count, head_dim)` float32, per position the cosines of half of
            `rotary_dim`, then the sines, padded.
        rotary_dim: the rotated part of a head.
        activation: one of `ACTIVATIONS`.
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
    lm_head: Matrix | None
    vocab: int
    rotary: Callable[[int], Tensor]
    rotary_dim: int
    activation: str = "silu"
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
        embedding = weights.embedding if isinstance(weights.embedding, Tensor) else None
        packed = weights.embedding if isinstance(weights.embedding, Matrix) else None
        self._model = _ModelStruct(
            len(weights.layers),
            weights.hidden,
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            weights.intermediate,
            torch.get_num_threads(),
            weights.vocab,
            ACTIVATIONS.index(weights.activation),
            weights.rotary_dim,
            weights.all_head_norms,
            weights.eps,
            weights.factors,
            (Layer * len(weights.layers))(*weights.layers),
            _address(weights.norm),
            _address(embedding),
            _struct(packed),
            _struct(weights.lm_head),
            weights.head_input and ctypes.pointer(weights.head_input),
        )

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: KVSlots,
        *,
        states: Tensor | None = None,
        taps: Sequence[int] = (),
        num_logits: int | None = None,
    ) -> TargetOutput:
        """One forward over n new rows; their keys and values are stored.

        Args:
            tokens, positions: `(n,)` int64.
            states: `(n, hidden)` bfloat16, hidden states beside the tokens, for a draft head.
            taps: layers whose inputs are returned; `num_layers` = the last layer's output.
            num_logits: number of last rows that get logits; None = all.
        """
        rotary = self._rotary_rows(positions)
        call, output = self._call(tokens, rotary, slots, states, taps, num_logits)
        call.scratch = self._scratch_address(len(tokens), slots.context + len(tokens))
        self.kernels.forward(ctypes.byref(self._model), ctypes.byref(call))
        return output

    def chain(
        self,
        tokens: Tensor,
        position: int,
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
            tokens: `(n,)` int64; the first is at `position`.
            slots: with capacity for `levels` more rows.
            levels: maximum number of tokens; fewer once the path's probability is below `min_prob`.
            states: `(n, hidden)`, hidden states beside the tokens; those beside drafted tokens are
                the last layer's output, or the normalised one (`feeds_normed`).
            ids: `(vocabulary,)` int64, the token of each row of the output matrix; None = index.
        """
        n = len(tokens)
        rotary = self._rotary_rows(torch.arange(position, position + n + levels))
        taps = () if states is None else (len(self.weights.layers),)
        call, _ = self._call(tokens, rotary, slots, states, taps, 1)
        call.scratch = self._scratch_address(n, slots.context + n + levels)
        drafted, log_probs = torch.empty(levels, dtype=torch.int64), torch.empty(levels)
        chain = _ChainStruct(
            levels=levels,
            feeds_normed=feeds_normed,
            min_log_prob=math.log(min_prob) if min_prob > 0 else -math.inf,
            ids=_address(ids),
            tokens=_address(drafted),
            log_probs=_address(log_probs),
        )
        count = self.kernels.draft_chain(
            ctypes.byref(self._model), ctypes.byref(call), ctypes.byref(chain)
        )
        return drafted[:count], log_probs[:count]

    def _call(
        self,
        tokens: Tensor,
        rotary: Tensor,
        slots: KVSlots,
        states: Tensor | None,
        taps: Sequence[int],
        num_logits: int | None,
    ) -> tuple[_CallStruct, TargetOutput]:
        """A forward's arguments, without scratch memory, and the output it will fill."""
        model, n, hidden = self._model, len(tokens), self.weights.hidden
        tokens = tokens.contiguous()
        visible = None if slots.visible is None else slots.visible.contiguous()
        states = None if states is None else states.to(torch.bfloat16).contiguous()
        tap_layers = torch.tensor(taps, dtype=torch.int32)
        tap_states = torch.empty(n, len(taps) * hidden, dtype=torch.bfloat16)
        normed = torch.empty(n, hidden, dtype=torch.bfloat16)
        count = n if num_logits is None else num_logits
        logits = torch.empty(count, model.lm_head.out)
        totals, best = torch.empty(count), torch.empty(count, dtype=torch.int64)
        model.threads = torch.get_num_threads()
        call = _CallStruct(
            n=n,
            context=slots.context,
            num_masked=0 if visible is None else visible.shape[1] - n,
            visible=_address(visible),
            capacity=slots.buffer.shape[2],
            text_starts=_address(slots.text_starts),
            columns=_address(slots.columns),
            first_logit=n - count,
            num_taps=len(taps),
            tokens=_address(tokens),
            states=_address(states),
            rotary=_address(rotary),
            rotary_stride=rotary[0].numel(),
            cache=_address(slots.buffer),
            taps=_address(tap_layers),
            tap_states=_address(tap_states),
            normed=_address(normed),
            logits=_address(logits),
            logsumexp=_address(totals),
            best=_address(best),
        )
        output = TargetOutput(logits[:, : model.vocab], normed, tap_states, totals, best)
        call.alive = output, tokens, rotary, visible, states, tap_layers  # it holds their addresses
        return call, output

    def _rotary_rows(self, positions: Tensor) -> Tensor:
        """Rows `(tables, n, head_dim)` of the rotary tables, which grow as needed."""
        count = -(-(int(positions.max()) + 1) // ROTARY_BLOCK) * ROTARY_BLOCK
        if count > self._rotary.shape[1]:
            self._rotary = self.weights.rotary(count)
        return self._rotary[:, positions]

    def _scratch_address(self, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = self.kernels.scratch_bytes(ctypes.byref(self._model), n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _struct(matrix: Matrix | None) -> MatrixStruct:
    return MatrixStruct() if matrix is None else matrix.struct
