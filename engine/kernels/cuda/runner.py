"""Verifies by CUDA graphs of transformers' own modules: one per number of rows and of context.

    rows 60, context 700 of 1024   →   the graph for 64 rows and 768 rows of context

Graphs are captured when first needed. Prompts run as ever, one operator at a time. So does
everything once a capture fails: the model waits for the device somewhere, or there is no memory
left; the log says so once.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.cuda.graphs import CaptureError, Capturer, Graph
from engine.kernels.cuda.static_cache import CacheStore, StaticCache, context_bucket
from engine.model.cache import TreeCache
from engine.model.forward import Forward, MaskBuilder, ModulesForward, Rows
from engine.model.recurrent import recurrent_layers
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a graph; larger forwards are no verify forwards, or compute-bound anyway."""
FEW = 8
"""Rows up to which a piece of text is run by a graph: what a draft model has not read yet."""
UNSEEN = -30000.0
"""Added to the score of what a row does not see; finite, so that no row is without a maximum."""


def row_bucket(rows: int) -> int | None:
    """The smallest bucket for this many rows; None if there is none.

    Example: 5 → 6, 60 → 64, 200 → None.
    """
    return next((bucket for bucket in ROWS if bucket >= rows), None)


class Inputs:
    """What changes from forward to forward, in tensors at fixed addresses.

    The rows of a forward lie behind the cache's `length` committed ones: first those that it is
    about, then padding. Padding sees what its neighbours see, is seen by nobody, and what it leaves
    in the cache is written over later.
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

    @property
    def num_bytes(self) -> int:
        tensors = (self.tokens, self.positions, self._visible, self._causal, self._order)
        return sum(x.numel() * x.element_size() for x in tensors)

    def load(self, tokens: Tensor, positions: Tensor, visible: Tensor | None, length: int) -> None:
        """Take the values of one forward over up to `rows` rows; `visible` None = causal."""
        n = len(tokens)
        self.tokens[:n].copy_(tokens)
        self.positions[:n].copy_(positions)
        self._length.fill_(length)
        # A static tree shows the same tensor in every step: then nothing is copied.
        if self._loaded is None or self._loaded[0] is not visible or self._loaded[1] != n:
            self._loaded = (visible, n)
            self._visible.zero_()
            self._visible[:n, :n].copy_(self._causal[:n, :n] if visible is None else visible)

    # ---- inside a graph

    def places(self) -> Tensor:
        """Rows of the cache that the forward's rows go to, `(rows,)` int64."""
        return self._length + self._order

    def mask(self, context: int, dtype: torch.dtype, *, additive: bool) -> Tensor:
        """Who sees whom of the cache's first `context` rows, `(1, 1, rows, context)`.

        Boolean, or to be added to scores: 0 or `UNSEEN`.
        """
        offset = torch.arange(context, device=self._visible.device) - self._length
        columns = offset.clamp(0, self.rows - 1).expand(self.rows, context)
        new = self._visible.gather(1, columns) & (offset < self.rows)
        visible = (new | (offset < 0))[None, None]
        if not additive:
            return visible
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, UNSEEN)


class Size(NamedTuple):
    """What a graph is for."""

    rows: int
    context: int
    needs: Needs


class GraphRunner(Forward):
    """Runs a model that `why_not` has nothing against over new rows, by graphs where they fit.

    Attributes:
        verdict: whether graphs pay here, in words.
    """

    verdict = "used"

    def __init__(self, model: PreTrainedModel, capturer: Capturer) -> None:
        self._modules = ModulesForward(model)
        self.name = f"{self._modules.name}, {capturer.name}"
        self._dtype = model.dtype
        self._device = torch.device(model.device)
        self._capturer = capturer
        self._fault: str | None = None
        self._store = CacheStore(int(model.config.get_text_config().num_hidden_layers))
        self._inputs: dict[int, Inputs] = {}
        self._graphs: dict[Size, Graph[TargetOutput]] = {}
        self._addresses: tuple[int, ...] = ()
        self._cache: StaticCache | None = None

    # ---- what it is

    @property
    def sizes(self) -> tuple[Size, ...]:
        """What has been captured."""
        return tuple(self._graphs)

    def environment(self) -> dict[str, Any]:
        inputs = sum(inputs.num_bytes for inputs in self._inputs.values())
        return {
            **super().environment(),
            "cuda_graphs": self.verdict if self._fault is None else f"given up: {self._fault}",
            "graph_bytes": self._capturer.num_bytes + inputs,
            "static_cache_bytes": self._store.num_bytes,
        }

    # ---- forwards

    def new_cache(self, rows: int) -> TreeCache | None:
        return None if self._fault is not None else self._store.lend(rows)

    def __call__(
        self, rows: Rows, cache: TreeCache, needs: Needs, *, last_only: bool
    ) -> TargetOutput:
        n, output = len(rows.tokens), None
        if isinstance(cache, StaticCache) and cache.has_room and self._fault is None:
            size = self._size(n, cache, needs, few=last_only)
            if size is not None:
                if size.rows not in self._inputs:
                    self._inputs[size.rows] = Inputs(size.rows, self._device)
                self._inputs[size.rows].load(*rows, cache.length)
                output = self._replayed(size, self._inputs[size.rows], cache)
        if output is None:
            return self._modules(rows, cache, needs, last_only=last_only)
        # Copies: the next replay, of whatever graph, writes over the results.
        return TargetOutput(
            output.logits[n - 1 if last_only else 0 : n].clone(),
            None if output.hidden is None else output.hidden[:n].clone(),
            None if output.layers is None else output.layers[:n].clone(),
        )

    def _size(self, n: int, cache: StaticCache, needs: Needs, *, few: bool) -> Size | None:
        """The graph for n rows behind the cache's; None where no graph is the way."""
        rows = row_bucket(n)
        if rows is None or cache.length == 0 or (few and n > FEW):
            return None
        context = context_bucket(cache.length + rows)
        cache.reserve(rows)
        return Size(rows, context, needs) if context <= cache.capacity else None

    def _replayed(self, size: Size, inputs: Inputs, cache: StaticCache) -> TargetOutput | None:
        """Results of all rows of the size, in the graph's memory; None if capturing failed."""
        addresses = tuple(buffer.data_ptr() for buffer in cache.buffers)
        if addresses != self._addresses:  # larger buffers have replaced those of the graphs
            self._graphs.clear()
            self._addresses = addresses
        self._cache = cache
        try:
            if size not in self._graphs:
                run = functools.partial(self._run, size, inputs)
                self._graphs[size] = self._capturer.capture(run)
            self._graphs[size].replay()
            return self._graphs[size].results
        except CaptureError as error:
            self._give_up(str(error))
            return None
        finally:
            self._cache = None

    def _run(self, size: Size, inputs: Inputs) -> TargetOutput:
        """What a graph holds: a forward over the inputs and the buffers of whichever cache."""
        assert self._cache is not None
        mask = inputs.mask(size.context, self._dtype, additive=self._modules.adds_mask)
        rows = Rows(inputs.tokens, inputs.positions)
        with self._cache.fixed(inputs.places(), size.context):
            return self._modules.masked(rows, mask, self._cache, size.needs, last_only=False)

    def _give_up(self, fault: str) -> None:
        self._fault, self.name = fault, self._modules.name
        self._graphs.clear()
        self._inputs.clear()
        LOG.warning("Verifying without %s from here on: %s", self._capturer.name, fault)

    def output(self, hidden: Tensor) -> Tensor:
        return self._modules.output(hidden)

    def close(self) -> None:
        self._graphs.clear()
        self._inputs.clear()
        self._store.clear()
        self._modules.close()


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model's forwards cannot be captured, in words; None if they may be."""
    masks = MaskBuilder(model)
    if masks.window is not None or masks.chunk is not None:
        return "it has sliding-window or chunked attention"
    if len(recurrent_layers(model)):
        return "it has recurrent layers"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over several devices"
    return None
