"""Every lossless method × target families × configurations = plain decoding, over 20 prompts.

The five configurations of a method take turns: with each family they meet every prompt once, and
over the four families each configuration meets sixteen prompts. Heads are fitted to tiny targets in
closed form, so that some of their drafts are right; on the embedded model they are random. MTP and
what drafts blocks have targets or models of their own and are in their own files.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import presets
from benchmarks import random_heads
from engine.config import Limits
from engine.decode import decode
from engine.drafters import methods, parse_method
from engine.drafters.method import MethodConfig
from engine.model.loading import load_target
from engine.model.target import Target
from engine.steps import End, Step
from playground.host.paths import cache_dir
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.fitted import save_medusa, save_redrafter
from tests.engine.prompts import ROOM, prompts
from tests.engine.tuning.controlled import AtRandom
from tests.models import build_context, plain_greedy, tiny_target

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_neox")
NEW_TOKENS = 24
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}
TAPS = {"eagle3_layers_to_capture": [0, 1, 2]}
CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "Medusa": [
        {"medusa_choices": [[0]]},
        {"medusa_choices": [[0, 0, 0, 0]]},
        {"medusa_choices": [[0, 0], [0, 1], [1, 0], [1, 1], [2]]},
        {"medusa_choices": [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]},
        {"medusa_choices": [[i] for i in range(40)], "drafting": "auto"},
    ],
    "ReDrafter": [
        {"beam_width": 1, "beam_length": 2},
        {"beam_width": 1, "beam_length": 5},
        {"beam_width": 4, "beam_length": 5},
        {"beam_width": 10, "beam_length": 3},
        {"beam_width": 3, "beam_length": 6, "drafting": "auto"},
    ],
    "Eagle": [
        {},
        {"eagle_choices": [[0, 0, 0, 0, 0]]},
        {**DYNAMIC, "max_draft_len": 3},
        {**DYNAMIC, "max_draft_len": 6, "max_non_leaves_per_layer": 2},
        {**DYNAMIC, "max_draft_len": 4, "drafting": "auto"},
    ],
    "Eagle3": [
        {**TAPS, "max_draft_len": 1},
        {**TAPS, "max_draft_len": 7},
        {**TAPS, **DYNAMIC, "max_draft_len": 3},
        {**TAPS, **DYNAMIC, "max_draft_len": 5, "max_non_leaves_per_layer": 1},
        {**TAPS, "max_draft_len": 4, "drafting": "auto"},
    ],
    "Lookahead": [
        {},
        {"max_window_size": 1, "max_ngram_size": 2, "max_verification_set_size": 1},
        {"max_window_size": 7, "max_ngram_size": 5, "max_verification_set_size": 7},
        {"max_window_size": 5, "max_ngram_size": 3, "pool_from_text": False},
        {"drafting": "auto"},
    ],
    "Suffix": [
        {},
        {"use_tree_spec": True},
        {"max_draft_len": 2, "max_tree_depth": 3},
        {"use_global_pool": True, "min_token_prob": 0.0},
        {"drafting": "auto"},
    ],
    "Token_Recycling": [
        {},
        {"recycling_choices": [[0, 0, 0, 0]]},
        {"matrix_top_k": 2, "recycling_choices": [[0], [1]]},
        {"keep_matrix": False, "recycle_prompt": False},
        {"drafting": "auto"},
    ],
    "Combined": [
        {},
        {"retrieval": {"decoding_type": "NGram"}},
        {"min_match_len": 1},
        {"model": {"decoding_type": "Lookahead"}},
        {"drafting": "auto"},
    ],
    "NGram": [
        {"max_draft_len": 4, "drafting": "auto"},
        {"lookup": "transformers"},
        {"max_draft_len": 8, "max_matching_ngram_size": 3},
        {"is_public_pool": False},
        {"is_use_oldest": False},
    ],
    "Draft_Target": [{"max_draft_len": n} for n in (1, 2, 5, 9)] + [{"drafting": "auto"}],
}
SEPARATE = {
    "Autoregressive",
    "MTP",
    "MTP_Assistant",
    "DFlash",
    "DSpark",
    "PARD",
    "P_EAGLE",
    "User_Provided",
}
"""Covered by their own test files, each against plain decoding too."""


@functools.cache
def embedded_target() -> Target:
    """The embedded model, its context cut to 512 so that a prompt near the limit is affordable."""
    spec = presets.resolve("smollm2-135m-instruct")
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=cache_dir())
    target.config.max_position_embeddings = 512
    return target


@functools.cache
def target_of(family: str) -> Target:
    return embedded_target() if family == "embedded" else tiny_target(family, eos_token_id=None)


@functools.cache
def other_of(family: str) -> Target:
    """The target with other weights by a little: some of what it drafts is right."""
    if family == "embedded":
        return target_of(family)
    other = tiny_target(family, eos_token_id=None)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in other.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


@functools.cache
def heads_of(family: str) -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="heads-"))
    target = target_of(family)
    if family == "embedded":
        return {name: str(path) for name, path in random_heads.make_all(target, root).items()}
    makers: dict[str, Callable[[], Path]] = {
        "Medusa": lambda: save_medusa(root / "medusa", target, num_heads=4),
        "ReDrafter": lambda: save_redrafter(root / "redrafter", target),
        "Eagle": lambda: save_eagle(root / "eagle", target),
        "Eagle3": lambda: save_eagle3(root / "eagle3", target, (1, 2, 3), draft_vocab=64),
    }
    return {name: str(make()) for name, make in makers.items()}


@functools.cache
def expected(family: str, prompt: str) -> tuple[list[int], list[int]]:
    target = target_of(family)
    prompt_ids = prompts(target)[prompt]
    room = ROOM if prompt.startswith("near-limit") else NEW_TOKENS
    return prompt_ids, plain_greedy(target, prompt_ids, room)


def configuration(family: str, method: str, index: int) -> MethodConfig:
    values = {"decoding_type": method, "drafting": "as set", **CONFIGURATIONS[method][index]}
    model = {**heads_of(family), "Draft_Target": "other"}.get(method)
    if family == "embedded":
        values.pop("eagle3_layers_to_capture", None)
        model = "itself" if method == "Draft_Target" else model
    return parse_method({**values, **({"speculative_model": model} if model else {})})


def check(family: str, method: str, index: int, names: list[str]) -> int:
    """One drafter writes all prompts in turn; returns how many drafts were accepted."""
    target = target_of(family)
    bench = build_context(target, other=other_of(family), itself=target)
    config = configuration(family, method, index)
    drafter = config.build(bench)
    if config.drafting == "auto":
        drafter = AtRandom.around(drafter, target, seed=index)
    accepted = 0
    for name in names:
        prompt_ids, text = expected(family, name)
        limits = Limits(max_new_tokens=NEW_TOKENS, ignore_eos=family != "embedded")
        *records, end = decode(target, drafter, prompt_ids, limits=limits)
        assert isinstance(end, End)
        assert list(end.output_ids) == text, (family, config, name)
        steps = [record for record in records if isinstance(record, Step)]
        assert all(step.bypass or step.num_drafted for step in steps)
        accepted += sum(step.num_accepted for step in steps)
    return accepted


def test_every_method_is_here() -> None:
    assert set(CONFIGURATIONS) | SEPARATE == set(methods())
    assert all(len(configurations) == 5 for configurations in CONFIGURATIONS.values())


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_greedy_output_equals_plain_decoding_for_a_few_prompts(method: str) -> None:
    check("gemma3_text", method, 2, ["chat-1", "repetitive-2", "near-limit-1"])


@pytest.mark.slow
@pytest.mark.parametrize("method", CONFIGURATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(family: str, method: str) -> None:
    names, turn = list(prompts(target_of(family))), FAMILIES.index(family)
    assert len(names) == 20
    shares = [names[(index + turn) % 5 :: 5] for index in range(5)]
    assert sum(check(family, method, index, share) for index, share in enumerate(shares)) > 0


@pytest.mark.network
@pytest.mark.parametrize("method", ["NGram", "Draft_Target"])
def test_embedded_model_writes_what_it_writes_alone_for_a_few_prompts(method: str) -> None:
    with torch.inference_mode():
        check("embedded", method, 1, ["chat-1", "code-0", "repetitive-1", "one-token-0"])


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_embedded_model_writes_what_it_writes_alone(method: str) -> None:
    """The five configurations share the twenty prompts between them, four each."""
    names = list(prompts(target_of("embedded")))
    for index in range(5):
        with torch.inference_mode():
            check("embedded", method, index, names[index::5])
