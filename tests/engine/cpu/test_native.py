"""The compiled kernels: as exact as bfloat16 allows, and a row's result is always the same."""

from __future__ import annotations

import copy
import ctypes
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import DataObject, data, floats, integers, lists, sampled_from
from torch import nn

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import TargetError
from engine.kernels.cpu import decoder as decoder_module
from engine.kernels.cpu.native import unsupported_reason
from engine.kernels.cpu.operators import BLOCK, MAX_K, Matrix, NativeLinear, pack_linears, topk
from engine.model.audit import forward_mismatch, reference_logits
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape
from tests.engine.cpu.targets import (
    SIZES,
    WIDE,
    deviation,
    in_8_bits,
    native,
    plain,
    variant_model,
    wide_model,
)
from tests.engine.scripted import ALL, random_parents, tokens_of, walk
from tests.engine.test_verify_tree import check_batch
from tests.engine.training.conftest import check_writes_as_alone
from tests.models import VOCAB, build_context, tiny_model


@pytest.mark.parametrize("name", WIDE)
def test_prompts_and_trees_are_nearer_to_the_exact_result_than_modules_are(
    name: str, kernels: ctypes.CDLL
) -> None:
    model = wide_model(name)
    exact, modules = plain(copy.deepcopy(model).float()), plain(copy.deepcopy(model))
    targets = {"exact": exact, "modules": modules, "native": native(model, kernels)}
    squares: dict[str, list[float]] = {"modules": [], "native": []}
    walks = [
        walk(target, target.new_cache(4), (1, 40, 7, 22, 13, 31), prompts=(17, 1, 53))
        for target in targets.values()
    ]
    for outputs in zip(*walks, strict=True):
        shown = dict(zip(targets, outputs, strict=True))
        for part in ("logits", "hidden", "layers"):
            truth = getattr(shown["exact"], part).double()
            for other, errors in squares.items():
                found = getattr(shown[other], part)
                assert found.shape == truth.shape
                errors.append(float((found.double() - truth).pow(2).mean()))
                assert errors[-1] < 0.03 * float(truth.pow(2).mean())
    assert sum(squares["native"]) < sum(squares["modules"]), squares


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", WIDE)
def test_a_row_has_the_same_bits_alone_in_a_tree_and_in_a_prompt(
    name: str, bits: int, kernels: ctypes.CDLL
) -> None:
    target = native(wide_model(name), kernels, bits)
    rng = random.Random(8)
    prompt = tokens_of(rng, 19)
    shape = TreeShape(random_parents(rng, 41))
    tokens = tokens_of(rng, len(shape))
    cache = target.new_cache(4)
    target.prefill(prompt, cache, ALL)
    together = target.verify(Proposal(torch.tensor(tokens), shape), cache, ALL)
    for node in range(0, len(shape), 5):
        path = (0, *shape.path_to(node))
        text = [tokens[i] for i in path]
        step_by_step = target.new_cache(4)
        target.prefill(prompt, step_by_step, ALL)
        for token in text:
            alone = target.prefill([token], step_by_step, ALL)
        at_once = target.prefill([*prompt, *text], target.new_cache(4), ALL)
        for shown in (alone, at_once):
            for part in ("logits", "hidden", "layers"):
                assert torch.equal(getattr(shown, part)[-1], getattr(together, part)[node])


@pytest.mark.parametrize("vocab", [288, 301])
def test_totals_and_best_are_logsumexp_and_argmax_of_the_logits(
    kernels: ctypes.CDLL, vocab: int
) -> None:
    """Also where the vocabulary does not fill the last block of columns."""
    model = variant_model("llama", vocab_size=vocab, **SIZES, **WIDE["llama"]).to(torch.bfloat16)
    target = native(model, kernels)
    cache = target.new_cache(4)
    last = target.prefill([5, 6, 7], cache, Needs())
    assert last.best is not None and last.best.tolist() == [int(last.logits[0].argmax())]
    shape = TreeShape(random_parents(random.Random(3), 13))
    tokens = torch.tensor(tokens_of(random.Random(3), 13))
    shown = target.verify(Proposal(tokens, shape), cache, Needs())
    assert shown.logits.shape == (13, vocab) and shown.logsumexp is not None
    expected = shown.logits.double().logsumexp(dim=-1)
    torch.testing.assert_close(shown.logsumexp.double(), expected, rtol=1e-5, atol=1e-5)
    assert shown.best is not None
    assert shown.best.tolist() == shown.logits.argmax(dim=-1).tolist()


def test_a_text_does_not_depend_on_how_many_threads_there_are(kernels: ctypes.CDLL) -> None:
    target = native(wide_model("qwen2"), kernels)
    prompt = tokens_of(random.Random(1), 30)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(target.prefill(prompt, target.new_cache(4), ALL).logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def linear_of(matrix: Matrix, weight: torch.Tensor, bias: Any) -> NativeLinear:
    plain = nn.Linear(weight.shape[1], len(weight), device="meta")
    plain.weight, plain.bias = (nn.Parameter(x, requires_grad=False) for x in (weight, bias))
    return NativeLinear(plain, matrix)


def in_bits(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Weights as the kernels round them: a scale and a minimum in float16 per 32 columns."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
    codes = ((blocks - low) / scale).round().clamp(0, 2**bits - 1)
    return (codes * scale + low).flatten(1)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (50, 96), (5, 64), (576, 1536)])
@pytest.mark.parametrize("n", [1, 3, 7, 130])
def test_a_product_equals_that_of_the_rounded_weights(
    any_kernels: ctypes.CDLL, rows: int, columns: int, n: int, bits: int
) -> None:
    generator = torch.Generator().manual_seed(rows + n)
    weight = 0.05 * torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator)
    x = torch.randn(n, columns, generator=generator).bfloat16()
    x[0, :64] = torch.where(torch.arange(64) % 2 == 0, 3.0, -3.0)
    matrix = Matrix.of(any_kernels, weight, bias, bits=bits)
    packed = linear_of(matrix, weight, bias)
    rounded = weight.bfloat16() if bits == 16 else in_bits(weight, bits)
    seen = x if bits == 16 else in_8_bits(x)
    expected = seen.double() @ rounded.double().t() + bias.double()
    found = matrix.product(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed.weight, rounded.bfloat16()) and packed(x).dtype == torch.bfloat16
    alone = torch.cat([matrix.product(row[None]) for row in x])
    assert torch.equal(alone, found)


@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_any_dtype_are_multiplied_as_their_bfloat16(
    dtype: torch.dtype, columns: int, kernels: ctypes.CDLL
) -> None:
    torch.manual_seed(0)
    matrix, x = Matrix.of(kernels, torch.randn(16, columns)), torch.randn(3, columns).to(dtype)
    assert torch.equal(matrix.product(x), matrix.product(x.bfloat16()))


def test_nan_and_infinity_survive_quantized_activations(any_kernels: ctypes.CDLL) -> None:
    matrix = Matrix.of(any_kernels, torch.randn(16, 64), bits=8)
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(2, 64).bfloat16()
        x[0, 5] = bad
        found = matrix.product(x)
        assert not found[0].isfinite().any() and found[1].isfinite().all()


def test_tiny_activations_are_quantized_to_zero(any_kernels: ctypes.CDLL) -> None:
    matrix = Matrix.of(any_kernels, torch.randn(16, 64), bits=8)
    x = torch.cat([torch.full((1, 32), 1e-37), torch.ones(1, 32)], dim=1).bfloat16()
    zeros = torch.where(x < 1, 0, x)
    assert torch.equal(matrix.product(x), matrix.product(zeros))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_forward_on_each_kind_of_processor(any_kernels: ctypes.CDLL, bits: int) -> None:
    exact = wide_model("qwen3-wide-heads")
    ours = native(copy.deepcopy(exact), any_kernels, bits)
    exact = copy.deepcopy(ours.model).float()
    rng = random.Random(5)
    prompt = tokens_of(rng, 37)
    shape = TreeShape(random_parents(rng, 9))
    tree = Proposal(torch.tensor(tokens_of(rng, 9)), shape)
    found, caches = [], [target.new_cache(4) for target in (plain(exact), ours)]
    for target, cache in zip((plain(exact), ours), caches, strict=True):
        target.prefill(prompt, cache, ALL)
        found.append(target.verify(tree, cache, ALL).logits.double())
    assert deviation(found[1], found[0]) < 0.05


def test_a_drafters_linear_modules_are_multiplied_by_the_kernels(kernels: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(64, 50), nn.SiLU(), nn.Linear(50, 8)).bfloat16()
    x = torch.randn(2, 3, 64).bfloat16()
    with torch.inference_mode():
        before = head(x)
        pack_linears(head, None)
        assert type(head[0]) is nn.Linear
        pack_linears(head, kernels)
        assert isinstance(head[0], NativeLinear)
        assert isinstance(head[2], NativeLinear), "50 columns are filled up to whole blocks"
        assert head[2].weight.shape == (8, 50)
        torch.testing.assert_close(head(x), before, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {}, "must be multiples of 32 wide"),
        ("cohere", {}, "CohereForCausalLM is computed by transformers' modules"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu, not silu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depend on the length",
        ),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    model = tiny_model(family, **overrides).to(torch.bfloat16)
    assert reason in str(unsupported_reason(model))
    assert "not float32" in str(unsupported_reason(wide_model("llama").float()))


def test_positions_beyond_the_rotary_table_extend_it(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide_model("llama")
    theirs = native(copy.deepcopy(model), kernels)
    prompt, needs = tokens_of(random.Random(1), 21), ALL
    whole = theirs.prefill(prompt, theirs.new_cache(4), needs)
    monkeypatch.setattr(decoder_module, "ROTARY_BLOCK", 8)
    ours = native(model, kernels)
    cache = ours.new_cache(4)
    pieces = [ours.prefill(prompt[at : at + 3], cache, needs) for at in range(0, 21, 3)]
    assert torch.equal(pieces[-1].logits, whole.logits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_greedy_decoding_ends_where_logits_are_not_finite(
    bits: int, value: float, kernels: ctypes.CDLL
) -> None:
    target = native(wide_model("llama"), kernels, bits)
    drafter = AutoregressiveConfig().build(build_context(target))
    records = decode(target, drafter, [1, 2, 3], limits=Limits(max_new_tokens=8, ignore_eos=True))
    next(records), next(records)
    with torch.inference_mode():
        norm = target._forward.decoder.weights.norm  # type: ignore[attr-defined]
        norm[5] = value
    with pytest.raises(TargetError, match="not finite"):
        list(records)


def test_texts_that_are_written_together_are_those_that_the_target_writes_alone(
    kernels: ctypes.CDLL,
) -> None:
    check_writes_as_alone(native(wide_model("llama"), kernels))


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama3-rotary"])
def test_texts_that_are_read_together_show_what_each_shows_alone(
    name: str, kernels: ctypes.CDLL
) -> None:
    target = native(wide_model(name), kernels)
    check_batch(target, atol=0.0, rtol=0.0)
    texts = [tokens_of(random.Random(7), count) for count in (9, 1, 30, 17)]
    alone = [target.prefill(text, target.new_cache(40), ALL) for text in texts]
    rows = [(token, i, 40 * n) for n, text in enumerate(texts) for i, token in enumerate(text)]
    room = target.ragged_batch(4 * 40)
    assert room is not None
    columns = map(torch.tensor, zip(*rows, strict=True))
    together = room.read(*columns, needs=ALL, num_logits=len(rows))
    for part in ("hidden", "layers"):
        expected = torch.cat([getattr(output, part) for output in alone])
        assert torch.equal(getattr(together, part), expected)
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    assert torch.equal(together.logits[ends], torch.cat([output.logits for output in alone]))


@pytest.mark.parametrize("bits", [16, 8])
def test_the_output_matrix_gives_hidden_states_the_logits_of_the_forward(
    kernels: ctypes.CDLL, bits: int
) -> None:
    target = native(wide_model("llama-tied"), kernels, bits)
    shown = target.prefill(tokens_of(random.Random(3), 9), target.new_cache(9), Needs(hidden=True))
    assert shown.hidden is not None
    logits = target.output(shown.hidden.view(3, 3, -1))
    assert logits.shape == (3, 3, target.vocab_size)
    assert torch.equal(logits[-1, -1], shown.logits[-1])


@given(data())
def test_topk_equals_torchs(kernels: ctypes.CDLL, drawn: DataObject) -> None:
    rows, vocab = drawn.draw(integers(1, 5)), drawn.draw(integers(1, 70))
    k = drawn.draw(integers(1, min(vocab, MAX_K)))
    number = sampled_from([-math.inf, -3.5, 0.0, 0.25, 7.0, 7.5]) | floats(-50, 50, width=32)
    values = drawn.draw(lists(number, min_size=rows * vocab, max_size=rows * vocab))
    logits = torch.tensor(values).view(rows, vocab)
    found = topk(logits, k)
    assert torch.equal(found.logits, logits.topk(k).values)
    assert torch.equal(logits.gather(1, found.ids), found.logits)
    assert all(len(set(row)) == k for row in found.ids.tolist())
    expected = logits.logsumexp(dim=-1, keepdim=True)
    assert found.logsumexp is not None
    torch.testing.assert_close(found.logsumexp, expected, atol=1e-4, rtol=1e-5)
    # Of equal logits the first is the first.
    for row, ids in zip(logits.tolist(), found.ids.tolist(), strict=True):
        order = sorted(range(vocab), key=lambda i: (-row[i], i))
        assert ids == order[:k]


@pytest.mark.parametrize("bits", [16, 8])
def test_attention_scores_that_are_no_numbers_give_no_weights(
    bits: int, kernels: ctypes.CDLL
) -> None:
    """As in transformers' modules, NaN goes on to the logits, where the self-check sees it."""
    model = wide_model("llama")
    expected = reference_logits(plain(copy.deepcopy(model)))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = torch.nan
    broken = native(model, kernels, bits)
    output = broken.prefill(tokens_of(random.Random(1), 9), broken.new_cache(9), Needs())
    assert output.logits.isnan().all()
    assert all(0 <= token < VOCAB for token in output.argmax())
    assert forward_mismatch(broken, expected) == "its logits are not numbers"
