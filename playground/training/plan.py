"""The plan of a training: target, kind of head, texts and budget, and settings that fit it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, model_validator

import presets
from engine.config import Settings, setting
from engine.errors import ConfigError, validate_choice
from engine.model.corpus import MANIFEST
from engine.model.sources import TargetSpec
from engine.safe_text import read_text
from engine.training.corpus.dialogues import GivenPrompt
from engine.training.methods import METHODS, training_settings
from engine.training.recipe import TrainSettings
from engine.training.session import SessionSettings
from playground.experiments.prompts import read_suite_file, read_suite_text
from playground.host.catalog import Catalog
from playground.host.controls import check_size, from_controls, settings_from
from playground.host.request import read_dtype
from playground.training import ABOUT
from presets import PromptSuite
from storage import RunLog, RunQuery

LearnFrom = Literal["shipped", "prompts", "runs"]
KINDS = {
    "eagle3": "EAGLE-3 head",
    "eagle": "EAGLE-1/2 head",
    "medusa": "Medusa heads",
    "redrafter": "ReDrafter head",
    "draft_target": "Small draft model",
}
"""Trainable methods and their titles."""
PAGE_SESSION = SessionSettings(evals=4, eval_prompts=1, eval_tokens=64, looks=24)
MAX_RUNS = 1_000
MAX_PROMPT_FILE = 8_000_000
PART_OF_MINUTES = 0.9
"""Share of the minutes for writing and training; the rest is for measuring."""


class Budget(Settings):
    """The time and tokens that a training may take."""

    main_settings: ClassVar[str] = "minutes tokens"

    minutes: float | None = setting(10.0, "Minutes", ABOUT["minutes"], gt=0.0, le=20_160.0)
    tokens: int | None = setting(None, "Tokens", ABOUT["tokens"], ge=1, le=10**10)

    @model_validator(mode="after")
    def _limited(self) -> Budget:
        if self.minutes is None and self.tokens is None:
            raise ValueError("minutes or tokens must be given")
        return self


class TrainPlan(Settings):
    """A drafter to train.

    Attributes:
        corpus: folder of the texts that the target writes.
        corpora: the user's corpora, one of which takes the place of a `corpus` that this training
            must not extend; None = `corpus` and no other.
        prompts: given prompts that the target answers, besides or instead of its own.
        eval_prompts: prompts to measure on, instead of held-out dialogues.
        rows: batch size of writing; None = as memory allows.
        whole_corpus: use all of a corpus that has more than `tokens`.
        fitted: whether the settings were fitted to the budget, after the texts were written.
    """

    model_config = ConfigDict(strict=False)

    target: TargetSpec
    dtype: str = "auto"
    method: str
    learn_from: LearnFrom = "shipped"
    corpus: Path
    corpora: Path | None = None
    prompts: tuple[GivenPrompt, ...] = ()
    eval_prompts: tuple[GivenPrompt, ...] = ()
    budget: Budget
    rows: int | None = None
    whole_corpus: bool = False
    seed: int = 0
    settings: dict[str, Any] = {}
    session: SessionSettings = SessionSettings()
    fitted: bool = False

    @property
    def recipe(self) -> TrainSettings:
        """Raises ConfigError: no such method, or a setting that it refuses."""
        return training_settings(self.method, {"seed": self.seed, **self.settings})

    def is_written(self, num_tokens: int, left_s: float, tok_s: float | None) -> bool:
        """Whether the corpus has enough tokens.

        Args:
            left_s: remaining time for writing and training.
            tok_s: speed of training; None if unknown.
        """
        budget = self.budget
        if budget.tokens is not None and num_tokens >= budget.tokens:
            return True
        if budget.minutes is None:
            return False
        return left_s <= 0 or (
            tok_s is not None and num_tokens * self.recipe.epochs / tok_s >= left_s
        )

    def fit(self, num_tokens: int, left_s: float, tok_s: float | None) -> TrainPlan:
        """The plan with as many epochs over the tokens as its budget allows."""
        budget, recipe = self.budget, self.recipe
        epochs = recipe.epochs
        if budget.tokens is not None and not self.whole_corpus:
            epochs *= min(1.0, budget.tokens / num_tokens)
        if budget.minutes is not None and tok_s is not None:
            most = max(1.0, left_s) / (num_tokens / tok_s)
            epochs = most if budget.tokens is None else min(epochs, most)
        epochs = min(1000.0, max(1e-4, epochs))
        return self.replace(settings={**self.settings, "epochs": epochs}, fitted=True)


# ---- the texts


def given_prompts(suites: Iterable[PromptSuite]) -> tuple[GivenPrompt, ...]:
    """The users' turns of suites' prompts."""
    return tuple(GivenPrompt(one.category, one.turns) for s in suites for one in s.prompts)


def prompts_of_runs(log: RunLog, target: str) -> tuple[GivenPrompt, ...]:
    """The prompts of the log's newest runs of a target, each once.

    Raises ConfigError: there are none.
    """
    rows = log.rows(RunQuery(target=target, limit=MAX_RUNS))
    newest = {row.prompt_id: row.id for row in reversed(rows)}
    runs = log.details([*newest.values()])
    texts = dict.fromkeys(run.prompt_text for run in runs if run.prompt_text.strip())
    if not texts:
        raise ConfigError(f"The log has no run of {target}. Generate something with it first.")
    return tuple(GivenPrompt("runs", (text,)) for text in texts)


def shipped_corpus(target: TargetSpec) -> Path | None:
    """The folder of a target's shipped corpus."""
    folder = presets.FOLDER / "corpora" / target.name
    return folder if (folder / MANIFEST).is_file() else None


def corpus_folder(folder: Path, target: TargetSpec, prompts: Sequence[GivenPrompt]) -> Path:
    """The corpus folder of a target: the shipped one until it is copied, or one per prompts."""
    shipped = shipped_corpus(target)
    if shipped is not None and not prompts:
        own = folder / shipped.name
        return own if (own / MANIFEST).is_file() else shipped
    key = hashlib.sha256(repr((target.name, prompts)).encode()).hexdigest()[:8]
    return folder / f"{slug(target.name)}-{key}"


def slug(name: str) -> str:
    """A name as part of a folder's name."""
    kept = (c.lower() if c.isalnum() and c.isascii() else "-" for c in Path(name).name)
    return "".join(kept).strip("-")[:48] or "target"


# ---- the page's form


class TrainForm(Settings):
    """Values of the page's components; `training`: of the controls of the method's settings."""

    target: str
    dtype: str
    method: str
    learn_from: LearnFrom
    file: str | None = None
    budget: Annotated[Budget, from_controls(Budget())] = Budget()
    training: dict[str, Any] = {}
    session: Annotated[SessionSettings, from_controls(PAGE_SESSION)] = PAGE_SESSION


def plan_of_form(
    catalog: Catalog, log: RunLog, corpora: Path, form: Mapping[str, Any]
) -> TrainPlan:
    """The plan that the form describes. Raises ConfigError: naming what is wrong."""
    check_size(dict(form))
    values = TrainForm.parse(form)
    target = catalog.target(values.target)
    recipe_class = METHODS[validate_choice("method", values.method, KINDS)]
    prompts: tuple[GivenPrompt, ...] = ()
    if values.learn_from == "runs":
        prompts = prompts_of_runs(log, target.name)
    elif values.learn_from == "prompts":
        if values.file is None:
            raise ConfigError("Add a file of prompts to learn from.")
        file = Path(values.file)
        text = read_text(file, most=MAX_PROMPT_FILE)
        prompts = given_prompts([read_suite_text(text, file.name, where=file.name)])
    folder = corpus_folder(corpora, target, prompts)
    if values.learn_from == "shipped" and shipped_corpus(target) is None:
        prompts = given_prompts([read_suite_file(presets.FOLDER / "prompts/training.jsonl")])
    recipe = settings_from(recipe_class, values.training)
    if recipe.begin_with:
        raise ConfigError("begin_with can be set on the command line only.")
    return TrainPlan(
        target=target,
        dtype=read_dtype(values.dtype),
        method=values.method,
        learn_from=values.learn_from,
        corpus=folder,
        corpora=corpora,
        prompts=prompts,
        budget=values.budget,
        seed=recipe.seed,
        settings=recipe.changed,
        session=values.session,
    )
