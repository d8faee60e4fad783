"""What the Train page's form asks for, and what that will take on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import presets
from engine.config import Settings
from engine.errors import ConfigError, one_of
from engine.formats import plural
from engine.model.corpus import DIALOGUES
from engine.model.files import read_settings
from engine.safe_text import read_text
from engine.training.methods import METHODS
from engine.training.session import SessionSettings
from playground.experiments.job import about
from playground.experiments.prompt_files import read_suite_text
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.request import check_size, read_dtype
from playground.training.folder import CARD
from playground.training.plan import (
    KINDS,
    PART_OF_MINUTES,
    Budget,
    LearnFrom,
    TrainPlan,
    corpus_folder,
    given_prompts,
    prompts_of,
    prompts_of_runs,
)
from playground.training.work import Speeds
from storage import RunLog, RunQuery

PAGE_SESSION = SessionSettings(evals=4, eval_prompts=1, eval_tokens=64, looks=24)
MAX_PROMPT_FILE = 8_000_000
CORPUS_BYTES, STATE_BYTES = 5, 14
"""On disk: of a token, and of a parameter with its optimizer's state."""
WRITING, LEARNING = 3.0, 8.0
"""Speeds over plain decoding's, before they are measured."""


class TrainForm(Settings):
    """What the page's components hold; settings as their controls hold them."""

    target: str
    dtype: str
    method: str
    learn_from: LearnFrom
    file: str | None = None
    budget: dict[str, Any] = {}
    training: dict[str, Any] = {}
    session: dict[str, Any] = {}


def plan_of_form(
    catalog: Catalog, log: RunLog, corpora: Path, form: Mapping[str, Any]
) -> TrainPlan:
    """The plan that the form describes.

    Raises ConfigError: naming what is wrong.
    """
    check_size(dict(form))
    values = TrainForm.parse(form)
    target = catalog.target(values.target)
    one_of("method", values.method, KINDS)
    if values.learn_from == "runs":
        prompts = prompts_of_runs(log, target.name)
    elif values.learn_from == "prompts":
        if values.file is None:
            raise ConfigError("Add a file of prompts to learn from.")
        file = Path(values.file)
        text = read_text(file, most=MAX_PROMPT_FILE)
        prompts = given_prompts([read_suite_text(text, file.name, where=file.name)])
    else:
        prompts = ()
    folder = corpus_folder(corpora, target, prompts)
    if values.learn_from == "shipped" and not folder.is_relative_to(presets.FOLDER):
        prompts = prompts_of([presets.FOLDER / "prompts/training.jsonl"])
    recipe = settings_from(METHODS[values.method], values.training, where="training")
    if recipe.begin_with:
        raise ConfigError("begin_with can be set on the command line only.")
    session = settings_from(SessionSettings, values.session) if values.session else PAGE_SESSION
    return TrainPlan(
        target=target,
        dtype=read_dtype(values.dtype),
        method=values.method,
        learn_from=values.learn_from,
        corpus=folder,
        prompts=prompts,
        budget=settings_from(Budget, values.budget, where="budget"),
        seed=recipe.seed,
        settings=recipe.changed,
        session=session,
    )


# ---- what it will take


def outlook(plan: TrainPlan, catalog: Catalog, log: RunLog, speeds: Speeds) -> str:
    """What a plan will take on this machine, and what to expect, in sentences."""
    cards = _cards(plan, catalog)
    takes = _takes(plan, log, speeds, int(cards[0]["num_parameters"]) if cards else 0)
    if plan.prompts and plan.learn_from != "shipped":
        takes = f"{plural(len(plan.prompts), 'prompt')} to answer. {takes}"
    if not cards:
        return f"{takes} MAT begins at 1; most of the gain comes with the first million tokens."
    best = max(cards, key=lambda card: card["held_out"]["overall"]["mat"])
    return (
        f"{takes} For comparison: a head of this kind for this target reached MAT "
        f"{best['held_out']['overall']['mat']:.2f} after reading "
        f"{best['data']['num_tokens'] * best['settings']['epochs'] / 1e6:.1f} million tokens."
    )


def _takes(plan: TrainPlan, log: RunLog, speeds: Speeds, num_parameters: int) -> str:
    """Minutes and disk, by the speeds measured with this target, else by plain decoding's."""
    known = speeds.read(plan.target.name)
    query = RunQuery(target=plan.target.name, decoding_type="Autoregressive", limit=1)
    plain = next((run.tok_s for run in log.rows(query) if run.tok_s), 0.0)
    write = known.get("write") or WRITING * plain
    learn = known.get(plan.method) or LEARNING * plain
    there, epochs = _tokens_in(plan.corpus), plan.recipe.epochs
    if not learn or (not write and there < (plan.budget.tokens or 1)):
        return "Not measured with this target yet: the first steps measure it."
    most = plan.budget.tokens or 10**12
    if plan.budget.minutes is not None:
        left_s = 60 * PART_OF_MINUTES * plan.budget.minutes
        spare_s = left_s - there * epochs / learn
        new = spare_s / (1 / write + epochs / learn) if write else 0.0
        most = min(most, int(there + new if spare_s > 0 else left_s * learn / epochs))
    written = max(0, most - there)
    size: float = CORPUS_BYTES * written + STATE_BYTES * num_parameters
    size += min(plan.session.feature_gib * 2**30, most * 2**12)
    is_measured = plan.method in known and (not written or "write" in known)
    writing = (
        f"{about(written / write)} of writing ({written:,} tokens)" if written else "no writing"
    )
    by = "as measured here" if is_measured else "estimated from plain decoding"
    return (
        f"{writing.capitalize()}, {about(most * epochs / learn)} of training, which reads "
        f"{most * epochs:,.0f} tokens, {size / 1e6:,.0f} MB of disk; {by}."
    )


def _cards(plan: TrainPlan, catalog: Catalog) -> list[Mapping[str, Any]]:
    """The cards of drafters of this kind for this target, each once."""
    own = [one for one in catalog.presets.values() if one.target == plan.target.name]
    names = dict.fromkeys(getattr(one.config, "speculative_model", None) for one in own)
    files = [Path(presets.locate(name)) / CARD for name in filter(None, names)]
    cards = [read_settings(file) for file in files if file.is_file()]
    return [card for card in cards if card.get("method") == plan.method]


def _tokens_in(corpus: Path) -> int:
    """About how many tokens are written, without reading them."""
    file = corpus / DIALOGUES
    return int(file.stat().st_size / CORPUS_BYTES) if file.is_file() else 0
