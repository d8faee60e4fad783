"""Gemma 4's assistant drafts what transformers' own generator drafts with it, at every step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator,
)

import presets
from engine.drafters.heads.assistant import AssistantConfig, load_assistant, shared_layers
from engine.errors import DrafterError
from engine.model.target import Target
from engine.tuning.controller import build_drafter
from tests.engine.drafters import judges
from tests.models import build_context, save_tiny, tiny_target

SHIPPED: Any = presets.targets()["tiny-random-gemma-4"].random
ASSISTANT = SHIPPED.drafters["assistant"].config["text_config"] | {"tie_word_embeddings": True}


def save_assistant(folder: Path, target: Target, **overrides: Any) -> Path:
    """A random assistant of a tiny target, in transformers' layout."""
    text = AutoConfig.for_model(**{**ASSISTANT, "vocab_size": target.vocab_size})
    config = AutoConfig.for_model(
        "gemma4_assistant",
        **{"text_config": text, "backbone_hidden_size": target.hidden_size, **overrides},
    )
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
        if overrides.get("use_ordered_embeddings"):
            model.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size))
    model.save_pretrained(folder)
    return folder


ORDERED = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}


def built(target: Target, folder: Path, length: int = 4) -> Any:
    config = AssistantConfig(speculative_model=str(folder), max_draft_len=length)
    return config.build(build_context(target))


@torch.inference_mode()
def reference_draft(target: Target, assistant: Any, text: list[int], length: int) -> list[int]:
    """What transformers drafts after `text`, given the target's view of all but its last token."""
    assistant.generation_config.num_assistant_tokens = length
    limits = target.model.generation_config
    limits.max_length = 10_000
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.model.get_input_embeddings(), limits
    )
    ids: Any = torch.tensor([text])
    seen = target.model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    found, _ = generator.get_candidates(ids, {}, seen, is_first_iteration=False, n_last_matches=0)
    return [int(token) for token in found[0, len(text) :]]


@pytest.mark.parametrize("overrides", [{}, ORDERED])
def test_every_draft_equals_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    target = tiny_target("gemma4_text", eos_token_id=None)
    folder = save_assistant(tmp_path, target, **overrides)
    reference = load_assistant(str(folder), target)
    reference.set_attn_implementation("eager")
    plain = tiny_target("gemma4_text", eos_token_id=None)
    plain.model.set_attn_implementation("eager")
    drafter = built(target, folder)
    drafts = functools.partial(reference_draft, plain, reference, length=4)
    # Longer than the sliding window of 12 tokens.
    judges.assert_drafts_equal(drafts, target, drafter, tokens=24)


def test_it_reads_the_last_layers_with_keys_of_their_own() -> None:
    """Layers 0 … 3 have keys of their own, 4 and 5 look at those of 2 and 3."""
    target = tiny_target("gemma4_text", eos_token_id=None)
    assert target.config.num_kv_shared_layers == 2 and target.num_layers == 6
    assert shared_layers(target) == (3, 2)
    assert target.kv_bytes == 2 * (2 * 8 + 2 * 8 + 2 * 16 + 2 * 16) * 4
    alone = tiny_target("gemma4_text", eos_token_id=None, num_kv_shared_layers=0)
    assert shared_layers(alone) == (5, 4)


def test_the_controller_times_its_drafts_and_runs_it(tmp_path: Path) -> None:
    target = tiny_target("gemma4_text", eos_token_id=None)
    config = AssistantConfig(speculative_model=str(save_assistant(tmp_path, target)))
    drafter: Any = build_drafter(config, build_context(target))
    assert set(drafter.experience.costs.draft_times["chain"]) == {1, 4}
    judges.assert_greedy_lossless(target, drafter)


@pytest.mark.slow
def test_sampled_output_follows_the_target(tmp_path: Path) -> None:
    # Beyond the window, the modules with a cache differ from those without.
    target = judges.few_tokens(0.35, family="gemma4_text", layers=6, sliding_window=512)
    drafter = built(target, save_assistant(tmp_path, target), length=2)
    assert judges.p_value(target, drafter, tokens=200) > 1e-3


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    target = tiny_target("gemma4_text", eos_token_id=None)
    with pytest.raises(DrafterError, match="is of the type llama"):
        built(target, save_tiny(tmp_path / "llama"))
    other = tiny_target("gemma4_text", eos_token_id=None, hidden_size=16)
    with pytest.raises(DrafterError, match="keys and values of another model than tiny-gemma4"):
        built(target, save_assistant(tmp_path / "other", other))
    folder = save_assistant(tmp_path / "own", target)
    with pytest.raises(DrafterError, match="another model than tiny-llama"):
        built(tiny_target("llama"), folder)
