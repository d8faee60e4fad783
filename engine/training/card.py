"""The training card: what a drafter was made from and how well it drafts, for people and tools."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.drafters.method import MethodConfig
from engine.training.evaluation import Score, lines
from engine.training.trainer import Trainer

LOG_ENTRIES = 120
"""Of the training log; a learning curve has no more to show."""


def card(
    trainer: Trainer,
    rates: Sequence[Sequence[float]],
    scores: Mapping[str, Score],
    config: MethodConfig,
    *,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Everything a person should know about these weights, as plain data."""
    target, corpus, settings = trainer.target, trainer.corpus, trainer.settings
    return {
        "method": settings.method,
        "paper": settings.paper,
        "target": target.name,
        "target_weights": target.provenance.get("weights"),
        "network": dict(trainer.student.describe()),
        "num_parameters": sum(p.numel() for p in trainer.student.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "data": {
            "what": "self-distillation: the target's own answers to prompts it made itself"
            " or was given",
            "corpus_settings": corpus.manifest["settings"],
            "num_dialogues": len(trainer.train),
            "num_tokens": trainer.num_train_tokens,
            "num_answer_tokens": sum(b - a for e in trainer.train for a, b in e.spans),
            "categories": _categories(trainer),
            "num_held_out_dialogues": len(trainer.held_out),
        },
        "settings": _settings(trainer),
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "training_log": _thinned(trainer.log),
        "rank_rates": [list(ranks) for ranks in rates],
        "evaluated_with": config.model_dump(mode="json", exclude={"speculative_model"}),
        "held_out": {category: asdict(one) for category, one in scores.items()},
    }


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Of the weights begun with only the folder's name: where it lay is nobody's business."""
    values = trainer.settings.model_dump(mode="json")
    if values["begin_with"] is not None:
        values["begin_with"] = Path(values["begin_with"]).name
    return values


def _thinned(log: Sequence[Any]) -> list[Any]:
    """About LOG_ENTRIES of the entries, evenly spaced, and the last."""
    every = max(1, len(log) // LOG_ENTRIES)
    return [entry for i, entry in enumerate(log) if i % every == 0 or i == len(log) - 1]


def _categories(trainer: Trainer) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in trainer.train:
        counts[entry.category] = counts.get(entry.category, 0) + 1
    return dict(sorted(counts.items()))


def write_card(folder: Path, values: Mapping[str, Any], scores: Mapping[str, Score]) -> None:
    """`card.json` and `README.md`."""
    (folder / "card.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_markdown(values, scores), encoding="utf-8")


def _markdown(values: Mapping[str, Any], scores: Mapping[str, Score]) -> str:
    data, rates = values["data"], values["rank_rates"]
    shares = ", ".join(f"{name} {count}" for name, count in data["categories"].items())
    network = "; ".join(f"{name}: {value}" for name, value in values["network"].items())
    parts = [
        f"# {values['method']} drafter for {values['target']}",
        "",
        f"{values['num_parameters']:,} parameters, {values['dtype']}; arXiv {values['paper']}. "
        f"{network}.",
        "",
        f"Trained by self-distillation on {data['num_tokens']:,} tokens in "
        f"{data['num_dialogues']:,} dialogues ({data['num_answer_tokens']:,} tokens of answers) "
        f"with the target's own answers: {shares}. "
        f"{values['steps']:,} steps, seed {values['settings']['seed']}.",
        "",
        "Acceptance when decoding greedily, on prompts that were not trained on "
        "(MAT = 1 + accepted draft tokens / steps):",
        "",
        *lines(dict(scores)),
        "",
        "How often each rank is right along the true text, per depth, on held-out dialogues:",
        "",
        "| depth | " + " | ".join(f"rank {i}" for i in range(4)) + " | ranks 0–9 |",
        "|---|---|---|---|---|---|",
    ]
    for depth, ranks in enumerate(rates, start=1):
        shown = " | ".join(f"{rate:.3f}" for rate in ranks[:4])
        parts.append(f"| {depth} | {shown} | {sum(ranks):.3f} |")
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    return "\n".join([*parts, "", f"Made with {versions}.", ""])
