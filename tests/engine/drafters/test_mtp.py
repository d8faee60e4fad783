"""MTP drafts what transformers' MtpModel drafts over the whole text, at every step."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.accept import Lossless, Relaxed, ThinkingPhase, VerifiedTree
from engine.config import Sampling
from engine.drafters import parse_method
from engine.drafters.combined import CombinedConfig
from engine.drafters.heads.mtp import MTPConfig, load_layers
from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import DrafterError
from engine.model.forward import prepare_attention
from engine.model.target import Target
from engine.sampling import SeededDraws
from engine.tree import TreeShape
from tests.engine.drafters import judges
from tests.engine.drafters.judges import write
from tests.engine.drafters.tiny_mtp import (
    VOCAB,
    load_deepseek,
    per_expert,
    published,
    save_deepseek,
)
from tests.engine.tuning.controlled import AtRandom
from tests.models import build_context, lasting_folder, plain_greedy, tiny_model, tiny_target

PROMPTS = ([1, 2, 3, 1, 2, 3, 4], [5], [9, 8, 7, 6, 5])


@functools.cache
def saved(num_layers: int) -> Path:
    return save_deepseek(lasting_folder("deepseek"), num_mtp_layers=num_layers)


def built(num_layers: int, **settings: Any) -> tuple[Target, Any]:
    """A target with so many layers, and a drafter; by default it drafts one token per layer."""
    target = load_deepseek(saved(num_layers))
    config = MTPConfig(**{"max_draft_len": num_layers, **settings})
    return target, config.build(build_context(target))


@torch.inference_mode()
def whole_text_draft(target: Target, layers: Any, text: list[int]) -> list[int]:
    """What transformers drafts after `text`, computed from its beginning with an empty cache."""
    from transformers.cache_utils import MtpCache

    ids = torch.tensor([text])
    hidden = target.model.model(ids[:, :-1]).last_hidden_state
    drafted, _, _ = layers(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=torch.ones_like(ids[:, 1:]),
        position_ids=torch.arange(1, len(text))[None],
        mtp_cache=MtpCache(config=layers.config),
    )
    return [int(token) for token in drafted[0]]


@pytest.mark.parametrize("num_layers", [1, judges.slow(2), 3])
def test_every_draft_equals_transformers_on_the_whole_text(num_layers: int) -> None:
    from transformers.modeling_layers import MtpModel

    target, drafter = built(num_layers)
    file, loaded = load_file(saved(num_layers) / "model.safetensors"), published(drafter.layers)
    assert len(loaded) > 20 * num_layers
    assert [name for name, tensor in loaded.items() if not torch.equal(tensor, file[name])] == []
    reference = load_deepseek(saved(num_layers), attention="eager")
    layers = MtpModel(reference.model, num_layers)
    layers.load_state_dict(drafter.layers.state_dict())
    drafts = functools.partial(whole_text_draft, reference, layers.eval())
    assert judges.assert_drafts_equal(drafts, target, drafter, prompts=PROMPTS) > 0


def test_one_layer_feeds_itself_to_draft_further() -> None:
    firsts = []
    for length in (1, 4):
        target, drafter = built(1, max_draft_len=length)
        text = write(target, drafter, PROMPTS[0], tokens=30)
        assert text.output == plain_greedy(target, PROMPTS[0], 30)
        assert {step.num_drafted for step in text.steps} == {length}
        firsts.append({step.context_len: step.tokens[1] for step in text.steps})
    both = firsts[0].keys() & firsts[1].keys()
    assert both and all(firsts[0][at] == firsts[1][at] for at in both)


def test_context_end_is_reached_exactly() -> None:
    target, drafter = built(3)
    prompt = ([1, 2, 3, 4, 5] * 80)[: target.context_len - 7]
    text = write(target, drafter, prompt, tokens=50)
    assert text.end.finish_reason == "context"
    assert text.output == plain_greedy(target, prompt, 7)


@pytest.mark.parametrize(("num_layers", "length"), [(1, 3), (2, 2)])
@pytest.mark.slow
def test_sampled_output_follows_the_target(num_layers: int, length: int) -> None:
    target, drafter = built(num_layers, max_draft_len=length)
    with torch.no_grad():
        target.lm_head.get_parameter("weight").mul_(0.35)
    assert judges.p_value(target, drafter, tokens=200) > 1e-3


# ---- what cannot be


def test_a_target_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="max_draft_len is 3, but tiny-deepseek has 2 MTP"):
        built(2, max_draft_len=3)
    for family, words in (
        ("llama", "tiny-llama has no MTP layers"),
        ("bailing_hybrid", "tiny-bailing_hybrid's MTP layers cannot be used: transf"),
        ("nemotron_h", "tiny-nemotron_h's MTP layers cannot be used: transf"),
    ):
        with pytest.raises(DrafterError, match=words):
            MTPConfig().build(build_context(tiny_target(family)))
    target = load_deepseek(save_deepseek(tmp_path / "bare", num_mtp_layers=1, with_mtp=False))
    with pytest.raises(DrafterError, match="has no MTP weights"):
        MTPConfig().build(build_context(target))
    assert "_keys_to_ignore_on_load_unexpected" not in vars(target.model)


# ---- relaxed acceptance

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]).log()


def relaxed_path(
    tokens: list[int], topk: int, delta: float, *, thinking: bool = True, logs: bool = False
) -> Any:
    rule = Relaxed(Lossless(Sampling()), topk, delta, ThinkingPhase(begin=7, end=8), logs)
    rule.read([7] if thinking else [7, 8])
    chain = VerifiedTree(tokens, TreeShape.chain(2), LOGITS)
    return rule(chain, SeededDraws(0))


@pytest.mark.parametrize(
    ("tokens", "topk", "delta", "settings", "path", "following"),
    [
        ([9, 1, 8], 4, 0.19, {}, (), 0),
        ([9, 1, 8], 4, 0.21, {}, (1,), 3),
        ([9, 2, 8], 2, 0.9, {}, (), 0),
        ([9, 2, 8], 3, 0.36, {}, (1,), 3),
        ([9, 1, 8], 4, 0.50, {"logs": True}, (), 0),  # log(0.5 / 0.3) = 0.511
        ([9, 1, 8], 4, 0.52, {"logs": True}, (1,), 3),
        ([9, 1, 2], 4, 0.21, {}, (1, 2), 0),
        ([9, 1, 0], 4, 0.21, {}, (1,), 3),
        ([9, 1, 2], 4, 0.9, {"thinking": False}, (), 0),
    ],
)
def test_tokens_pass_within_topk_and_delta_while_thinking(
    tokens: list[int], topk: int, delta: float, settings: Any, path: Any, following: int
):
    """The path ends with the target's own token."""
    accepted = relaxed_path(tokens, topk, delta, **settings)
    assert (accepted.path, accepted.next_token) == (path, following)


def test_of_several_children_the_likeliest_is_followed():
    rule = Relaxed(Lossless(Sampling()), 3, 0.9, ThinkingPhase(begin=7, end=8))
    rule.read([7])
    tree = VerifiedTree([9, 2, 1], TreeShape([-1, 0, 0]), LOGITS)
    assert rule(tree, SeededDraws(0)).path == (2,)


def test_thinking_lasts_from_its_first_token_to_its_last():
    phase = ThinkingPhase(begin=7, end=8)
    states = []
    for token in [1, 7, 2, 8, 3, 8, 7, 7]:
        phase.read([token])
        states.append(phase.active)
    assert states == [False, True, True, False, False, False, True, True]


def test_relaxed_acceptance_accepts_more_only_while_thinking() -> None:
    begin = PROMPTS[0][0]
    relaxed: dict[str, Any] = {
        "max_draft_len": 3,
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": VOCAB,
        "relaxed_delta": 1.0,
        "end_thinking_phase_token": begin,  # thinking does not end
    }
    assert MTPConfig().lossless and not MTPConfig(**relaxed).lossless
    with pytest.raises(DrafterError, match=r"begin_thinking_phase_token must be below 12, the"):
        built(1, **relaxed)
    target, thinking = built(1, **relaxed, begin_thinking_phase_token=begin)
    text = write(target, thinking, PROMPTS[0], tokens=30)
    assert all(step.num_accepted == step.num_drafted for step in text.steps)
    plain = plain_greedy(target, PROMPTS[0], 30)
    absent = next(token for token in range(VOCAB) if token not in (*PROMPTS[0], *plain))
    other, never = built(1, **relaxed, begin_thinking_phase_token=absent)
    assert write(other, never, PROMPTS[0], tokens=30).output == plain
    # A text that does not think is strict, also after one that did.
    plain = plain_greedy(target, [5, 6], 10)
    assert begin not in plain
    assert write(target, thinking, [5, 6], tokens=10).output == plain


def test_in_a_combination_drafts_are_relaxed_exactly_while_the_text_thinks() -> None:
    """Whichever part drafts, and whether or not the text before was thinking at its end."""
    begin, end = 1, 2
    target = load_deepseek(saved(1))
    config = CombinedConfig(
        retrieval=NGramConfig(max_draft_len=3),
        model=MTPConfig(
            max_draft_len=3,
            use_relaxed_acceptance_for_thinking=True,
            relaxed_topk=VOCAB,
            relaxed_delta=1.0,
            begin_thinking_phase_token=begin,
            end_thinking_phase_token=end,
        ),
        min_match_len=1,
    )
    drafter = AtRandom.around(config.build(build_context(target)), target)
    seen = Counter[tuple[bool, bool]]()
    for prompt in ([begin, 3, 4, 5], [5, 6, 7, 5, 6], [5, begin, 6, 5], [begin, 5, end, 6, 5], [4]):
        text = write(target, drafter, prompt, tokens=40)
        assert text.prefill.token_id == plain_greedy(target, prompt, 1)[0]
        before = [*prompt, text.prefill.token_id]
        for step in text.steps:
            thinks = next((t == begin for t in reversed(before) if t in (begin, end)), False)
            expected = plain_greedy(target, before, len(step.committed))
            if thinks:
                assert step.num_accepted == step.num_drafted
            else:
                assert list(step.committed) == expected
            seen[thinks, list(step.committed) == expected] += 1
            before += step.committed
    assert seen[True, False] > 3 and seen[False, True] > 3


# ---- Qwen's layer, which transformers has no place for


def save_qwen(folder: Path, family: str) -> Path:
    """A tiny model with a next-token layer under the names of Qwen's checkpoints."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    model = tiny_model(family, eos_token_id=None, layer_types=kinds)
    model.save_pretrained(folder)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(4)
    block = type(model.model.layers[2])(model.config, 2)
    tensors = per_expert({f"mtp.layers.0.{name}": t for name, t in block.state_dict().items()})
    tensors["mtp.fc.weight"] = torch.empty(size, 2 * size)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.empty(size)
    random = {
        name: torch.randn(tensor.shape, generator=generator) * 0.3
        for name, tensor in tensors.items()
    }
    file = folder / "model.safetensors"
    save_file({**load_file(file), **random}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["qwen3_5_text", judges.slow("qwen3_next")])
def test_qwens_layer_drafts_what_it_says_and_the_text_is_plain_decodings(
    tmp_path: Path, family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_qwen(tmp_path, family))
    prepare_attention(model)
    target = Target(model, None, name=family)
    context, prompt = build_context(target), [7, 8, 9, 10] * 5
    layers = load_layers(target, 1)
    assert len(layers.layers) == 1
    published = load_file(tmp_path / "model.safetensors")
    for name, theirs in (("eh_proj", "fc"), ("enorm", "pre_fc_norm_embedding")):
        ours = layers.layers[0].get_submodule(name).weight
        assert torch.equal(ours, published[f"mtp.{theirs}.weight"])
    key = layers.layers[0].mtp_block.self_attn.k_proj.weight
    assert torch.equal(key, published["mtp.layers.0.self_attn.k_proj.weight"])
    plain = plain_greedy(target, prompt, 12)
    for length in (1, 3):
        drafter = parse_method({"decoding_type": "MTP", "max_draft_len": length}).build(context)
        text = write(target, drafter, prompt, tokens=12)
        assert text.output == plain
        ids = [*prompt, plain[0]]
        with torch.inference_mode():
            hidden = target.model.model(torch.tensor([ids])).last_hidden_state[:, :-1]
            rows = torch.arange(len(ids) - 1)[None] + 1
            out = layers.layers[0](
                target.embedding(torch.tensor([ids[1:]])),
                hidden,
                position_embeddings=layers.rotary_emb(hidden, position_ids=rows),
                attention_mask=None,
                position_ids=rows,
                cache=None,
            )
            first = int(target.output(out[0, -1]).argmax())
        assert text.steps[0].tokens[1] == first
