"""Verifies by CUDA graphs of transformers' own modules, one per bucket of rows and context.

    rows 60, context 700 of 1024   →   the graph for 64 rows and 768 rows of context

Graphs are captured when first needed. Prompts run one operator at a time. So does everything once a
capture fails, because the model waits for the device or memory is exhausted; this is logged once.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from engine.kernels.cuda.graphs import CaptureError, CudaGraphs, Graph
from engine.model.backend import Backend
from engine.model.cache import TreeCache
from engine.model.clock import clock_stopped
from engine.model.forward import Forward, MaskBuilder, ModulesForward, Rows
from engine.model.kv import KVBuffers, at, context_bucket
from engine.model.recurrent import recurrent_layers
from engine.proposal import Needs, TargetOutput

LOG = logging.getLogger(__name__)
GRAPHS = "cuda_graphs"
"""Their key in the run log."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a graph; larger forwards are prompts, or compute-bound anyway."""
MAX_PREFILL_ROWS = 8
"""Rows of text up to which a graph runs them: those that a draft model has not read yet."""
MAX_PRODUCT_ROWS = 128
"""Query rows per key/value head up to which attention is computed by matrix products."""
MASKED_SCORE = -30000.0
"""Added to masked scores; finite, so that every row has a maximum."""
MAX_GRAPHS = 32
"""The most graphs kept, those used last; each holds its results, up to tens of megabytes."""


def row_bucket(rows: int) -> int | None:
    """The smallest bucket for this many rows; None if there is none.

    Example: 5 → 6, 60 → 64, 200 → None.
    """
    return next((bucket for bucket in ROWS if bucket >= rows), None)


class StaticInputs:
    """A graph's inputs, in tensors at fixed addresses.

    The rows of a forward follow the cache's `length` committed ones: first the real ones, then
    padding. Padding sees what its neighbours see, is seen by none, and its keys and values are
    overwritten later.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._visible = torch.zeros(rows, rows, dtype=torch.bool, device=device)
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._order = torch.arange(rows, device=device)
        self._causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        self._loaded: tuple[Tensor | None, int] | None = None

    def load(self, tokens: Tensor, positions: Tensor, visible: Tensor | None, length: int) -> None:
        """Take the values of one forward over up to `rows` rows; `visible` None = causal."""
        n = len(tokens)
        self.tokens[:n].copy_(tokens)
        self.positions[:n].copy_(positions)
        self._length.fill_(length)
        # With a static tree `visible` is the same tensor in every step, and nothing is copied.
        if self._loaded is None or self._loaded[0] is not visible or self._loaded[1] != n:
            self._loaded = (visible, n)
            self._visible.zero_()
            self._visible[:n, :n].copy_(self._causal[:n, :n] if visible is None else visible)

    # ---- inside a graph

    def cache_positions(self) -> Tensor:
        """Rows of the cache where the forward's rows are stored, `(rows,)` int64."""
        return self._length + self._order

    def visible(self, context: int) -> Tensor:
        """Which of the cache's first `context` rows each row sees: `(rows, context)` bool."""
        offset = torch.arange(context, device=self._visible.device) - self._length
        columns = offset.clamp(0, self.rows - 1).expand(self.rows, context)
        new = self._visible.gather(1, columns) & (offset < self.rows)
        return new | (offset < 0)


class Bucket(NamedTuple):
    """The sizes and needs that a graph is captured for."""

    rows: int
    context: int
    needs: Needs


class GraphRunner(Forward):
    """Runs a supported model, by graphs where they fit.

    Graphs write keys and values to fixed addresses, so their buffers outlive a generation: they are
    lent to one cache after another, and zeroed when the next one begins.
    """

    def __init__(self, model: transformers.PreTrainedModel, capturer: CudaGraphs) -> None:
        self._modules = ModulesForward(model)
        name = f"{self._modules.backend.name}, {capturer.name}"
        self.backend = Backend(name, {GRAPHS: "used"})
        self._dtype = model.dtype
        self._device = torch.device(model.device)
        self._capturer = capturer
        self._has_failed = False
        config = model.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 1))
        self._groups = heads // int(getattr(config, "num_key_value_heads", None) or heads)
        self._kv = KVBuffers(int(config.num_hidden_layers), 0, zeroed=True)
        self._lent: weakref.ref[TreeCache] | None = None
        self._inputs: dict[int, StaticInputs] = {}
        self._graphs: dict[Bucket, Graph[TargetOutput]] = {}
        self._layout: tuple[int, ...] = ()
        self._cache: TreeCache | None = None

    # ---- what it is

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured buckets, the least recently used first."""
        return tuple(self._graphs)

    # ---- forwards

    @torch.inference_mode()
    def new_cache(self, rows: int) -> TreeCache | None:
        """An empty cache on the graphs' buffers; None while another one is in use."""
        lent = None if self._lent is None else self._lent()
        if self._has_failed or (lent is not None and lent.kv is self._kv):
            return None
        capacity = context_bucket(rows)
        if capacity > self._kv.capacity:
            self._kv = self._kv.fresh(capacity)
        for tensor in self._kv.tensors:
            tensor.zero_()
        cache = TreeCache(self._kv.num_layers, kv=self._kv)
        self._lent = weakref.ref(cache)
        return cache

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        n, output = len(rows.tokens), None
        # The first forward allocates the buffers.
        if cache.kv is self._kv and cache.kv.tensors and not self._has_failed:
            bucket = self._bucket(n, cache, needs, prefill=last_only)
            if bucket is not None:
                if bucket.rows not in self._inputs:
                    self._inputs[bucket.rows] = StaticInputs(bucket.rows, self._device)
                self._inputs[bucket.rows].load(*rows, cache.length)
                output = self._replay(bucket, self._inputs[bucket.rows], cache)
        if output is None:
            return self._modules(rows, cache, needs, last_only=last_only)
        # Copies, since the next replay of any graph overwrites the results.
        return TargetOutput(
            output.logits[n - 1 if last_only else 0 : n].clone(),
            None if output.hidden is None else output.hidden[:n].clone(),
            None if output.layers is None else output.layers[:n].clone(),
        )

    def _bucket(self, n: int, cache: TreeCache, needs: Needs, *, prefill: bool) -> Bucket | None:
        """The bucket for n rows after the cache's; None where no graph is used."""
        rows = row_bucket(n)
        if rows is None or cache.length == 0 or (prefill and n > MAX_PREFILL_ROWS):
            return None
        context = context_bucket(cache.length + rows)
        cache.reserve(rows)
        return Bucket(rows, context, needs) if context <= cache.kv.capacity else None

    def _replay(
        self, bucket: Bucket, inputs: StaticInputs, cache: TreeCache
    ) -> TargetOutput | None:
        """Results of all rows of the bucket, in the graph's memory; None if capturing failed."""
        # Larger buffers may begin where smaller ones did; their strides differ.
        layout = (cache.kv.capacity, *(tensor.data_ptr() for tensor in cache.kv.tensors))
        if layout != self._layout:
            self._graphs.clear()
            self._layout = layout
        self._cache = cache
        try:
            graph = self._graphs.pop(bucket, None) or self._capture(bucket, inputs)
            self._graphs[bucket] = graph
            graph.replay()
            return graph.results
        except CaptureError as error:
            self._disable(str(error))
            return None
        finally:
            self._cache = None

    def _capture(self, bucket: Bucket, inputs: StaticInputs) -> Graph[TargetOutput]:
        """Capture a graph in place of the least recently used one, in time that is not counted."""
        with clock_stopped(self._device):
            graph = self._capturer.capture(functools.partial(self._run, bucket, inputs))
        if len(self._graphs) == MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _run(self, bucket: Bucket, inputs: StaticInputs) -> TargetOutput:
        """The function captured: a forward over the inputs and the current cache's buffers."""
        assert self._cache is not None
        mask = self._mask(inputs.visible(bucket.context))
        rows = Rows(inputs.tokens, inputs.positions)
        self._cache.plan = at(inputs.cache_positions(), bucket.context)
        try:
            return self._modules.masked(rows, mask, self._cache, bucket.needs, last_only=False)
        finally:
            self._cache.plan = None

    def _mask(self, visible: Tensor) -> Tensor:
        """The model's `attention_mask`: for few rows one that is added to the scores."""
        groups, dtype = self._groups, torch.float32
        if self._modules.adds_mask:
            groups, dtype = 1, self._dtype
        elif groups * len(visible) > MAX_PRODUCT_ROWS:
            return visible[None, None]
        mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, MASKED_SCORE)
        return mask.repeat(groups, 1)[None, None]

    def _disable(self, fault: str) -> None:
        self._has_failed = True
        self.backend = Backend(self._modules.backend.name, {GRAPHS: f"given up: {fault}"})
        self._release()
        LOG.warning("Verifying without %s from here on: %s", self._capturer.name, fault)

    def output(self, hidden: Tensor) -> Tensor:
        return self._modules.output(hidden)

    def close(self) -> None:
        self._release()
        self._modules.close()

    def _release(self) -> None:
        self._graphs.clear()
        self._inputs.clear()
        self._kv = self._kv.fresh(0)


def unsupported_reason(model: transformers.PreTrainedModel) -> str | None:
    """Why a model's forwards cannot be captured; None if they may be."""
    masks = MaskBuilder(model)
    if masks.window is not None or masks.chunk is not None:
        return "it has sliding-window or chunked attention"
    if len(recurrent_layers(model)):
        return "it has recurrent layers"
    return None
