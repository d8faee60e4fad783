"""Products in 4 bits are those of the GGUF's matrix, and `q4` is a dtype like the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError, TargetError
from engine.kernels.cpu.four_bit import CANDIDATES, EVERY, FourBitProjection, crossover
from engine.kernels.cpu.gguf_matrices import GGUFMatrices, rotary_order
from engine.kernels.cpu.projections import PlainProjection
from engine.model.gguf import BLOCK, Blocks, GGUFFile
from engine.model.loading import load_target, pick_dtype
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs
from engine.steps import End
from tests.engine.cpu.tiny_gguf import HEAD_DIM, write_gguf
from tests.models import save_tiny, tiny_model, workbench


def random_blocks(rows: int, columns: int) -> Blocks:
    generator = torch.Generator().manual_seed(rows)
    size = (rows, columns // BLOCK)
    return Blocks(
        torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8),
        torch.rand(size, generator=generator) * 0.1,
        torch.randn(size, generator=generator) * 0.4,
    )


def rounded(blocks: Blocks) -> Tensor:
    """The matrix with scale and middle value in bfloat16, exactly."""
    middle = (blocks.minimum + 8 * blocks.scale).bfloat16().double()
    scale = blocks.scale.bfloat16().double()
    codes = blocks.codes.double().unflatten(1, (-1, BLOCK)) - 8
    return (codes * scale[..., None] + middle[..., None]).flatten(1)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (192, 576)])
def test_products_are_those_of_the_matrix_with_rounded_scales(
    shape: tuple[int, int], rows: int
) -> None:
    torch.manual_seed(rows)
    blocks, bias = random_blocks(*shape), torch.randn(shape[0]).bfloat16()
    x = torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    with torch.inference_mode():
        projection = FourBitProjection(blocks, None, None)
        biased = FourBitProjection(blocks, bias, None)
        exact = x.double() @ rounded(blocks).t()
        near = {"rtol": 2**-7, "atol": 2e-3}
        torch.testing.assert_close(projection(x).double(), exact, **near)
        near["atol"] = 0.05  # sums of several terms, each rounded
        torch.testing.assert_close(biased(x).double(), exact + bias.double(), **near)
        both = exact + bias.double() + residual.double()
        torch.testing.assert_close(biased.plus(x, residual).double(), both, **near)


def test_a_value_moves_by_no_more_than_is_said() -> None:
    blocks = random_blocks(192, 576)
    moved = (rounded(blocks) - blocks.dequantised().double()).abs().unflatten(1, (-1, BLOCK))
    middle = blocks.minimum + 8 * blocks.scale
    assert (moved <= (blocks.scale / 32 + middle.abs() / 256)[..., None] * 1.001).all()


def test_the_plain_matrix_comes_back() -> None:
    blocks = random_blocks(48, 96)
    with torch.inference_mode():
        found = FourBitProjection(blocks, None, None).weight()
    torch.testing.assert_close(found.double(), rounded(blocks), rtol=2**-7, atol=1e-4)
    other = torch.randn(48, 96)
    both = FourBitProjection(blocks, None, PlainProjection(other, None))
    assert both.weight() is other


def test_many_rows_take_the_other_product() -> None:
    blocks = random_blocks(16, 32)
    zero = PlainProjection(torch.zeros(16, 32).bfloat16(), None)
    projection = FourBitProjection(blocks, None, zero)
    projection.few = 4
    x = torch.ones(5, 32).bfloat16()
    with torch.inference_mode():
        assert projection(x[:4]).any() and not projection(x).any()
        residual = torch.ones(5, 16).bfloat16()
        assert torch.equal(projection.plus(x, residual), residual)
        assert not torch.equal(projection.plus(x[:4], residual[:4]), residual[:4])


class Slow(PlainProjection):
    def __call__(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return super().__call__(x)


def test_the_faster_kernel_is_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(16, 32).bfloat16()
    blocks = random_blocks(16, 32)
    assert crossover([FourBitProjection(blocks, None, None)]) == EVERY
    fast = FourBitProjection(blocks, None, Slow(weight, None))
    assert crossover([fast]) == CANDIDATES[-1]
    slow = FourBitProjection(blocks, None, PlainProjection(weight, None))
    product = FourBitProjection._product

    def slowly(self: FourBitProjection, x: Tensor) -> Tensor:
        time.sleep(0.003 * (len(x) > 2))
        return product(self, x)

    monkeypatch.setattr(FourBitProjection, "_product", slowly)
    slower_beyond_two = FourBitProjection(blocks, None, Slow(weight, None))
    monkeypatch.setattr(Slow, "__call__", lambda self, x: time.sleep(0.0015))
    assert crossover([slower_beyond_two]) == 2
    monkeypatch.setattr(FourBitProjection, "_product", lambda self, x: time.sleep(0.003))
    assert crossover([slow]) == 0


def test_query_rows_are_put_in_transformers_order() -> None:
    assert rotary_order(8, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_loaded_model_finds_its_matrices_in_the_file(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    target = load(path, "bfloat16", tmp_path)
    matrices = GGUFMatrices(GGUFFile(path), HEAD_DIM)
    layer = target.model.model.layers[1]
    for owner, names in (
        (layer.self_attn, ["q_proj", "k_proj", "v_proj"]),
        (layer.mlp, ["gate_proj", "up_proj"]),
        (layer.mlp, ["down_proj"]),
    ):
        blocks = matrices.find(owner, 1, names)
        assert blocks is not None
        weight = torch.cat([getattr(owner, name).weight for name in names])
        assert torch.equal(blocks.dequantised().bfloat16(), weight)
        assert matrices.find(owner, 0, names) is None, "another layer's values are not taken"


def load(path: Path, dtype: str, cache_dir: Path) -> Target:
    spec = TargetSpec(name="tiny", path=str(path))
    return load_target(spec, dtype=dtype, device="cpu", cache_dir=cache_dir / "cache")


def test_q4_is_a_dtype_with_texts_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which kernel is the faster one for matrices this small is the machine's mood.
    monkeypatch.setattr("engine.kernels.cpu.packing.crossover", lambda matrices: 32)
    path = write_gguf(tmp_path / "tiny.gguf")
    exact, ours = load(path, "float32", tmp_path), load(path, "q4", tmp_path)
    assert ours.dtype_name == ours.environment()["dtype"] == "q4"
    assert (ours.dtype, ours.companion_dtype) == (torch.bfloat16, "bfloat16")
    assert ours.environment()["forward"] == "fused, q4 up to 32 rows"
    prompt = list(range(40, 60))
    logits = {}
    for target in (exact, ours):
        cache = target.new_cache(32)
        target.prefill(prompt[:-1], cache, Needs())
        logits[target] = target.prefill(prompt[-1:], cache, Needs()).logits.float()
    spread = logits[exact].std()
    # In bfloat16 alone it is 0.2: sums of a model this small are rounded like anything else.
    assert 0 < (logits[ours] - logits[exact]).abs().max() < 0.4 * spread
    drafter = AutoregressiveConfig().build(workbench(ours))
    *_, end = decode(ours, drafter, prompt, limits=Limits(max_new_tokens=8, ignore_eos=True))
    assert isinstance(end, End) and len(end.output_ids) == 8


def test_q4_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny comes without one. Choose bfloat16"):
        load(save_tiny(tmp_path / "plain"), "q4", tmp_path)


def test_q4_needs_matrices_in_4_bits(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "eight.gguf", "Q8_0")
    with pytest.raises(TargetError, match="this one has none that fit"):
        load(path, "q4", tmp_path)


def test_q4_runs_on_the_processor_only() -> None:
    with pytest.raises(ConfigError, match="on the processor only"):
        pick_dtype("q4", torch.device("cuda"))


def test_q4_refuses_models_that_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("engine.kernels.cpu.architecture.KNOWN", ())
    with pytest.raises(ConfigError, match="q4 cannot run tiny: LlamaForCausalLM is computed by"):
        load(path, "q4", tmp_path)


def test_matrices_of_another_model_are_left_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    stranger = tiny_model("llama", seed=9, hidden_size=64, intermediate_size=96).bfloat16()
    matrices = GGUFMatrices(GGUFFile(path), HEAD_DIM)
    assert matrices.find(stranger.model.layers[0].mlp, 0, ["down_proj"]) is None
