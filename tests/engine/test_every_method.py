"""Every lossless method × target families × configurations = plain decoding, and the target's law.

The configurations of a method take turns: with each family that has heads, and with each two
others, they meet every prompt once. Heads are fitted to tiny targets in closed form, so that some
of their drafts are right; on the embedded model they are random. MTP and Gemma's assistant need
targets of their own and are in their own files.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import presets
from benchmarks import random_heads
from engine.config import Limits
from engine.drafters import methods, parse_method, user_provided
from engine.drafters.base import Drafter
from engine.drafters.eagle import trees
from engine.drafters.method import MethodConfig
from engine.model.loading import load_target
from engine.model.target import Target
from playground.host.paths import cache_dir
from tests.engine.drafters import judges
from tests.engine.drafters.example_drafter import PairDrafter
from tests.engine.drafters.wrapped import Pausing, Watched, Wrong
from tests.engine.methods import DYNAMIC, METHODS, TAPS, drafter_for, moved, save_head
from tests.engine.methods import target_of as own_target
from tests.engine.prompts import ROOM, prompts
from tests.engine.tuning.controlled import AtRandom
from tests.models import FAMILIES, alike, build_context, lasting_folder, plain_greedy, tiny_target

NEW_TOKENS = 16
NGRAM = {"decoding_type": "NGram"}
TREE = {"use_tree_spec": True}
BLOCKS: list[dict[str, Any]] = [
    {},
    {"use_dynamic_tree": True},
    {"max_draft_len": 1},
    {"max_draft_len": 3, "use_dynamic_tree": True, "max_total_draft_tokens": 6},
    {"drafting": "auto"},
]
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
    "DFlash": BLOCKS,
    "DSpark": BLOCKS,
    "P_EAGLE": BLOCKS,
    "PARD": BLOCKS,
    "Autoregressive": [{}],
    "Lookahead": [
        {},
        {"max_window_size": 1, "max_ngram_size": 2, "max_verification_set_size": 1},
        {"max_window_size": 7, "max_ngram_size": 5, "max_verification_set_size": 7},
        {"max_window_size": 5, "max_ngram_size": 3, "pool_from_text": False},
        {"max_window_size": 1, "max_ngram_size": 4},
        {"drafting": "auto"},
    ],
    "Suffix": [
        {},
        {**TREE, "max_spec_factor": 8.0, "min_token_prob": 0.01},
        {"max_draft_len": 2, "max_tree_depth": 3},
        {"max_spec_factor": 4.0, "use_global_pool": True, "min_token_prob": 0.0},
        {**TREE, "use_global_pool": True, "min_token_prob": 0.0, "max_total_draft_tokens": 6},
        {"drafting": "auto"},
    ],
    "Token_Recycling": [
        {},
        {"recycling_choices": [[0, 0, 0, 0]]},
        {"matrix_top_k": 3, "recycling_choices": [[0, 2], [1, 0], [2]]},
        {"drafting": "auto"},
    ],
    "Combined": [
        {},
        {"retrieval": NGRAM, "min_match_len": 1},
        {
            "retrieval": {**NGRAM, "lookup": "transformers", "max_matching_ngram_size": 3},
            "min_match_len": 3,
        },
        {"retrieval": {"decoding_type": "Suffix", **TREE}, "model": NGRAM},
        {"model": {"decoding_type": "Lookahead"}},
        {"drafting": "auto"},
    ],
    "NGram": [
        {"max_draft_len": 4, "drafting": "auto"},
        {"lookup": "transformers"},
        {"lookup": "transformers", "max_draft_len": 8, "max_matching_ngram_size": 1},
        *(
            {"is_keep_all": keep, "is_use_oldest": oldest, "is_public_pool": public}
            for keep in (True, False)
            for oldest in (True, False)
            for public in (True, False)
        ),
    ],
    "Draft_Target": [
        *({"max_draft_len": n} for n in (1, 2, 5, 9, 16)),
        {"speculative_model": "short"},
        {"confidence_threshold": 0.6},
        {"drafting": "auto"},
    ],
    "User_Provided": [{"drafter": "pairs"}, {"drafter": "pairs", "max_draft_len": 1}],
}
SEPARATE = {"MTP", "MTP_Assistant"}
MODELS = {"Draft_Target": "other", "PARD": "masked"}
EMBEDDED = [name for name, each in CONFIGURATIONS.items() if each is not BLOCKS]
WEIGHTLESS = {*EMBEDDED} - {"Medusa", "ReDrafter", "Eagle", "Eagle3"}
FROM_TEXTS = WEIGHTLESS - {"Autoregressive", "Draft_Target"}
"""Methods that draft what they have seen, and nothing that stands for "not known"."""
WITH_HEADS = ("llama", "qwen3", "gemma3_text", "gpt_neox")
"""Families that heads are made for; methods without heads meet all families."""
RANDOM = {"Autoregressive", "DFlash", "DSpark", "Lookahead", "User_Provided"}
"""Methods that need not guess right within a few tokens."""


@pytest.fixture(autouse=True)
def example_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_provided, "_factories", {"pairs": PairDrafter})


@functools.cache
def embedded_target() -> Target:
    """The embedded model, its context cut to 512 so that a prompt near the limit is affordable."""
    spec = presets.resolve("smollm2-135m-instruct")
    target = load_target(spec, dtype="float32", device="cpu", cache_dir=cache_dir())
    target.config.max_position_embeddings = 512
    return target


def target_of(family: str) -> Target:
    return embedded_target() if family == "embedded" else judges.target_of(family)


@functools.cache
def models_of(family: str) -> dict[str, Target]:
    """Draft models: the target itself, with a mask token, with noise, and with a short context."""
    target = target_of(family)
    if family == "embedded":
        return {"itself": target}
    masked = tiny_target(family, eos_token_id=None, pard_token=270)
    short = tiny_target(seed=6, num_hidden_layers=1, max_position_embeddings=32)
    other = alike(family, 0.05, eos_token_id=None)
    return {"itself": target, "other": other, "masked": masked, "short": short}


@functools.cache
def head_of(family: str, method: str) -> str:
    root, target = lasting_folder("heads"), target_of(family)
    if family == "embedded":
        made = random_heads.make_all(target, root)
        return str(made.get(method, ""))
    return save_head(method, root / "head", target)


@functools.cache
def expected(family: str, prompt: str) -> tuple[list[int], list[int]]:
    target = target_of(family)
    prompt_ids = prompts(target)[prompt]
    room = ROOM if prompt.startswith("near-limit") else NEW_TOKENS
    return prompt_ids, plain_greedy(target, prompt_ids, room)


def configuration(family: str, method: str, index: int) -> MethodConfig:
    model = MODELS.get(method) or head_of(family, method)
    own = {"speculative_model": model} if model else {}
    values = {"decoding_type": method, "drafting": "as set", **own, **CONFIGURATIONS[method][index]}
    if family == "embedded":
        values.pop("eagle3_layers_to_capture", None)
        if method == "Draft_Target":
            values["speculative_model"] = "itself"
    return parse_method(values)


def check(family: str, method: str, index: int, names: list[str]) -> int:
    """One drafter writes all prompts in turn; returns how many drafts were accepted."""
    target = target_of(family)
    config = configuration(family, method, index)
    drafter = config.build(build_context(target, **models_of(family)))
    watched = Watched(drafter, getattr(config, "matrix_top_k", 8 if method == "Combined" else 1))
    if config.drafting == "auto":
        drafter = AtRandom.around(drafter, target, seed=index)
    elif method in FROM_TEXTS and family != "embedded":
        drafter = watched
    accepted = 0
    for name in names:
        prompt_ids, text = expected(family, name)
        limits = Limits(max_new_tokens=NEW_TOKENS, ignore_eos=family != "embedded")
        ours = judges.write(target, drafter, prompt_ids, limits=limits)
        assert ours.output == text, (family, config, name)
        assert all(
            step.bypass or step.num_drafted or not drafter.traits.drafts for step in ours.steps
        )
        accepted += ours.num_accepted
    assert watched.unseen == [], "drafted, but never shown: a placeholder"
    return accepted


def test_every_method_is_here() -> None:
    assert set(CONFIGURATIONS) | SEPARATE == set(methods())


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_greedy_output_equals_plain_decoding_for_a_few_prompts(method: str) -> None:
    names = ["chat-1", "repetitive-2", "near-limit-1"]
    count = len(CONFIGURATIONS[method])
    accepted = [check("llama", method, index, names) for index in range(count)]
    assert sum(accepted) > 0 or method in RANDOM
    check("gemma3_text", method, min(2, count - 1), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [
        (family, method)
        for method in CONFIGURATIONS
        for family in FAMILIES
        if family in WITH_HEADS or method in WEIGHTLESS
    ],
)
def test_greedy_output_equals_plain_decoding(family: str, method: str) -> None:
    names, turn = list(prompts(target_of(family))), list(FAMILIES).index(family)
    assert len(names) == 20
    if family not in WITH_HEADS:
        names = names[turn % 2 :: 2]
    count = len(CONFIGURATIONS[method])
    shares = [names[(index + turn) % count :: count] for index in range(count)]
    accepted = [check(family, method, index, share) for index, share in enumerate(shares)]
    by_luck = method in FROM_TEXTS and family not in WITH_HEADS  # ten short texts of random weights
    assert sum(accepted) > 0 or method in RANDOM or by_luck


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("method", EMBEDDED)
def test_embedded_model_writes_what_it_writes_alone(method: str) -> None:
    """The configurations share the twenty prompts between them."""
    names, count = list(prompts(target_of("embedded"))), len(CONFIGURATIONS[method])
    for index in range(count):
        with torch.inference_mode():
            check("embedded", method, index, names[index::count])


HEADS = ("medusa", "redrafter", "eagle", "eagle3-dynamic", "dflash", "dspark", "p-eagle")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_takes_the_target_s_dtype(name: str) -> None:
    target = moved(own_target(name), torch.device("cpu"))
    target.model.to(torch.bfloat16)
    text = judges.write(target, drafter_for(target, name), judges.PROMPTS[0])
    assert any(step.num_drafted for step in text.steps)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("plain", "lookahead")])
def test_drafts_after_a_pause_are_those_without_one(name: str) -> None:
    """A drafter that is not asked for some steps drafts afterwards as if it had been."""
    target = own_target(name)
    always, seldom = (Pausing(drafter_for(target, name), target, every) for every in (1, 5))
    for drafter in (always, seldom):
        judges.write(target, drafter, judges.PROMPTS[0], tokens=60)
    assert len(seldom.drawn) >= 10
    assert {at: always.drawn[at] for at in seldom.drawn} == seldom.drawn


# ---- sampling

SMALL_TREE = {"use_dynamic_tree": True, "max_draft_len": 3, "dynamic_tree_max_topK": 3}
SMALL_TREE |= {"max_non_leaves_per_layer": 2, "max_total_draft_tokens": 9}
SEVERAL = {"max_spec_factor": 4.0, "min_token_prob": 0.01}
BLOCK_TREE = {"use_dynamic_tree": True, "max_total_draft_tokens": 6}
SAMPLED: dict[str, dict[str, Any]] = {
    "Suffix, tree": {**TREE, **SEVERAL},
    "Suffix, chain": SEVERAL,
    "Token_Recycling": {},
    "Lookahead": {},
    "User_Provided": {"drafter": "pairs"},
    "Medusa": {"medusa_choices": [[0, 0], [0, 1], [1, 0], [2]]},
    "ReDrafter": {"beam_width": 4, "beam_length": 3},
    "Eagle, drawn": {"eagle_choices": [[0, 0], [0, 1], [1, 0], [2]]},
    "Eagle, tree": SMALL_TREE,
    "Eagle3, chain": {**TAPS, "max_draft_len": 2},
    "Eagle3, tree": {**TAPS, **SMALL_TREE},
    **{f"{name}, chain": {} for name in ("DFlash", "DSpark", "P_EAGLE", "PARD")},
    **{f"{name}, tree": BLOCK_TREE for name in ("DFlash", "DSpark", "P_EAGLE", "PARD")},
    "Draft_Target, drawn": {},
    "Draft_Target, likeliest": {"use_draft_probs": False},
}
QUICK = {"Suffix, tree", "Token_Recycling", "Lookahead", "Medusa", "Eagle, drawn"}
QUICK |= {"Draft_Target, drawn"}
QUICK_AT_RANDOM = {"Suffix, tree", "Eagle, drawn"}


@functools.cache
@torch.inference_mode()
def sampled_target() -> Target:
    return judges.few_tokens(0.35, layers=3)


@pytest.mark.parametrize(
    ("name", "at_random"),
    [
        (name, at_random) if name in quick else judges.slow(name, at_random)
        for name in SAMPLED
        for at_random, quick in ((False, QUICK), (True, QUICK_AT_RANDOM))
    ],
)
def test_sampled_output_follows_the_target(name: str, at_random: bool, tmp_path: Path) -> None:
    """Whether it drafts as set, or whatever and whenever the dice say."""
    drafter = sampled_drafter(name, tmp_path)
    if at_random:
        drafter = AtRandom.around(drafter, sampled_target())
    assert judges.p_value(sampled_target(), drafter, drawn=name.endswith("drawn")) > 1e-3


def test_drafts_that_were_not_drawn_as_they_claim_break_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above: the likeliest tokens, passed off as draws."""
    monkeypatch.setattr(
        trees, "draw_without_replacement", lambda probs, count, draws: probs.topk(count).indices
    )
    drafter = sampled_drafter("Eagle, drawn", tmp_path)
    assert judges.p_value(sampled_target(), drafter, drawn=True) < 1e-4


@pytest.mark.parametrize("tries", [1, 2])
def test_a_wrong_verifier_is_found_though_drafts_know_nothing(tries: int) -> None:
    target = judges.sampled_target()
    drafter = parse_method({"decoding_type": "Lookahead"}).build(build_context(target))
    assert judges.p_value(target, Wrong(drafter, tries)) < 1e-4


def sampled_drafter(name: str, folder: Path) -> Drafter:
    target, method = sampled_target(), name.partition(",")[0]
    model = MODELS.get(method) or save_head(method, folder / "head", target)
    own = {"speculative_model": model} if model else {}
    masked = judges.few_tokens(0.35, layers=3, pard_token=11)
    context = build_context(target, masked=masked, other=judges.few_tokens(0.2, seed=1))
    return parse_method({"decoding_type": method, **own, **SAMPLED[name]}).build(context)
