"""A drafter written for TensorRT-LLM (`UserProvidedDecodingConfig`), run here unchanged.

There a `Drafter` has one method, `prepare_draft_tokens(scheduled_requests, resource_manager)`, that
sets `py_draft_tokens` of every request; a resource manager, if it has one, is told before and after
each forward of the target, and when a request ends. Here the one request of the run is shown to it
under the names that TensorRT-LLM's guide and its own n-gram drafter use.

Where TensorRT-LLM is not installed, the names that such a module imports are there while it is
imported, and only then.
Source: TensorRT-LLM, docs/source/features/speculative-decoding.md (user-provided drafting,
developer guide) and tensorrt_llm/_torch/speculative/drafter.py, ngram.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from engine.config import Limits, Sampling

METHOD = "prepare_draft_tokens"


class Drafter:
    """Stands for TensorRT-LLM's base class."""

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule


class BaseResourceManager:
    """Stands for TensorRT-LLM's: what it does not override does nothing."""

    def prepare_resources(self, scheduled_batch: Requests) -> None: ...

    def update_resources(self, scheduled_batch: Requests) -> None: ...

    def free_resources(self, request: Request) -> None: ...


@dataclass
class UserProvidedDecodingConfig:
    """Stands for TensorRT-LLM's: a drafter, and what manages its resources."""

    max_draft_len: int
    drafter: Any
    resource_manager: Any = None


@dataclass
class Request:
    """The run's text as TensorRT-LLM's `LlmRequest` shows it; `tokens` end with the root."""

    request_id: int
    tokens: list[int]
    py_orig_prompt_len: int
    py_max_new_tokens: int
    py_draft_tokens: list[int] = field(default_factory=list)
    py_batch_idx: int = 0
    py_decoding_iter: int = 0

    @property
    def py_request_id(self) -> int:
        return self.request_id

    @property
    def py_prompt_len(self) -> int:
        return self.py_orig_prompt_len

    @property
    def max_beam_num_tokens(self) -> int:
        return len(self.tokens)

    def get_tokens(self, beam: int = 0) -> list[int]:
        return list(self.tokens)

    def get_num_tokens(self, beam: int = 0) -> int:
        return len(self.tokens)

    def get_last_tokens(self, beam: int = 0) -> int:
        return self.tokens[-1]


@dataclass
class Requests:
    """The scheduled requests of one step: the run's own."""

    generation_requests: list[Request]
    context_requests: list[Request] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.generation_requests)

    def all_requests(self) -> list[Request]:
        return [*self.context_requests, *self.generation_requests]


class Adapter:
    """Shows a run to the drafter as a request, and takes its chain as the draft."""

    _ids = itertools.count()

    def __init__(self, drafter: Any, manager: Any = None) -> None:
        self.drafter = drafter
        self.manager = manager or getattr(drafter, "spec_resource_manager", None)
        self.batch = Requests([])

    @classmethod
    def of(cls, made: Any) -> Adapter | None:
        """For a drafter of that interface, or a config that holds one; None for anything else."""
        inner = getattr(made, "drafter", made)
        if not callable(getattr(inner, METHOD, None)):
            return None
        return cls(inner, getattr(made, "resource_manager", None))

    def prepare(self, prompt_ids: Sequence[int], sampling: Sampling, limits: Limits) -> None:
        new_tokens = limits.max_new_tokens
        request = Request(next(self._ids), list(prompt_ids), len(prompt_ids), new_tokens)
        self.batch = Requests([request])

    def draft(self, token_ids: Sequence[int], max_draft_len: int) -> list[list[int]]:
        (request,) = self.batch.generation_requests
        if request.py_decoding_iter:
            self._tell("update_resources", self.batch)
        request.tokens, request.py_draft_tokens = list(token_ids), []
        request.py_decoding_iter += 1
        self._tell("prepare_resources", self.batch)
        getattr(self.drafter, METHOD)(self.batch, self.manager)
        return [list(request.py_draft_tokens or ())[:max_draft_len]]

    def free(self) -> None:
        for request in self.batch.generation_requests:
            self._tell("free_resources", request)
        self.batch = Requests([])

    def _tell(self, name: str, what: object) -> None:
        told = getattr(self.manager, name, None)
        if told is not None:
            told(what)


_STAND_INS: dict[str, dict[str, Any]] = {
    "tensorrt_llm": {},
    "tensorrt_llm.llmapi": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig},
    "tensorrt_llm._torch": {},
    "tensorrt_llm._torch.speculative": {"Drafter": Drafter},
    "tensorrt_llm._torch.speculative.drafter": {"Drafter": Drafter},
    "tensorrt_llm._torch.pyexecutor": {},
    "tensorrt_llm._torch.pyexecutor.llm_request": {"LlmRequest": Request},
    "tensorrt_llm._torch.pyexecutor.scheduler": {"ScheduledRequests": Requests},
    "tensorrt_llm._torch.pyexecutor.resource_manager": {
        "BaseResourceManager": BaseResourceManager,
        "ResourceManager": BaseResourceManager,
    },
}


@contextmanager
def importable() -> Iterator[None]:
    """While it lasts, what a drafter's module imports of TensorRT-LLM is there."""
    if "tensorrt_llm" in sys.modules or importlib.util.find_spec("tensorrt_llm") is not None:
        yield
        return
    for name, values in _STAND_INS.items():
        module = ModuleType(name)
        vars(module).update({"__path__": [], **values})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in _STAND_INS:
            sys.modules.pop(name, None)
