"""Verifies by recordings: one per number of rows and length of context, made when first needed.

    rows 60, context 700 of 1024   →   the recording for 64 rows and 768 rows of context

Prompts run as ever, by transformers' modules. So does everything once a recording fails: the model
waits for the device somewhere, or there is no memory left; the log says so once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.kernels.cpu import architecture
from engine.kernels.cuda import pointwise
from engine.kernels.cuda.attention import splits_agree
from engine.kernels.cuda.buckets import ROWS, context_bucket, row_bucket
from engine.kernels.cuda.decoder import DevicePacker, PackedPass
from engine.kernels.cuda.inputs import RowInputs
from engine.kernels.cuda.modules import ModulesPass
from engine.kernels.cuda.recorder import CaptureError, Recorder, Recording
from engine.kernels.cuda.static_cache import CacheStore, StaticCache
from engine.model.cache import TreeCache
from engine.model.forward import MaskBuilder, ModulesForward
from engine.proposal import Needs, TargetOutput

LOG = logging.getLogger(__name__)
FEW = 8
"""Rows up to which a piece of text is run by a recording: what a draft model has not read yet."""


USUAL_CONTEXT = 4096
"""Rows of the static cache that the estimate of memory counts with."""
WORKSPACE_BYTES = 64 << 20


class Size(NamedTuple):
    """What a recording is for."""

    rows: int
    context: int
    needs: Needs


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: RowInputs
    recording: Recording[TargetOutput]


class Pass(Protocol):
    """Launches a model's forward over the rows of its inputs, see `PackedPass`, `ModulesPass`."""

    name: str

    def __call__(
        self, inputs: RowInputs, context: int, cache: StaticCache, needs: Needs
    ) -> TargetOutput:
        """What all rows show; their keys and values go into the cache."""


class CapturedForward:
    """Runs a model over new rows, by recordings where they fit."""

    def __init__(
        self, model: PreTrainedModel, eager: ModulesForward, run: Pass, recorder: Recorder
    ) -> None:
        """Record what `run` launches; `eager` does what is not recorded. Both run `model`."""
        self._eager = eager
        self._run: Pass | None = run
        self.name = f"{run.name}, {recorder.name}"
        self._recorder = recorder
        self._fault: str | None = None
        self._device = torch.device(model.device)
        self._store = CacheStore(int(model.config.get_text_config().num_hidden_layers))
        self._inputs: dict[int, RowInputs] = {}
        self._made: dict[Size, _Recorded] = {}
        self._addresses: tuple[int, ...] = ()

    # ---- what it is

    @property
    def recorder(self) -> Recorder | None:
        return None if self._fault is not None else self._recorder

    @property
    def sizes(self) -> tuple[Size, ...]:
        """What has been recorded."""
        return tuple(self._made)

    def environment(self) -> dict[str, Any]:
        return {
            "cuda_graphs": "used" if self._fault is None else f"given up: {self._fault}",
            "graph_bytes": self._recorder.num_bytes + self._input_bytes,
            "static_cache_bytes": self._store.num_bytes,
        }

    @property
    def _input_bytes(self) -> int:
        return sum(inputs.num_bytes for inputs in self._inputs.values())

    # ---- forwards

    def new_cache(self, rows: int) -> TreeCache | None:
        return None if self._fault is not None else self._store.lend(rows)

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
        output = None
        if isinstance(cache, StaticCache) and cache.has_room and self._fault is None:
            size = self._size(len(tokens), cache, needs, few=last_only)
            if size is not None:
                output = self._recorded(size, tokens, positions, visible, cache)
        if output is None:
            return self._eager(tokens, positions, visible, cache, needs, last_only=last_only)
        n = len(tokens)
        # Copies: the next replay, of whatever recording, writes over the results.
        return TargetOutput(
            output.logits[n - 1 if last_only else 0 : n].clone(),
            None if output.hidden is None else output.hidden[:n].clone(),
            None if output.layers is None else output.layers[:n].clone(),
        )

    def _size(self, n: int, cache: StaticCache, needs: Needs, *, few: bool) -> Size | None:
        """The recording for n rows behind the cache's; None where eager is the way."""
        rows = row_bucket(n)
        if rows is None or cache.length == 0 or (few and n > FEW):
            return None
        context = context_bucket(cache.length + rows)
        cache.reserve(rows)
        return Size(rows, context, needs) if context <= cache.capacity else None

    def _recorded(
        self,
        size: Size,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: StaticCache,
    ) -> TargetOutput | None:
        """Results of all rows of the size, in the recording's memory; None if it gave up."""
        self._check_addresses(cache)
        if size.rows not in self._inputs:
            self._inputs[size.rows] = RowInputs(size.rows, self._device)
        inputs = self._inputs[size.rows]
        inputs.load(tokens, positions, visible, base=cache.length)
        if size not in self._made and not self._record(size, inputs, cache):
            return None
        recording = self._made[size].recording
        recording.replay()
        return recording.results

    def _check_addresses(self, cache: StaticCache) -> None:
        """Forget recordings over buffers that have been replaced by larger ones."""
        addresses = tuple(buffer.data_ptr() for buffer in cache.buffers)
        if addresses != self._addresses:
            self._made.clear()
            self._addresses = addresses

    def _record(self, size: Size, inputs: RowInputs, cache: StaticCache) -> bool:
        run = self._run
        assert run is not None
        try:
            recording = self._recorder.record(lambda: run(inputs, size.context, cache, size.needs))
        except CaptureError as error:
            self._give_up(str(error))
            return False
        self._made[size] = _Recorded(inputs, recording)
        return True

    def _give_up(self, fault: str) -> None:
        self._fault = fault
        self.name = self._eager.name
        self._made.clear()
        self._inputs.clear()
        LOG.warning("Verifying without %s from here on: %s", self._recorder.name, fault)

    def close(self) -> None:
        self._made.clear()
        self._inputs.clear()
        self._store.clear()
        self._run = None
        self._eager.close()


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model's forwards cannot be recorded, in words; None if they may be."""
    if MaskBuilder(model).window is not None:
        return "it has sliding-window attention"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over several devices"
    return None


def bytes_beside(model: PreTrainedModel) -> int:
    """What recordings are expected to need beside the weights.

    The static cache of a usual text; of the largest recording its logits, twice (its own and the
    copy that is shown), its mask and its widest layer; and cuBLAS' workspace.
    """
    config = model.config.get_text_config()
    heads, size = int(config.num_attention_heads), model.dtype.itemsize
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    cache = 2 * int(config.num_hidden_layers) * kv_heads * head_dim * USUAL_CONTEXT
    wide = 4 * int(getattr(config, "intermediate_size", None) or config.hidden_size)
    rows = ROWS[-1] * (2 * int(config.vocab_size) + wide + 2 * heads // kv_heads * USUAL_CONTEXT)
    return (cache + rows) * size + WORKSPACE_BYTES


def too_large(model: PreTrainedModel, free: int | None) -> str | None:
    """Why there is no room for recordings beside the weights; None if there is, or is unknown."""
    needed = bytes_beside(model)
    if free is None or needed <= free:
        return None
    return f"they need about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free"


def capture(
    model: PreTrainedModel, recorder: Recorder, *, packed: bool = True, compiled: bool = True
) -> CapturedForward:
    """The recorded forward of a model that `why_not` has nothing against.

    Where the model is a `Decoder`, its linear modules become shares of stacked matrices.

    Args:
        packed: False = by transformers' modules in any case.
        compiled: whether to let torch compile what lies between the products.
    """
    known = packed and architecture.unknown(model) is None
    one = _packed(model, compiled=compiled) if known else None
    eager = ModulesForward(model)
    return CapturedForward(model, eager, one or ModulesPass(eager, model.dtype), recorder)


def _packed(model: PreTrainedModel, *, compiled: bool) -> PackedPass:
    device, dtype = torch.device(model.device), model.dtype
    decoder = architecture.take_over(model, DevicePacker())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the single matrices, of which the stacked ones are copies
    between = pointwise.compiled(device, dtype) if compiled else pointwise.plain("switched off")
    split = splits_agree(device, dtype, decoder.heads.dim)
    if between.note:
        LOG.info("Operators between products are not compiled: %s", between.note)
    base: Any = model.base_model
    return PackedPass(decoder, base.rotary_emb, between, split=split)
