"""The loaded models: at most one target, the drafters built on it, and the models they use."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import presets
from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.model.loading import load_target
from engine.model.plan import WEIGHT_BITS, pick_dtype
from engine.model.sources import Locate, ProgressCallback, TargetSpec, file_fingerprint
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from engine.tuning.experience import ExperienceStore

MAX_DRAFTERS = 2
"""Number of cached drafters; switching between two methods loads nothing."""
Place = tuple[str, ...]
"""Name, dtype and device of a model, and the stamp of its files."""


def _is_auto(target: Target, spec: TargetSpec) -> bool:
    """Whether a loaded target has the dtype that `auto` means for it."""
    if spec.gguf_file is not None or spec.wheel is not None:
        return target.dtype_name in WEIGHT_BITS
    return target.dtype_name == str(pick_dtype("auto", target.device)).removeprefix("torch.")


def _stamp(place: str) -> tuple[str, ...]:
    """Fingerprints of a local place's files, which a training replaces; empty for a hub id."""
    path = Path(os.path.expanduser(place))
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(file_fingerprint(file) for file in files if file.is_file())


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
        self.loaded: Target | None = None
        self._dtype: str | None = None
        self._drafters: OrderedDict[Place, tuple[Drafter, frozenset[Place]]] = OrderedDict()
        """Drafters by settings and the stamp of their files, each with the models that it uses."""
        self._companions: dict[Place, Target] = {}
        self._used: set[Place] = set()
        """Models used by the current job."""
        self._experience_dir = cache_dir / "drafting"
        self.experience = ExperienceStore(self._experience_dir, presets.priors())

    def target(self, spec: TargetSpec, dtype: str, progress: ProgressCallback) -> Target:
        """The target, loaded if necessary; the previous one is freed first.

        Raises SourceError, TargetError: it cannot be loaded; then no target is loaded.
        """
        if self.loaded is not None:
            dtypes = self._dtype, self.loaded.dtype_name
            is_same = dtype in dtypes or dtype == "auto" and _is_auto(self.loaded, spec)
            if self.loaded.name == spec.name and is_same:
                return self.loaded
        self.close()
        target = load_target(
            spec, dtype=dtype, device=self._device, cache_dir=self._cache_dir, progress=progress
        )
        self.loaded, self._dtype = target, dtype
        return target

    def drafter(self, config: MethodConfig) -> Drafter:
        """The method's drafter on the loaded target; the last ones are cached.

        Raises DrafterError: it does not fit the target, or its weights cannot be loaded.
        """
        assert self.loaded is not None
        key = config.model_dump_json(), *self._stamps(config)
        if key not in self._drafters:
            while len(self._drafters) >= MAX_DRAFTERS:
                self._drafters.popitem(last=False)
            before, self._used = self._used, set()
            try:
                drafter = build_drafter(config, self.build_context(), self.experience)
                self._drafters[key] = drafter, frozenset(self._used)
            finally:
                self._used |= before
        self._drafters.move_to_end(key)
        return self._drafters[key][0]

    def _stamps(self, config: MethodConfig) -> Iterator[str]:
        """Of the weights and the corpora that a method's settings name."""
        context = self.build_context()
        for one in (config, *config.nested().values()):
            if weights := getattr(one, "speculative_model", None):
                yield from _stamp(context.weights(weights, "weights"))
            if corpus := getattr(one, "datastore", None):
                yield from _stamp(context.locate(corpus, "corpora"))

    def release(self, *, idle: bool = False) -> None:
        """Free the models that neither a cached drafter nor the last job uses.

        Args:
            idle: the engine has been idle for a while, so the last job does not count.
        """
        needed = set() if idle else self._used
        needed = needed.union(*(places for _, places in self._drafters.values()))
        self._used = set()
        for place in self._companions.keys() - needed:
            self._companions.pop(place).close()

    def build_context(self) -> BuildContext:
        """The loaded target, and the means to load what else a drafter needs."""
        assert self.loaded is not None
        return BuildContext(
            self.loaded,
            resolve=self._resolve,
            load=self._companion,
            locate=self._locate,
            experience_dir=self._experience_dir,
        )

    def _companion(
        self, spec: TargetSpec, *, dtype: str | None = None, device: str | None = None
    ) -> Target:
        """A draft model, by default on the target's device and in its dtype.

        Drafters share it; `release` frees it when none uses it.
        """
        assert self.loaded is not None
        dtype, device = dtype or self.loaded.precision.companion, device or str(self.loaded.device)
        key = (spec.name, dtype, device, *(_stamp(spec.path) if spec.path else ()))
        self._used.add(key)
        if key not in self._companions:
            self._companions[key] = load_target(
                spec, dtype=dtype, device=device, cache_dir=self._cache_dir
            )
        return self._companions[key]

    def close(self) -> None:
        """Free everything."""
        self._drafters.clear()
        self._used.clear()
        while self._companions:
            self._companions.popitem()[1].close()
        if (target := self.loaded) is not None:
            self.loaded = self._dtype = None
            target.close()
            gc.collect()
