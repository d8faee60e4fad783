"""Runs a drafter written for TensorRT-LLM (`UserProvidedDecodingConfig`) unchanged.

Such a drafter has one method, `prepare_draft_tokens(scheduled_requests, resource_manager)`, which
sets `py_draft_tokens` of every request. Its resource manager, if any, is called before and after
each forward of the target, and when a request ends. A run's single request has the attributes that
TensorRT-LLM's guide and its own n-gram drafter use.

If TensorRT-LLM is not installed, stand-ins for its modules exist while such a file is imported.
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
    """Stands in for TensorRT-LLM's base class."""

    def __init__(self, max_draft_len: int | None = None, **settings: Any) -> None:
        self.max_draft_len = max_draft_len
        vars(self).update(settings)


class BaseResourceManager:
    """Stands in for TensorRT-LLM's base class; its methods do nothing unless overridden."""

    def prepare_resources(self, scheduled_batch: Batch) -> None: ...

    def update_resources(self, scheduled_batch: Batch) -> None: ...

    def free_resources(self, request: Request) -> None: ...


@dataclass
class UserProvidedDecodingConfig:
    """Stands in for TensorRT-LLM's config of a drafter and its resource manager."""

    max_draft_len: int
    drafter: Any
    resource_manager: Any = None


@dataclass
class Request:
    """The run's text as TensorRT-LLM's `LlmRequest`; `tokens` end with the root."""

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

    def get_tokens(self, beam: int = 0) -> list[int]:
        return list(self.tokens)

    def get_num_tokens(self, beam: int = 0) -> int:
        return len(self.tokens)

    def get_last_tokens(self, beam: int = 0) -> int:
        return self.tokens[-1]


@dataclass
class Batch:
    """TensorRT-LLM's `ScheduledRequests` of one step: the run's request alone."""

    generation_requests: list[Request]
    context_requests: list[Request] = field(default_factory=list)

    def all_requests(self) -> list[Request]:
        return [*self.context_requests, *self.generation_requests]


class Adapter:
    """A drafter of one's own that presents the run as a request and drafts the chain it gets."""

    _ids = itertools.count()

    def __init__(self, drafter: Any, manager: Any = None) -> None:
        self.drafter = drafter
        default = getattr(drafter, "spec_resource_manager", None) or BaseResourceManager()
        self.manager: Any = manager or default
        self.batch = Batch([])

    @classmethod
    def of(cls, user_object: Any) -> Adapter | None:
        """For a drafter with that interface or a config that holds one; None for anything else."""
        drafter = getattr(user_object, "drafter", user_object)
        if not callable(getattr(drafter, METHOD, None)):
            return None
        return cls(drafter, getattr(user_object, "resource_manager", None))

    def prepare(self, prompt_ids: Sequence[int], sampling: Sampling, limits: Limits) -> None:
        request_id = next(self._ids)
        request = Request(request_id, list(prompt_ids), len(prompt_ids), limits.max_new_tokens)
        self.batch = Batch([request])

    def draft(self, token_ids: Sequence[int], max_draft_len: int) -> list[list[int]]:
        (request,) = self.batch.generation_requests
        if request.py_decoding_iter:
            self.manager.update_resources(self.batch)
        request.tokens, request.py_draft_tokens = list(token_ids), []
        request.py_decoding_iter += 1
        self.manager.prepare_resources(self.batch)
        getattr(self.drafter, METHOD)(self.batch, self.manager)
        return [list(request.py_draft_tokens or ())[:max_draft_len]]

    def free(self) -> None:
        for request in self.batch.generation_requests:
            self.manager.free_resources(request)
        self.batch = Batch([])


_MODULES = (
    *("", ".llmapi", "._torch", "._torch.speculative", "._torch.speculative.drafter"),
    *("._torch.pyexecutor", "._torch.pyexecutor.llm_request", "._torch.pyexecutor.scheduler"),
    "._torch.pyexecutor.resource_manager",
)
_NAMES = {
    "UserProvidedDecodingConfig": UserProvidedDecodingConfig,
    "Drafter": Drafter,
    "LlmRequest": Request,
    "ScheduledRequests": Batch,
    "BaseResourceManager": BaseResourceManager,
    "ResourceManager": BaseResourceManager,
}
"""The names that such a file imports; every stand-in module has all of them."""


@contextmanager
def importable() -> Iterator[None]:
    """Makes `tensorrt_llm` importable: the installed package or the stand-ins."""
    if "tensorrt_llm" in sys.modules or importlib.util.find_spec("tensorrt_llm") is not None:
        yield
        return
    modules = {f"tensorrt_llm{name}": ModuleType(f"tensorrt_llm{name}") for name in _MODULES}
    for module in modules.values():
        vars(module).update({"__path__": [], **_NAMES})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
