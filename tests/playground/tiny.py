"""A tiny random target, a scripted drafter, and a catalog of just these."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from engine.config import Limits, setting
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig, AutoregressiveDrafter
from engine.drafters.base import BuildContext
from engine.drafters.method import Drafting, MethodConfig
from engine.model.sources import TargetSpec
from engine.proposal import Budget, Proposal
from engine.steps import End
from engine.tree import ChoiceTree
from playground.host.catalog import Catalog
from presets import MethodPreset, Prompt, PromptSuite
from tests.models import save_tiny
from tests.one_text import OneText

CONTEXT_LEN = 512


def save_tiny_llama(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer; its context holds 512 tokens."""
    return save_tiny(folder, "llama", max_position_embeddings=CONTEXT_LEN)


class ScriptedConfig(MethodConfig):
    """Knows the greedy text and drafts it, with a mistake at every third depth of every step."""

    title: ClassVar[str] = "Scripted"
    summary: ClassVar[str] = "Drafts tokens of which some are right; for tests."

    decoding_type: Literal["Scripted"] = "Scripted"
    drafting: Drafting = setting("as set", "How much to draft", "auto or as set")
    """The controller would not draft with `delay_ms`, but the tests count on the pauses."""
    max_draft_len: int = Field(3, ge=1, le=16, description="longest chain drafted")
    delay_ms: float = Field(0.0, ge=0.0, le=1000.0, description="pause per step")
    fail_at: int | None = Field(None, ge=0, description="step that raises; empty = none")
    note: str = Field("", max_length=100, description="any text")
    scripted_choices: list[list[int]] = Field(
        [[0], [0, 0], [0, 0, 0], [0, 1], [1]], strict=False, description="the choice tree"
    )

    @property
    def lossless(self) -> bool:
        return self.note != "lossy"

    def build(self, bench: BuildContext) -> ScriptedDrafter:
        return ScriptedDrafter(self, bench)


class ScriptedDrafter(OneText):
    """Rank 0 carries the token that greedy decoding will pick (but for mistakes), others do not."""

    KNOWN = 64
    """Tokens of the greedy text that it knows; after them it guesses."""
    WRITTEN: ClassVar[dict[tuple[Any, ...], tuple[int, ...]]] = {}
    """These texts, by the target's weights, their length and the prompt: one takes 0.2 s."""
    GO = threading.Event()
    """Unset, its drafts wait."""
    GO.set()

    def __init__(self, config: ScriptedConfig, bench: BuildContext) -> None:
        self._config = config
        self._tree = ChoiceTree.parse(config.scripted_choices, form="candidates")
        self._bench = bench
        self._step = 0
        self._known: tuple[int, ...] = ()

    def begin(self) -> None:
        self._step = 0
        weight = self._bench.target.lm_head.weight
        assert isinstance(weight, torch.Tensor)
        known = hashlib.sha256(weight.float().cpu().numpy().tobytes()).digest()
        prompt_ids = self.log.prompt_ids
        prompt = (known, self.KNOWN, *prompt_ids)
        if prompt not in self.WRITTEN:
            limits = Limits(max_new_tokens=self.KNOWN, ignore_eos=True)
            plain = AutoregressiveDrafter(self._bench)
            *_, end = decode(self._bench.target, plain, prompt_ids, limits=limits)
            assert isinstance(end, End)
            self.WRITTEN[prompt] = end.output_ids
        self._known = self.WRITTEN[prompt]

    def propose(self, budget: Budget) -> Proposal:
        time.sleep(self._config.delay_ms / 1000)
        self.GO.wait()
        if self._step == self._config.fail_at:
            raise RuntimeError("scripted failure")
        self._step += 1
        tokens = [self.root, *(self._token(path) for path in self._tree.paths)]
        return Proposal(
            torch.tensor(tokens, device=self._bench.target.device),
            self._tree.shape,
            ranks=self._tree.ranks,
            draft_probs=torch.tensor([1.0, *(0.6 ** (1 + sum(p)) for p in self._tree.paths)]),
        )

    def _token(self, path: tuple[int, ...]) -> int:
        at = len(self.text) - self.log.num_prompt + len(path) - 1
        true = self._known[at] if at < len(self._known) else 0
        mistake = (self._step + len(path)) % 3 == 0
        return (true + path[-1] + mistake) % 256


@contextmanager
def held_drafts() -> Iterator[None]:
    """Runs of this process stand still at their next draft, however long a page takes to load."""
    ScriptedDrafter.GO.clear()
    try:
        yield
    finally:
        ScriptedDrafter.GO.set()


def offering(catalog: Catalog, **configs: MethodConfig) -> Catalog:
    """The catalog with these methods on offer, too, under their names and titles."""
    presets = {
        name: MethodPreset(name=name, title=type(config).title, config=config)
        for name, config in configs.items()
    }
    types = {config.decoding_type: type(config) for config in configs.values()}
    return replace(
        catalog, presets={**catalog.presets, **presets}, types={**catalog.types, **types}
    )


def tiny_catalog(folder: Path) -> Catalog:
    """One tiny target, plain decoding, and the scripted drafter."""
    spec = TargetSpec(name="tiny", title="Tiny", path=str(folder))
    plain = MethodPreset(name="plain", title="Plain", config=AutoregressiveConfig())
    scripted = MethodPreset(name="scripted", title="Scripted tree", config=ScriptedConfig())
    prompts = (
        Prompt(category="chat", turns=("Say hello.",)),
        Prompt(category="code", turns=("def f(x):",), raw=True),
    )
    return Catalog(
        targets={"tiny": spec},
        presets={"plain": plain, "scripted": scripted},
        types={"Autoregressive": AutoregressiveConfig, "Scripted": ScriptedConfig},
        suites={"starter": PromptSuite(name="starter", title="Starter", prompts=prompts)},
        resolve=lambda name: spec,
    )
