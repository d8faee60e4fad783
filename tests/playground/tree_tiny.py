"""A catalog for the Tree page: a tiny target with Medusa heads, an EAGLE head, chains, suites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.eagle.methods import EagleConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.drafters.lookup.token_recycling import TokenRecyclingConfig
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from presets import MethodPreset, Prompt, PromptSuite
from tests.engine.drafters.eagle_heads import save_eagle
from tests.engine.drafters.fitted import save_medusa
from tests.playground.tiny import save_tiny_llama

HEADS = 5
SUITE = (
    Prompt(category="chat", turns=("Say hello.",), raw=True),
    Prompt(category="chat", turns=("Write about a lighthouse.",), raw=True),
    Prompt(category="code", turns=("def f(x):",), raw=True),
    Prompt(category="code", turns=("for i in range(3):",), raw=True),
)


def tree_catalog(folder: Path) -> Catalog:
    """The target and its drafters, saved in a folder."""
    spec = TargetSpec(name="tiny", title="Tiny", path=str(save_tiny_llama(folder / "tiny")))
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=folder / "cache")
    medusa = MedusaConfig(speculative_model=str(save_medusa(folder / "medusa", target, HEADS)))
    eagle = EagleConfig(speculative_model=str(save_eagle(folder / "eagle", target)))
    target.close()
    dynamic: dict[str, Any] = {"use_dynamic_tree": True, "max_draft_len": 4}
    dynamic |= {"dynamic_tree_max_topK": 3, "max_total_draft_tokens": 12}
    configs = {
        "plain": ("Plain", AutoregressiveConfig()),
        "medusa": ("Tiny Medusa", medusa),
        "eagle": ("Tiny EAGLE", eagle),
        "eagle2": ("Tiny EAGLE-2", eagle.replace(**dynamic)),
        "ngram": ("N-gram", NGramConfig(max_draft_len=4)),
        "recycling": ("Token recycling", TokenRecyclingConfig()),
    }
    suite = PromptSuite(name="small", title="Small", prompts=SUITE)
    return Catalog(
        targets={"tiny": spec},
        presets={
            name: MethodPreset(name=name, title=title, config=config)
            for name, (title, config) in configs.items()
        },
        types={
            type(config).model_fields["decoding_type"].default: type(config)
            for _, config in configs.values()
        },
        suites={"small": suite},
        resolve=lambda name: spec,
    )
