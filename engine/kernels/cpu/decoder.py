"""A decoder of packed matrices that `native.cpp` runs in one call: a target, or a draft head.

A row's results are the same, bit by bit, whatever rows are computed with it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.operators import Matrix, MatrixStruct
from engine.proposal import TargetOutput

ROTARY_BLOCK = 2048
"""The table of rotary positions grows to the next multiple of this many."""
ALIGNMENT = 64


NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm", "query_norm", "key_norm")
ACTIVATIONS = ("silu", "gelu_tanh")


class _LayerStruct(Structure):
    _fields_ = [
        ("qkv", MatrixStruct * 3),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct * 2),
        ("down", MatrixStruct),
        *((name, c_void_p) for name in NORMS),
        *((name, c_int32) for name in ("rotary", "window")),
    ]


class _FactorsStruct(Structure):
    _fields_ = [
        (name, c_float)
        for name in ("embedding", "query", "residual", "logits", "score_cap", "logit_cap")
    ]


class _HeadInputStruct(Structure):
    _fields_ = [
        ("joint", MatrixStruct),
        *((name, c_void_p) for name in ("embedding_norm", "hidden_norm")),
        *((name, c_int32) for name in ("normed_input", "unused")),
    ]


class _ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "width", "threads", "vocab")),
        *((name, c_int32) for name in ("activation", "rotated", "whole_norms")),
        ("eps", c_float),
        ("factors", _FactorsStruct),
        ("unused", c_int32),
        ("layers", POINTER(_LayerStruct)),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("packed_embedding", MatrixStruct),
        ("lm_head", MatrixStruct),
        ("head_input", POINTER(_HeadInputStruct)),
    ]


class _CallStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "context", "num_masked", "unused")),
        ("visible", c_void_p),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("begins", "columns")),
        *((name, c_int32) for name in ("first_logit", "num_taps")),
        *((name, c_void_p) for name in ("tokens", "states", "rotary")),
        ("rotary_stride", c_int64),
        ("cache", c_void_p),
        *((name, c_void_p) for name in ("taps", "tapped", "normed", "logits")),
        *((name, c_void_p) for name in ("logsumexp", "best", "scratch")),
    ]


class _ChainStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("levels", "feeds_normed")),
        ("min_log_prob", c_float),
        ("unused", c_int32),
        *((name, c_void_p) for name in ("ids", "tokens", "log_probs")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A decoder layer: matrices, and weights of norms in float32.

    Attributes:
        qkv: query, key and value, in one matrix or in three; gate_up: gate and up.
        input_norm, attention_norm, mlp_norm, output_norm: `(hidden,)` before and after attention,
            before and after the MLP; None = none.
        query_norm, key_norm: `(head_dim,)`, per head, or of all heads at once; None = none.
        rotary: which table of rotary positions; -1 = its heads have no positions.
        window: keys that a row sees at most, itself included; 0 = all.
    """

    qkv: Sequence[Matrix]
    out: Matrix
    gate_up: Sequence[Matrix]
    down: Matrix
    input_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    output_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rotary: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """What the parts of a decoder are multiplied by.

    Attributes:
        query: before it meets the keys.
        residual: of what attention and MLP add.
        score_cap, logit_cap: `cap · tanh(x / cap)` of attention's scores and of logits; 0 = none.
    """

    query: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HeadInput:
    """How a draft head joins the embedding of a token with a hidden state.

    Attributes:
        joint: makes of both, `2 hidden` wide, the first layer's input; None = they are what its
            `qkv` meets, and the hidden state is its input.
        embedding_norm, hidden_norm: `(hidden,)`, applied before; None = none.
        normed_input: without `joint`: the first layer's input is the normalised hidden state.
    """

    joint: Matrix | None
    embedding_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    normed_input: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """What a decoder is made of.

    Attributes:
        norm: `(hidden,)` float32, before the output matrix; None = none.
        embedding: `(tokens, hidden)` bfloat16, or packed.
        lm_head: None = no logits.
        vocab: logits of a row; the matrix may be filled up.
        rotary: count → `(tables, count, head_dim)` float32: cosines of one half of what is turned
            of a head, then its sines.
        rotated: how much of a head is turned.
        activation: one of `ACTIVATIONS`.
        whole_norms: whether norms of queries and keys are of all heads at once.
    """

    layers: Sequence[Layer]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    eps: float
    factors: Factors
    norm: Tensor | None
    embedding: Tensor | Matrix
    lm_head: Matrix | None
    vocab: int
    rotary: Callable[[int], Tensor]
    rotated: int
    activation: str = "silu"
    whole_norms: bool = False
    head_input: HeadInput | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVSlots:
    """Where the rows of a forward are kept, and what they see; see `NewRows` in the kernels.

    Attributes:
        buffer: `(2 · layers, kv_heads, capacity, head_dim)` bfloat16.
        context: rows in it before the new ones.
        visible: `(n, w)` bool, which of the last w rows, the new ones included, each of the n sees
            beside all earlier ones; None = all before it.
        begins, columns: of many texts at once: `(n,)` int64, where a row's text begins in the
            buffer, and its own place.
    """

    buffer: Tensor
    context: int
    visible: Tensor | None = None
    begins: Tensor | None = None
    columns: Tensor | None = None


class Decoder:
    def __init__(self, kernels: ctypes.CDLL, weights: DecoderWeights) -> None:
        self.kernels, self.weights = kernels, weights
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._rotary = torch.empty(0, 0, 0)
        layers = (_LayerStruct * len(weights.layers))()
        for struct, layer in zip(layers, weights.layers, strict=True):
            for i, matrix in enumerate(layer.qkv):
                struct.qkv[i] = matrix.struct
            for i, matrix in enumerate(layer.gate_up):
                struct.gate_up[i] = matrix.struct
            struct.out, struct.down = layer.out.struct, layer.down.struct
            for name in NORMS:
                setattr(struct, name, _address(getattr(layer, name)))
            struct.rotary, struct.window = layer.rotary, layer.window
        head_input = weights.head_input and _HeadInputStruct(
            MatrixStruct() if weights.head_input.joint is None else weights.head_input.joint.struct,
            _address(weights.head_input.embedding_norm),
            _address(weights.head_input.hidden_norm),
            weights.head_input.normed_input,
        )
        self._model = _ModelStruct(
            len(weights.layers),
            weights.hidden,
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            weights.width,
            torch.get_num_threads(),
            weights.vocab,
            ACTIVATIONS.index(weights.activation),
            weights.rotated,
            weights.whole_norms,
            weights.eps,
            _FactorsStruct(**asdict(weights.factors)),
            0,
            layers,
            _address(weights.norm),
            None if isinstance(weights.embedding, Matrix) else _address(weights.embedding),
            weights.embedding.struct if isinstance(weights.embedding, Matrix) else MatrixStruct(),
            MatrixStruct() if weights.lm_head is None else weights.lm_head.struct,
            head_input and ctypes.pointer(head_input),
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
            states: `(n, hidden)` bfloat16 that are joined with the tokens.
            taps: layers whose input is wanted; their number = after the last.
            num_logits: the last so many rows get logits; None = all.
        """
        call, output, _buffers = self._call(
            tokens, self._rotary_rows(positions), slots, states, taps, num_logits
        )
        call.scratch = self._room(len(tokens), slots.context + len(tokens))
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
        """Greedy drafts after n new rows, one after the other: tokens `(m,)` and log-probs.

        The rows of all but the last token drafted are stored behind the new ones.

        Args:
            tokens: `(n,)` int64; the first is at `position`.
            slots: with room for `levels` rows more.
            levels: most tokens; fewer where a path is less likely than `min_prob`.
            states: `(n, hidden)` that are joined with the tokens; later ones are joined with the
                last layer's output, or with the normalised one (`feeds_normed`).
            ids: `(vocabulary,)` int64, a token per row of the output matrix; None = its number.
        """
        n = len(tokens)
        rotary = self._rotary_rows(torch.arange(position, position + n + levels))
        taps = () if states is None else (len(self.weights.layers),)
        call, _output, _buffers = self._call(tokens, rotary, slots, states, taps, 1)
        call.scratch = self._room(n, slots.context + n + levels)
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
    ) -> tuple[_CallStruct, TargetOutput, tuple[Tensor | None, ...]]:
        """What a forward is called with but its scratch memory, what it fills, what must live."""
        model, n, hidden = self._model, len(tokens), self.weights.hidden
        tokens = tokens.contiguous()
        visible = None if slots.visible is None else slots.visible.contiguous()
        states = None if states is None else states.to(torch.bfloat16).contiguous()
        tap_layers = torch.tensor(taps, dtype=torch.int32)
        tapped = torch.empty(n, len(taps) * hidden, dtype=torch.bfloat16)
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
            begins=_address(slots.begins),
            columns=_address(slots.columns),
            first_logit=n - count,
            num_taps=len(taps),
            tokens=_address(tokens),
            states=_address(states),
            rotary=_address(rotary),
            rotary_stride=rotary[0].numel(),
            cache=_address(slots.buffer),
            taps=_address(tap_layers),
            tapped=_address(tapped),
            normed=_address(normed),
            logits=_address(logits),
            logsumexp=_address(totals),
            best=_address(best),
        )
        output = TargetOutput(logits[:, : model.vocab], normed, tapped, totals, best)
        return call, output, (tokens, rotary, visible, states, tap_layers, logits)

    def _rotary_rows(self, positions: Tensor) -> Tensor:
        """Rotary positions `(tables, n, head_dim)`, from tables that grow."""
        count = -(-(int(positions.max()) + 1) // ROTARY_BLOCK) * ROTARY_BLOCK
        if count > self._rotary.shape[1]:
            self._rotary = self.weights.rotary(count)
        return self._rotary[:, positions]

    def _room(self, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = self.kernels.scratch_bytes(ctypes.byref(self._model), n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
