"""Recurrent layers over a draft tree: every row goes on from its own parent's state.

Attention sees a tree through a mask. A recurrent layer (state space, linear attention, short
convolution) has to read its rows in order, which is done in one of two ways:

    rows   0 ┬ 1 ─ 3        levels      0        then  1 | 2     then  3
             └ 2            branches    0 1 3    and   0 2 2     in one batch, padded at the end

*Levels* feeds the rows of one depth as a batch of single tokens, each with a copy of its parent's
state, and keeps every row's state until the path is known. *Branches* reads each path from the root
to a leaf as one sequence, from the committed state; where no branch ended at the accepted path, the
layer (not the model) reads that path once more. Levels reads a layer's weights once per depth,
branches at most twice a step; kernels that cannot go on from a state with several tokens run by
levels. Siblings are in different rows of a batch, so none sees another's state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from engine.model.states import RecurrentStates, States
from engine.tree import upload

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

Way = Literal["levels", "branches"]
Inputs = dict[str, Any]
"""What a layer is called with; tensors of rows are `(batch, rows, …)`."""

KEEPS_STATE = re.compile(
    r"\.(update_conv_state|update_recurrent_state|set_linear_cache)\(|self\.conv1d_state\b"
)
NO_INITIAL_STATE = re.compile(r"mamba_selective_scan\(")
"""Kernels that read several tokens only from an empty state, and ignore a given one."""
SHORT = 4
"""Chains of more rows are read as one branch, and so is every tree by layers that only convolve,
whose state after any row can be cut out of what they saw; everything else by levels: what was
faster, measured by `benchmarks/hybrid.py`. Kernels fill every branch up to a whole chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How the rows of a tree are run; indices are of rows.

    Attributes:
        levels: per depth its rows, and each one's parent's place in the level before.
        level_of: of every row, its level and its place there.
        branches: `(leaves, longest)`, shorter ones padded with their last row.
        places: of every row, a branch through it and its depth; `places_on` on the device.
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


@dataclass(frozen=True, slots=True)
class _Run:
    """The running forward: its states and its rows' parents; None = one text, all committed."""

    states: RecurrentStates
    parents: tuple[int, ...] | None


class RecurrentLayers:
    def __init__(self, model: PreTrainedModel) -> None:
        self.run: _Run | None = None
        self._mixers: list[_Mixer] = []
        inside: set[nn.Module] = set()
        code = inspect.getsource(sys.modules[type(model).__module__])
        if not KEEPS_STATE.search(code):  # the classes of other models need no look, one by one
            return
        kinds = {cls: _kind(cls) for cls in {type(module) for module in model.modules()}}
        for module in model.modules():
            kind = kinds[type(module)]
            if kind is not None and module not in inside:
                inside.update(module.modules())
                self._mixers.append(kind(module, self, len(self._mixers)))

    def __len__(self) -> int:
        return len(self._mixers)

    @property
    def way(self) -> Way | None:
        """None: by the shape of the tree."""
        return self._mixers[0].way

    def go(self, way: Way | None) -> None:
        """Run trees this way wherever the kernels can."""
        for mixer in self._mixers:
            mixer.way = way if mixer.takes_initial_state else "levels"

    @contextlib.contextmanager
    def following(
        self, states: RecurrentStates | None, parents: tuple[int, ...] | None
    ) -> Iterator[None]:
        """Let the forward within read and write these states."""
        self.run = None if states is None else _Run(states, parents)
        try:
            yield
        finally:
            self.run = None


def recurrent_layers(model: PreTrainedModel) -> RecurrentLayers:
    """The model's recurrent layers, made to follow trees from the first call on."""
    layers: Any = getattr(model, "_recurrent_layers", None)
    if layers is None:
        layers = RecurrentLayers(model)
        object.__setattr__(model, "_recurrent_layers", layers)
    assert isinstance(layers, RecurrentLayers)
    return layers


class _Mixer:
    def __init__(self, module: nn.Module, layers: RecurrentLayers, number: int) -> None:
        self._module, self._layers, self._number = module, layers, number
        self._forward = module.forward
        self._takes = inspect.signature(self._forward)
        self.takes_initial_state = NO_INITIAL_STATE.search(inspect.getsource(type(module))) is None
        self.way: Way | None = None if self.takes_initial_state else "levels"
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._layers.run
        if run is None:
            return self._forward(*args, **kwargs)
        bound = self._takes.bind(*args, **kwargs)
        inputs: Inputs = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        inputs.pop("kwargs", None)
        # One text, never padded: what is left of a mask is attention's.
        inputs |= {name: None for name in ("attention_mask", "conv_mask") if name in inputs}
        before = run.states.committed.get(self._number, {})
        if run.parents is None or len(run.parents) == 1:
            output, last = self._read(run.states, inputs, before)
            run.states.ran(self._number, lambda path: last)
            return output
        layout = _layout(run.parents, _rows(inputs).device)
        one_long = len(layout.branches) == 1 and len(layout.levels) > SHORT
        convolves = bool(before) and all(kind == "conv" for kind, _ in before)
        way = self.way or ("branches" if one_long or convolves else "levels")
        go = self._by_branches if way == "branches" else self._by_levels
        return go(run, layout, inputs, before)

    def _by_levels(self, run: _Run, layout: _Layout, inputs: Inputs, before: States) -> Any:
        outputs: list[Any] = []
        states: list[States] = []
        for rows, above in layout.levels:
            fed = _picked(inputs, rows[:, None])
            output, before = self._once(run.states, fed, _copied(before, above))
            outputs.append(output)
            states.append(before)
        fed_as = torch.cat([rows for rows, _ in layout.levels])

        def after(path: tuple[int, ...]) -> States:
            level, i = layout.level_of[path[-1]]
            return {key: state[i : i + 1].clone() for key, state in states[level].items()}

        run.states.ran(self._number, after)
        order = fed_as.argsort()
        return _rowwise(lambda *levels: torch.cat(levels)[order].transpose(0, 1), 1, *outputs)

    def _by_branches(self, run: _Run, layout: _Layout, inputs: Inputs, before: States) -> Any:
        count, longest = layout.branches.shape
        fed = _picked(inputs, layout.branches)
        zeros = layout.branches.new_zeros(count)
        run.states.seen = {}
        output, ends = self._once(run.states, fed, _copied(before, zeros))
        seen, run.states.seen = run.states.seen, {}  # the next layer's are its own
        if not before or seen.keys() != ends.keys():
            seen = {}

        def after(path: tuple[int, ...]) -> States:
            branch, depth = layout.places[path[-1]]
            one = slice(branch, branch + 1)
            if seen:
                cut = {k: full.shape[-1] - longest + depth + 1 for k, full in seen.items()}
                return {k: seen[k][one, ..., cut[k] - ends[k].shape[-1] : cut[k]] for k in ends}
            if depth == longest - 1:
                return {key: state[one].clone() for key, state in ends.items()}
            again = _picked(inputs, upload(torch.tensor([path]), layout.branches.device))
            return self._read(run.states, again, before)[1]

        run.states.ran(self._number, after)
        rows = layout.places_on
        return _rowwise(lambda of: of[rows[:, 0], rows[:, 1]][None], longest, output)

    def _read(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        """Read the rows of one text; its output, and the state after the last."""
        first = _rows(inputs)
        index = torch.arange(first.shape[1], device=first.device)
        if len(index) == 1 or not before or self.takes_initial_state:
            return self._once(states, inputs, _copied(before, index[:1]))
        outputs = []
        for row in index:
            fed = _picked(inputs, row[None, None])
            output, before = self._once(states, fed, _copied(before, index[:1]))
            outputs.append(output)
        return _rowwise(lambda *each: torch.cat(each, dim=1), 1, *outputs), before

    def _once(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        """Call the module on a batch; `before` becomes its own to change."""
        states.working = before
        output = self._forward(**inputs)
        return output, states.working


class _MambaTwoMixer(_Mixer):
    """Pads its rows to whole chunks, of 256: a few drafted tokens are a chunk of their own.

    In chunks it also limits time steps from below, which it does not when it takes single tokens:
    drafts are read as plain decoding would have read them.
    """

    def _once(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
        module: Any = self._module
        chunk, limit = module.chunk_size, module.time_step_limit
        module.chunk_size = min(chunk, inputs["hidden_states"].shape[1])
        run = self._layers.run
        if run is None or run.parents is not None:
            module.time_step_limit = (0.0, float("inf"))
        try:
            return super()._once(states, inputs, before)
        finally:
            module.chunk_size, module.time_step_limit = chunk, limit


class _GriffinMixer(_Mixer):
    """RecurrentGemma's block, which keeps its states itself."""

    def __init__(self, module: nn.Module, layers: RecurrentLayers, number: int) -> None:
        super().__init__(module, layers, number)
        self.takes_initial_state, self.way = False, "levels"

    def _once(self, states: RecurrentStates, inputs: Inputs, before: States) -> tuple[Any, States]:
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


def _kind(module: type[nn.Module]) -> type[_Mixer] | None:
    """What calls a module of this class; None where it keeps no state."""
    if not module.__module__.startswith("transformers.models."):
        return None
    source = inspect.getsource(module)
    if "self.conv1d_state" in source:
        return _GriffinMixer
    if KEEPS_STATE.search(source) is None:
        return None
    return _MambaTwoMixer if "self.chunk_size" in source else _Mixer


def _rows(inputs: Inputs) -> Tensor:
    """What a layer reads, `(batch, rows, …)`."""
    return next(value for value in inputs.values() if isinstance(value, Tensor))


def _copied(states: States, index: Tensor) -> States:
    """These entries of the batch, to be changed at will."""
    return {key: state[index.to(state.device)] for key, state in states.items()}


def _picked(inputs: Inputs, index: Tensor) -> Inputs:
    """The same call for rows `(batch, rows)` of one text."""
    n = _rows(inputs).shape[1]

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, n):
            return value[0][index]
        return tuple(map(pick, value)) if isinstance(value, tuple) else value

    return {name: pick(value) for name, value in inputs.items()}


def _rowwise(change: Callable[..., Tensor], rows: int, *outputs: Any) -> Any:
    """The outputs of several calls as one; what is not of so many `rows` is the last call's."""
    last = outputs[-1]
    if isinstance(last, Tensor) and last.ndim > 2 and last.shape[1] == rows:
        return change(*outputs)
    if isinstance(last, tuple):
        return tuple(_rowwise(change, rows, *each) for each in zip(*outputs, strict=True))
    return last
