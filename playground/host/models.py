"""The loaded models: at most one target, the drafters built on it, and the models they use."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import presets
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.model.loading import WEIGHT_BITS, load_target, pick_dtype
from engine.model.sources import Locate, ProgressCallback, TargetSpec
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from engine.tuning.experience import ExperienceStore

MAX_DRAFTERS = 2
"""Drafters that stay built, so that switching between two methods loads nothing."""
Place = tuple[str, str, str]
"""Name, dtype and device of a model."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded target for display; `key` is its name in the catalog."""

    key: str
    name: str
    dtype: str
    device: str
    context_len: int
    chat: bool


class Models:
    """Owns the loaded target and its drafters; used by the host's worker thread only.

    `loaded` may be read from any thread.
    """

    def __init__(
        self,
        *,
        cache_dir: Path,
        device: str,
        resolve: Callable[[str], TargetSpec],
        locate: Locate = presets.locate,
    ) -> None:
        self._cache_dir = cache_dir
        self._device = device
        self._resolve = resolve
        self._locate = locate
        self._target: Target | None = None
        self._key: tuple[str, str] | None = None
        self._drafters: OrderedDict[str, tuple[Drafter, frozenset[Place]]] = OrderedDict()
        """Each with the models that it uses."""
        self._companions: dict[Place, Target] = {}
        self._used: set[Place] = set()
        """Models that the current job has used."""
        self.experience = ExperienceStore(cache_dir / "drafting", presets.priors())
        self.loaded: Loaded | None = None

    def target(self, spec: TargetSpec, dtype: str, progress: ProgressCallback) -> Target:
        """The target, loaded if it is not; the previous one is freed first.

        Raises SourceError, TargetError: it cannot be loaded; then nothing is.
        """
        if self._target is not None and self._serves(self._target, spec, dtype):
            return self._target
        self.close()
        target = load_target(
            spec, dtype=dtype, device=self._device, cache_dir=self._cache_dir, progress=progress
        )
        self._target, self._key = target, (spec.name, dtype)
        self.loaded = Loaded(
            spec.name,
            spec.title or spec.name,
            target.dtype_name,
            target.device_name,
            target.context_len,
            target.has_chat_template,
        )
        return target

    def _serves(self, target: Target, spec: TargetSpec, dtype: str) -> bool:
        """Whether what is loaded is what would be loaded, however its dtype is spelled."""
        assert self._key is not None
        name, of_request = self._key
        if dtype == "auto" and of_request != "auto":
            from_file = spec.gguf_file is not None or spec.wheel is not None
            plain = str(pick_dtype("auto", target.device)).removeprefix("torch.")
            is_own = target.dtype_name in WEIGHT_BITS if from_file else target.dtype_name == plain
            return name == spec.name and is_own
        return name == spec.name and dtype in (of_request, target.dtype_name)

    def drafter(self, config: MethodConfig) -> Drafter:
        """The method's drafter on the loaded target; the last ones stay built.

        Raises DrafterError: it does not fit the target, or its weights cannot be had.
        """
        assert self._target is not None
        key = config.model_dump_json()
        if key not in self._drafters:
            while len(self._drafters) >= MAX_DRAFTERS:
                old, _ = self._drafters.popitem(last=False)[1]
                old.close()
            before, self._used = self._used, set()
            try:
                drafter = build_drafter(config, self.build_context(), self.experience)
                self._drafters[key] = drafter, frozenset(self._used)
            finally:
                self._used |= before
        self._drafters.move_to_end(key)
        return self._drafters[key][0]

    def release(self, *, idle: bool = False) -> None:
        """Free the models that neither a built drafter nor the job that just ended uses.

        Args:
            idle: the engine has been idle for long, so the last job does not count.
        """
        needed = set() if idle else self._used
        needed = needed.union(*(places for _, places in self._drafters.values()))
        self._used = set()
        for place in self._companions.keys() - needed:
            self._companions.pop(place).close()

    def build_context(self) -> BuildContext:
        """The loaded target, and what a method's drafter may use besides it."""
        assert self._target is not None
        return BuildContext(
            self._target,
            resolve=self._resolve,
            load=self._companion,
            locate=self._locate,
        )

    def _companion(
        self, spec: TargetSpec, *, dtype: str | None = None, device: str | None = None
    ) -> Target:
        """A model to draft with, by default on the target's device and in its dtype.

        Drafters share it; `release` frees it when none uses it."""
        assert self._target is not None
        dtype, device = dtype or self._target.companion_dtype, device or str(self._target.device)
        key = (spec.name, dtype, device)
        self._used.add(key)
        if key not in self._companions:
            self._companions[key] = load_target(
                spec, dtype=dtype, device=device, cache_dir=self._cache_dir
            )
        return self._companions[key]

    def close(self) -> None:
        """Free everything."""
        self.loaded = None
        while self._drafters:
            self._drafters.popitem()[1][0].close()
        self._used.clear()
        while self._companions:
            self._companions.popitem()[1].close()
        if self._target is not None:
            self._target.close()
            self._target = self._key = None
            gc.collect()
