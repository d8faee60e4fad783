"""A decoder of packed matrices that `native.cpp` runs in one call: a target, or a draft head.

A row's results are the same, bit by bit, whatever rows are computed with it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.operators import Matrix, MatrixStruct
from engine.proposal import TargetOutput

ROTARY_BLOCK = 2048
"""The table of rotary positions grows to the next multiple of this many."""
ALIGNMENT = 64


class _LayerStruct(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
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
        ("eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(_LayerStruct)),
        ("norm", c_void_p),
        ("embedding", c_void_p),
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
        *((name, c_void_p) for name in ("tokens", "states", "rotary", "cache")),
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
    """A decoder layer: matrices, and weights of norms in bfloat16.

    Attributes:
        qkv: query, key and value; gate_up: gate and up.
        input_norm: `(hidden,)`; None = the layer's input meets `qkv` as it is.
        query_norm, key_norm: `(head_dim,)`, per head, or None.
    """

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Tensor | None
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


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
        scale: of query times key.
        norm: `(hidden,)` before the output matrix; None = none.
        embedding: `(tokens, hidden)` bfloat16.
        lm_head: None = no logits.
        vocab: logits of a row; the matrix may be filled up.
        rotary: count → cosines of one half of a head, then its sines, `(count, head_dim)` float32.
    """

    layers: Sequence[Layer]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    eps: float
    scale: float
    norm: Tensor | None
    embedding: Tensor
    lm_head: Matrix | None
    vocab: int
    rotary: Callable[[int], Tensor]
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
        self._rotary = torch.empty(0)
        layers = (_LayerStruct * len(weights.layers))()
        for struct, layer in zip(layers, weights.layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
            for name in ("input_norm", "mlp_norm", "query_norm", "key_norm"):
                setattr(struct, name, _address(getattr(layer, name)))
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
            weights.eps,
            weights.scale,
            layers,
            _address(weights.norm),
            _address(weights.embedding),
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
        """Rotary positions `(n, head_dim)`, from a table that grows."""
        count = -(-(int(positions.max()) + 1) // ROTARY_BLOCK) * ROTARY_BLOCK
        if count > len(self._rotary):
            self._rotary = self.weights.rotary(count)
        return self._rotary[positions]

    def _room(self, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = self.kernels.scratch_bytes(ctypes.byref(self._model), n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
