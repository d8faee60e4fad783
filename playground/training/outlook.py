"""Estimates of a training: its time and disk space on this machine, and the MAT to expect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import presets
from engine.formats import plural
from engine.model.corpus import DIALOGUES
from engine.model.files import read_settings
from playground.experiments.job import approximate_duration
from playground.host.catalog import Catalog
from playground.training.folder import CARD
from playground.training.plan import PART_OF_MINUTES, TrainPlan
from playground.training.work import Speeds
from storage import PLAIN, RunLog, RunQuery

CORPUS_BYTES, STATE_BYTES = 5, 14
"""Bytes on disk of a token, and of a parameter with its optimizer state."""
WRITING, LEARNING = 3.0, 8.0
"""Assumed speeds relative to plain decoding, until they are measured."""


def outlook(plan: TrainPlan, catalog: Catalog, log: RunLog, speeds: Speeds) -> str:
    """Time, disk space and expected MAT of a plan on this machine, in sentences."""
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
    """Time and disk space, from speeds measured with this target or from plain decoding's."""
    measured = speeds.read(plan.target.name)
    query = RunQuery(target=plan.target.name, decoding_type=PLAIN, limit=1)
    plain = next((run.tok_s for run in log.rows(query) if run.tok_s), 0.0)
    write = measured.get("write") or WRITING * plain
    learn = measured.get(plan.method) or LEARNING * plain
    present, epochs = _tokens_in(plan.corpus), plan.recipe.epochs
    if not learn or (not write and present < (plan.budget.tokens or 1)):
        return "Not measured with this target yet: the first steps measure it."
    most = plan.budget.tokens or 10**12
    if plan.budget.minutes is not None:
        left_s = 60 * PART_OF_MINUTES * plan.budget.minutes
        spare_s = left_s - present * epochs / learn
        new = spare_s / (1 / write + epochs / learn) if write else 0.0
        most = min(most, int(present + new if spare_s > 0 else left_s * learn / epochs))
    written = max(0, most - present)
    size: float = CORPUS_BYTES * written + STATE_BYTES * num_parameters
    size += min(plan.session.feature_gib * 2**30, most * 2**12)
    is_measured = plan.method in measured and (not written or "write" in measured)
    writing = "no writing"
    if written:
        writing = f"{approximate_duration(written / write)} of writing ({written:,} tokens)"
    by = "as measured here" if is_measured else "estimated from plain decoding"
    return (
        f"{writing.capitalize()}, {approximate_duration(most * epochs / learn)} of training, which "
        f"reads {most * epochs:,.0f} tokens, {size / 1e6:,.0f} MB of disk; {by}."
    )


def _cards(plan: TrainPlan, catalog: Catalog) -> list[Mapping[str, Any]]:
    """The cards of drafters of this kind for this target, each once."""
    own = [one for one in catalog.presets.values() if one.target == plan.target.name]
    names = dict.fromkeys(getattr(one.config, "speculative_model", None) for one in own)
    files = [Path(presets.locate(name)) / CARD for name in filter(None, names)]
    cards = [read_settings(file) for file in files if file.is_file()]
    return [card for card in cards if card.get("method") == plan.method]


def _tokens_in(corpus: Path) -> int:
    """Approximate number of tokens in a corpus, from its file size."""
    file = corpus / DIALOGUES
    return int(file.stat().st_size / CORPUS_BYTES) if file.is_file() else 0
