"""Recurrent layers over a draft tree: every row continues from its parent's state.

Attention sees a tree through a mask. A recurrent layer (state space, linear attention, short
convolution) has to read its rows in order, in one of two traversals:

    rows   0 ┬ 1 ─ 3        levels      0        then  1 | 2     then  3
             └ 2            branches    0 1 3    and   0 2 2     in one batch, padded at the end

*Levels* feeds the rows of one depth as a batch of single tokens, each with a copy of its parent's
state, and stores every row's state until the path is known. *Branches* reads each path from the
root to a leaf as one sequence, from the committed state; where no branch ends at the accepted path,
the layer (not the model) reads that path again. Levels reads a layer's weights once per depth,
branches at most twice a step; kernels that cannot continue from a state with several tokens run by
levels. Siblings are in different rows of a batch, so none sees another's state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from engine.errors import TargetError
from engine.model.cache import RecurrentStates, States
from engine.model.layer_types import RECURRENT, layer_types_of
from engine.tree import upload

Inputs = dict[str, Any]
"""A layer's arguments; tensors of rows are `(batch, rows, …)`."""

MAX_LEVELS = 4
"""Longer chains are read as one branch, and so is every tree by purely convolutional layers, whose
state after any row is a slice of their inputs; everything else by levels. These were the faster:
kernels pad every branch to a whole chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The order in which a tree's rows are run.

    Attributes:
        levels: per depth its rows, and the index of each one's parent in the level above.
        level_of: row → its level, and its index there.
        branches: `(leaves, longest)` rows, shorter branches padded with their last row.
        places: row → a branch through it, and its depth.
        places_on: the same `(rows, 2)` on the device.
    """

    levels: tuple[tuple[Tensor, Tensor], ...]
    level_of: dict[int, tuple[int, int]]
    branches: Tensor
    places: tuple[tuple[int, int], ...]
    places_on: Tensor


@functools.lru_cache(maxsize=256)
def _layout(parents: tuple[int, ...], device: torch.device) -> _Layout:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    inner = set(parents)
    leaves = [path for row, path in enumerate(paths) if row not in inner]
    longest = max(map(len, leaves))
    branches = [path + path[-1:] * (longest - len(path)) for path in leaves]
    place = {row: (b, d) for b, path in enumerate(leaves) for d, row in enumerate(path)}
    levels, before, level_of = [], [-1], dict[int, tuple[int, int]]()
    for depth in range(longest):
        rows = [row for row, path in enumerate(paths) if len(path) == depth + 1]
        pair = torch.tensor([rows, [before.index(parents[row]) for row in rows]])
        level, above = upload(pair, device)
        levels.append((level, above))
        level_of |= {row: (depth, i) for i, row in enumerate(rows)}
        before = rows
    places = tuple(place[row] for row in range(len(parents)))
    on_device = (upload(torch.tensor(values), device) for values in (branches, places))
    return _Layout(tuple(levels), level_of, next(on_device), places, next(on_device))


class _Run(NamedTuple):
    """The running forward: its states and its rows' parents; None = a text, all committed."""

    states: RecurrentStates
    parents: tuple[int, ...] | None


class RecurrentLayers:
    """A model's recurrent layers, whose calls are redirected to follow draft trees."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.run: _Run | None = None
        self._mixers: list[_Mixer] = []
        inside: set[nn.Module] = set()
        for module in model.modules():
            kind = MIXERS.get(type(module).__name__)
            if kind is not None and module not in inside:
                inside.update(module.modules())
                self._mixers.append(kind(module, self, len(self._mixers)))
        kinds = {*RECURRENT} & {*layer_types_of(model.config.get_text_config())}
        if kinds and not self._mixers:
            raise TargetError(
                f"{type(model).__name__} has {', '.join(sorted(kinds))} layers of an unknown "
                "class, whose state cannot be rolled back after a rejected draft. Choose another "
                "model."
            )

    def __len__(self) -> int:
        return len(self._mixers)

    @contextlib.contextmanager
    def using(
        self, states: RecurrentStates | None, parents: tuple[int, ...] | None
    ) -> Iterator[None]:
        """A context whose forward reads and writes these states."""
        self.run = None if states is None else _Run(states, parents)
        try:
            yield
        finally:
            self.run = None


def recurrent_layers(model: transformers.PreTrainedModel) -> RecurrentLayers:
    """The model's recurrent layers, redirected on the first call."""
    layers: Any = getattr(model, "_recurrent_layers", None)
    if layers is None:
        layers = RecurrentLayers(model)
        object.__setattr__(model, "_recurrent_layers", layers)
    assert isinstance(layers, RecurrentLayers)
    return layers


class _Mixer:
    """Runs a module's calls in the order of a draft tree."""

    takes_initial_state = True
    """Whether its kernel continues from a state with several tokens at once."""

    def __init__(self, module: nn.Module, layers: RecurrentLayers, number: int) -> None:
        self._module, self._layers, self._number = module, layers, number
        self._forward = module.forward
        self._signature = inspect.signature(self._forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._layers.run
        if run is None:
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        inputs: Inputs = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        inputs.pop("kwargs", None)
        # A single text without padding: masks are for attention only.
        inputs |= {name: None for name in ("attention_mask", "conv_mask") if name in inputs}
        before = run.states.committed.get(self._number, {})
        if run.parents is None or len(run.parents) == 1:
            output, last = self._scan(run.states, inputs, before)
            run.states.after[self._number] = lambda path: last
            return output
        layout = _layout(run.parents, _rows(inputs).device)
        one_long = len(layout.branches) == 1 and len(layout.levels) > MAX_LEVELS
        convolves = bool(before) and all(kind == "conv" for kind, _ in before)
        by_branches = self.takes_initial_state and (one_long or convolves)
        run_rows = self._by_branches if by_branches else self._by_levels
        return run_rows(run, layout, inputs, before)

    def _by_levels(self, run: _Run, layout: _Layout, inputs: Inputs, before: States) -> Any:
        outputs: list[Any] = []
        states: list[States] = []
        for rows, above in layout.levels:
            level_inputs = _select_rows(inputs, rows[:, None])
            output, before = self._call(run.states, level_inputs, _copy_states(before, above))
            outputs.append(output)
            states.append(before)
        row_order = torch.cat([rows for rows, _ in layout.levels])

        def after(path: tuple[int, ...]) -> States:
            level, i = layout.level_of[path[-1]]
            return {key: state[i : i + 1].clone() for key, state in states[level].items()}

        run.states.after[self._number] = after
        order = row_order.argsort()
        return _map_rows(lambda *levels: torch.cat(levels)[order].transpose(0, 1), 1, *outputs)

    def _by_branches(self, run: _Run, layout: _Layout, inputs: Inputs, before: States) -> Any:
        count, longest = layout.branches.shape
        branch_inputs = _select_rows(inputs, layout.branches)
        zeros = layout.branches.new_zeros(count)
        run.states.conv_inputs = {}
        output, ends = self._call(run.states, branch_inputs, _copy_states(before, zeros))
        conv, run.states.conv_inputs = run.states.conv_inputs, {}  # the next layer fills it
        if not before or conv.keys() != ends.keys():
            conv = {}

        def after(path: tuple[int, ...]) -> States:
            branch, depth = layout.places[path[-1]]
            one = slice(branch, branch + 1)
            if conv:
                stop = {k: full.shape[-1] - longest + depth + 1 for k, full in conv.items()}
                return {k: conv[k][one, ..., stop[k] - ends[k].shape[-1] : stop[k]] for k in ends}
            if depth == longest - 1:
                return {key: state[one].clone() for key, state in ends.items()}
            again = _select_rows(inputs, upload(torch.tensor([path]), layout.branches.device))
            return self._scan(run.states, again, before)[1]

        run.states.after[self._number] = after
        rows = layout.places_on
        return _map_rows(lambda out: out[rows[:, 0], rows[:, 1]][None], longest, output)

    def _scan(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        """Run the rows of one text; its output, and the states after the last row."""
        first = _rows(inputs)
        index = torch.arange(first.shape[1], device=first.device)
        if len(index) == 1 or not before or self.takes_initial_state:
            return self._call(states, inputs, _copy_states(before, index[:1]))
        outputs = []
        for row in index:
            row_inputs = _select_rows(inputs, row[None, None])
            output, before = self._call(states, row_inputs, _copy_states(before, index[:1]))
            outputs.append(output)
        return _map_rows(lambda *parts: torch.cat(parts, dim=1), 1, *outputs), before

    def _call(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        """Call the module on a batch; it may modify `before`."""
        states.working = before
        output = self._forward(**inputs)
        return output, states.working


class _ScanMixer(_Mixer):
    takes_initial_state = False


class _MambaTwoMixer(_Mixer):
    """Sets the chunk size to the number of drafted tokens, which would be padded to 256.

    For chunks the module also clamps time steps, which it does not for single tokens; the limit is
    lifted, so that drafts are read as by plain decoding.
    """

    def _call(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        module: Any = self._module
        chunk, limit = module.chunk_size, module.time_step_limit
        module.chunk_size = min(chunk, inputs["hidden_states"].shape[1])
        run = self._layers.run
        if run is None or run.parents is not None:
            module.time_step_limit = (0.0, float("inf"))
        try:
            return super()._call(states, inputs, before)
        finally:
            module.chunk_size, module.time_step_limit = chunk, limit


class _GriffinMixer(_ScanMixer):
    """RecurrentGemma's block, which stores its states in attributes."""

    def _call(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        module: Any = self._module
        module.conv1d_state = before.get(("conv", 0))
        module.rg_lru.recurrent_states = before.get(("recurrent", 0))
        output = self._forward(**inputs)
        after = {
            ("conv", 0): module.conv1d_state,
            ("recurrent", 0): module.rg_lru.recurrent_states,
        }
        module.conv1d_state = module.rg_lru.recurrent_states = None
        return output, after


_CLASSES: dict[type[_Mixer], str] = {
    _Mixer: "BailingHybridDeltaAttention Glm5NextTextLinearAttention KimiLinearDeltaAttention "
    "LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet "
    "Qwen3_5MoeGatedDeltaNet MiniMaxLightningAttention InklingShortConvolution "
    "Inkling2ShortConvolution Inkling2DynamicShortConvolution Inkling2LoopShortConvolution "
    "Inkling2LoopDynamicShortConvolution Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv "
    "ZayaCCAProjection",
    _ScanMixer: "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer",
    _MambaTwoMixer: "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer "
    "NemotronHMamba2Mixer Zamba2MambaMixer",
    _GriffinMixer: "RecurrentGemmaRecurrentBlock",
}
MIXERS = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
"""transformers' recurrent layers, by the names of their classes."""


def _rows(inputs: Inputs) -> Tensor:
    """A layer's input states, `(batch, rows, …)`."""
    return next(value for value in inputs.values() if isinstance(value, Tensor))


def _copy_states(states: States, index: Tensor) -> States:
    """A copy of these entries of the batch."""
    return {key: state[index.to(state.device)] for key, state in states.items()}


def _select_rows(inputs: Inputs, index: Tensor) -> Inputs:
    """The arguments for rows `(batch, rows)` of a text."""
    n = _rows(inputs).shape[1]

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, n):
            return value[0][index]
        return tuple(map(pick, value)) if isinstance(value, tuple) else value

    return {name: pick(value) for name, value in inputs.items()}


def _map_rows(change: Callable[..., Tensor], rows: int, *outputs: Any) -> Any:
    """Merge the outputs of several calls; values without `rows` rows are the last call's."""
    last = outputs[-1]
    if isinstance(last, Tensor) and last.ndim > 2 and last.shape[1] == rows:
        return change(*outputs)
    if isinstance(last, tuple):
        return tuple(_map_rows(change, rows, *parts) for parts in zip(*outputs, strict=True))
    return last
