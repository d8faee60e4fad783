"""A text has one set of rotary frequencies, whatever it is read with and drafted by."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Limits
from engine.drafters.texts import Text as TunedText
from engine.errors import TargetError
from engine.model.audit import audit
from engine.model.batch import TextBatch
from engine.model.target import Target
from engine.proposal import Needs
from engine.tuning.ranks import trace_text
from tests.engine.cpu.targets import DEFAULT_ROTARY
from tests.engine.cuda.targets import captured, model_of, runner_of
from tests.engine.drafters.judges import Text, write
from tests.engine.methods import drafter_for
from tests.engine.test_verify_tree import assert_close
from tests.models import alike, load_tiny, plain_greedy, save_tiny, tiny_target

ORIGINAL = 32
"""Tokens of the original context, within which transformers uses the short factors."""
SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [1.0, 4.0, 9.0, 30.0]
PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 40, 7, 8, 9]
METHODS = ["plain", "ngram", "lookahead", "recycling", "draft-model", "draft-model-text"]
WITHIN, ACROSS = ORIGINAL - len(PROMPT), 40
"""New tokens that end with the original context, or beyond it."""


def longrope(short: list[float], long: list[float], original: int = ORIGINAL) -> dict[str, Any]:
    """Settings of a Phi-3; both factors equal = whatever the length."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short}
    rotary |= {"long_factor": long, "original_max_position_embeddings": original}
    return {"rope_parameters": rotary, "original_max_position_embeddings": original}


@functools.cache
def phi3(short: tuple[float, ...] = tuple(SHORT), long: tuple[float, ...] = tuple(LONG)) -> Target:
    settings = longrope(list(short), list(long))
    return tiny_target("phi3", eos_token_id=None, **settings)


def always_long() -> Target:
    """The same weights, with the long factors at every length."""
    return phi3(tuple(LONG))


@functools.cache
def small() -> Target:
    """A draft model whose factors depend on the length, too."""
    target: Target = alike.__wrapped__("phi3", eos_token_id=None, **longrope(SHORT, LONG))
    return target


def answer(name: str, tokens: int, target: Target | None = None, **options: Any) -> Text:
    target = target or phi3()
    drafter = drafter_for(target, name, small=small())
    return write(target, drafter, PROMPT, tokens=tokens, **options)


@pytest.mark.parametrize("name", METHODS)
def test_a_text_that_may_cross_has_the_long_factors_from_its_start(name: str) -> None:
    text = answer(name, ACROSS)
    assert text.output == plain_greedy(always_long(), PROMPT, ACROSS)
    assert text.output != plain_greedy(phi3(), PROMPT, ACROSS)  # which changes them on the way


@pytest.mark.parametrize("name", METHODS)
def test_a_text_within_the_original_context_has_the_short_factors(name: str) -> None:
    """Also where a draft reaches beyond it."""
    text = answer(name, WITHIN)
    assert text.output == plain_greedy(phi3(), PROMPT, WITHIN)
    assert text.output != plain_greedy(always_long(), PROMPT, WITHIN)


@pytest.mark.parametrize("tokens", [WITHIN, ACROSS])
def test_a_draft_model_drafts_with_the_factors_of_the_text(tokens: int) -> None:
    """Within one text, and where a finished text is read again to tune the drafter."""
    factors = SHORT if tokens == WITHIN else LONG
    alone: Target = alike.__wrapped__("phi3", eos_token_id=None, **longrope(factors, factors))
    drafters = [drafter_for(phi3(), "draft-model", small=model) for model in (small(), alone)]
    texts = [write(phi3(), drafter, PROMPT, tokens=tokens) for drafter in drafters]
    ours, theirs = ([step.tokens for step in text.steps[:-4]] for text in texts)
    assert ours == theirs
    output, limits = tuple(texts[0].output[:8]), Limits(max_new_tokens=tokens)
    trace = trace_text(phi3(), TunedText(tuple(PROMPT), output, limits=limits), Needs(), tail=3)
    assert trace.tokens.tolist() == [*PROMPT, *texts[0].output[:11]]
    assert torch.equal(*(drafter.ranks(trace, 3) for drafter in drafters))


@pytest.mark.parametrize("tokens", [WITHIN, ACROSS])
def test_a_prompt_read_in_parts_has_one_set_of_factors(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer("plain", tokens)
    monkeypatch.setattr("engine.decode.PREFILL_ROWS", 5)
    assert answer("ngram", tokens).output == whole.output


def test_a_long_prompt_read_in_parts_is_that_of_a_full_forward() -> None:
    ids = torch.arange(60) * 37 % 250
    cache = phi3().new_cache(len(ids))
    outputs = [phi3().prefill(part, cache, Needs(hidden=True)).hidden for part in ids.split(7)]
    with torch.inference_mode():
        expected = phi3().model.model(ids[None]).last_hidden_state[0]
    assert_close(torch.cat([part for part in outputs if part is not None]), expected)


@pytest.mark.parametrize("name", ["plain", "ngram", "draft-model"])
def test_a_cached_prefix_with_other_factors_is_not_reused(name: str) -> None:
    phi3().prefixes.clear()
    small().prefixes.clear()
    cached = []
    for tokens, expected in ((WITHIN, phi3()), (ACROSS, always_long()), (WITHIN, phi3())):
        for _ in range(2):
            text = answer(name, tokens, prefix_caching=True)
            assert text.output == plain_greedy(expected, PROMPT, tokens)
            cached.append(text.prefill.num_cached)
    assert cached[:4] == [0, len(PROMPT) - 1, 0, len(PROMPT) - 1]


def test_texts_in_a_batch_have_the_factors_of_the_longest_possible_one() -> None:
    prompts = [[*PROMPT, 3], PROMPT[:5]]
    for max_len, expected in ((ORIGINAL, phi3()), (ORIGINAL + 1, always_long())):
        batch = TextBatch(phi3(), 2, max_len)
        found = batch.advance([(row, 0, prompt) for row, prompt in enumerate(prompts)]).logits
        for row, prompt in enumerate(prompts):
            with torch.inference_mode():
                alone = expected.model(torch.tensor([prompt])).logits[0, -1]
            assert_close(found[row], alone)


def test_packed_texts_have_the_factors_of_the_longest() -> None:
    """Not those of their sum."""
    ids = torch.arange(40) * 37 % 250
    parts = ids.split(20)
    positions = torch.arange(20).repeat(2)
    segments = torch.arange(2).repeat_interleave(20)
    found = phi3().read_texts(ids, positions, segments, Needs(hidden=True)).hidden
    with torch.inference_mode():
        expected = [phi3().model.model(part[None]).last_hidden_state[0] for part in parts]
    assert found is not None
    assert_close(found, torch.cat(expected))


def test_the_audit_reads_a_text_with_the_factors_that_it_was_written_with() -> None:
    plain = answer("plain", ACROSS).output
    result = audit(phi3(), PROMPT, plain, [*plain[:3], 5], text_len=len(PROMPT) + ACROSS)
    assert result is not None
    ids = torch.tensor([[*PROMPT, *plain[:3]]])
    with torch.inference_mode():
        logits = always_long().model(ids).logits[0, -1]
    assert result.view.plain_logit == pytest.approx(float(logits.max()), abs=1e-3)


def test_graphs_replay_with_the_factors_of_the_text_at_hand() -> None:
    """They are captured during a short text, with the factors at a fixed address."""
    target = captured(model_of("phi3", eos_token_id=None, **longrope(SHORT, LONG)))
    for tokens, expected in ((WITHIN, phi3()), (ACROSS, always_long()), (WITHIN, phi3())):
        text = answer("recycling", tokens, target)
        assert text.output == plain_greedy(expected, PROMPT, tokens)
    assert runner_of(target).buckets
    assert target.environment()["cuda_graphs"] == "used"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("q8", marks=pytest.mark.slow)])
def test_a_folder_with_longrope_writes_with_the_factors_of_the_text(
    dtype: str, tmp_path: Path
) -> None:
    """Also where its matrices are quantized and multiplied by the compiled kernels."""
    folders = [tmp_path / name for name in ("switching", "short", "long")]
    factors = ((SHORT, LONG), (SHORT, SHORT), (LONG, LONG))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    for folder, (short, long) in zip(folders, factors, strict=True):
        save_tiny(folder, "phi3", eos_token_id=None, **sizes, **longrope(short, long))
    ours, short_only, long_only = (load_tiny(folder, dtype) for folder in folders)
    for tokens, theirs in ((WITHIN, short_only), (ACROSS, long_only)):
        expected = answer("plain", tokens, theirs).output
        assert answer("plain", tokens, ours).output == expected
        if ours.is_exact:
            assert answer("recycling", tokens, ours).output == expected


def test_each_layer_type_may_have_longrope() -> None:
    """Gemma 3's layer types have rotary positions of their own."""

    def gemma3(short: list[float]) -> Target:
        rotary = longrope(short, LONG)["rope_parameters"]
        types = {"full_attention": rotary, "sliding_attention": DEFAULT_ROTARY}
        return tiny_target("gemma3_text", eos_token_id=None, rope_parameters=types)

    target = gemma3(SHORT)
    text = answer("ngram", ACROSS, target)
    assert text.output == plain_greedy(gemma3(LONG), PROMPT, ACROSS)
    assert text.output != plain_greedy(target, PROMPT, ACROSS)
    assert answer("ngram", WITHIN, target).output == plain_greedy(target, PROMPT, WITHIN)


def test_scores_whose_scale_depends_on_the_length_are_refused() -> None:
    def phimoe(long_mscale: float) -> Target:
        rotary = {**longrope(SHORT, LONG)["rope_parameters"], "short_mscale": 1.25}
        rotary["long_mscale"] = long_mscale
        return tiny_target("phimoe", rope_parameters=rotary, num_local_experts=2)

    assert phimoe(1.25).long_rope.shortest_alike(ORIGINAL + 9) == ORIGINAL + 1
    with pytest.raises(TargetError, match="long_mscale must be its short_mscale, 1.25, got 1.5"):
        phimoe(1.5)


@pytest.mark.parametrize("name", ["ngram", "lookahead", "recycling", "draft-model"])
def test_dynamic_ntk_keeps_its_frequencies_up_to_the_end_of_the_context(name: str) -> None:
    """No row is beyond it, where transformers would change them."""
    rotary = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1000.0}
    settings: dict[str, Any] = {"max_position_embeddings": 40, "eos_token_id": None}
    target = tiny_target(rope_parameters=rotary, **settings)
    draft = alike.__wrapped__(rope_parameters=rotary, **settings)
    room = 40 - len(PROMPT)
    drafter = drafter_for(target, name, small=draft)
    for _ in range(2):
        text = write(target, drafter, PROMPT, tokens=room)
        assert text.output == plain_greedy(target, PROMPT, room)
