"""Quantisation methods on inputs with correlated features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tools.quantize.conftest import CONFIG, tiny_tensors
from windlass.models.checkpoint import StoredTensor
from windlass.models.families.registry import read_hparams
from windlass.tools.quantize.gptq import ActOrder, gptq
from windlass.tools.quantize.layer import Hidden, InputCollector, InputStats, Layer
from windlass.tools.quantize.scaling import folds_of, search_clip, search_scale, smoothing_scale
from windlass.tools.quantize.weights import (
    Grid,
    nf4_table,
    quantise_activations_float8,
    quantise_activations_int8,
    round_to_nearest,
    to_float8,
    to_nf4,
)

CPU = torch.device("cpu")


def inputs(num_in: int, outliers: bool = False) -> tuple[Tensor, InputStats]:
    """Inputs of low rank, so that one column can compensate for another."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(512, num_in // 4, generator=generator)
    x = factors @ torch.randn(num_in // 4, num_in, generator=generator)
    x += 0.1 * torch.randn(512, num_in, generator=generator)
    if outliers:
        x[:, ::16] *= 30
    collector = InputCollector(num_in, CPU)
    collector.add(x[:200])
    collector.add(x[200:])
    return x, collector.result()


def weights(num_out: int, num_in: int) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(2))


def error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float((x @ (weight - rounded).T).square().mean())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_error_is_at_most_half_a_step(bits: int, symmetric: bool) -> None:
    weight = weights(16, 64)
    weight[3, :32] = weight[3, :32].abs()
    weight[4] = 0
    grid = Grid(bits, 32, symmetric, torch.float16)
    made = round_to_nearest(weight, grid)
    step = made.scales.repeat_interleave(32, 1)
    off = (made.dequantise() - weight).abs()
    # Symmetric grids have one value less above zero: the largest weight may be clipped by a step.
    assert bool((off <= step * (1.01 if symmetric else 0.52)).all())
    assert torch.equal(made.scales, made.scales.half().float())
    assert int(made.codes.max()) < 1 << bits
    assert bool((made.zeros >= 1).all())
    assert torch.equal(made.dequantise()[4], torch.zeros(64))


def test_statistics_give_the_exact_output_error() -> None:
    x, seen = inputs(64)
    weight = weights(16, 64)
    rounded = round_to_nearest(weight, Grid(4, 32, True)).dequantise()
    expected = error(weight, rounded, x) / float((x @ weight.T).square().mean())
    assert seen.output_error(weight, rounded) == pytest.approx(expected, rel=1e-3)
    assert torch.allclose(seen.mean_abs, x.abs().mean(0), rtol=1e-4)
    assert torch.equal(seen.max_abs, x.abs().amax(0))
    scale = torch.rand(64) + 0.5
    other = InputCollector(64, CPU)
    other.add(x / scale)
    assert torch.allclose(seen.divided(scale).gram, other.result().gram, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rounding_on_correlated_inputs(
    bits: int, act_order: ActOrder, symmetric: bool
) -> None:
    x, seen = inputs(256, outliers=True)
    weight = weights(48, 256)
    grid = Grid(bits, 64, symmetric)
    plain = error(weight, round_to_nearest(weight, grid).dequantise(), x)
    made = gptq(weight, seen.gram, grid, act_order)
    assert error(weight, made.dequantise(), x) < 0.5 * plain
    neighbours = torch.equal(made.groups, torch.arange(256, dtype=torch.int32) // 64)
    assert neighbours == (act_order != "group")
    assert made.groups.bincount().tolist() == [64] * 4


def test_gptq_rounds_where_inputs_are_independent() -> None:
    weight = weights(8, 64)
    grid = Grid(4, 32, True)
    made = gptq(weight, torch.eye(64), grid, "static")
    assert torch.equal(made.codes, round_to_nearest(weight, grid).codes)


def test_gptq_handles_unused_features() -> None:
    x, _ = inputs(64)
    x[:, 5] = 0
    collector = InputCollector(64, CPU)
    collector.add(x)
    made = gptq(weights(8, 64), collector.result().gram, Grid(4, 32, True))
    assert bool(torch.isfinite(made.dequantise()).all())
    assert (made.dequantise() - weights(8, 64))[:, 5].abs().max() < 0.5


def test_awq_scales_outlier_features() -> None:
    x, seen = inputs(128, outliers=True)
    weight = weights(32, 128)
    grid = Grid(3, 64, False)
    scale, strength = search_scale(weight, seen, grid, torch.arange(128))
    assert strength > 0
    scaled = round_to_nearest(weight * scale, grid).dequantise() / scale
    plain = round_to_nearest(weight, grid).dequantise()
    assert error(weight, scaled, x) < 0.7 * error(weight, plain, x)
    # Two inputs from one producer row share a scale.
    tied, _ = search_scale(weight, seen, grid, torch.arange(128) % 64)
    assert tied.shape == (64,)


def test_clipping_never_increases_the_error() -> None:
    x, seen = inputs(128)
    weight = weights(32, 128)
    grid = Grid(3, 128, True)
    clipped = round_to_nearest(weight, grid, search_clip(weight, seen, grid)).dequantise()
    assert error(weight, clipped, x) < error(weight, round_to_nearest(weight, grid).dequantise(), x)


class _Memory:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(tuple(self.tensors[name].shape), "bf16", self.tensors[name].nbytes)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert tuple(self.tensors[name].shape) == shape
        return self.tensors[name]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_folded_scales_preserve_the_layer_function(kv_heads: int, bias: bool) -> None:
    config = CONFIG | {
        "num_key_value_heads": kv_heads,
        "attention_bias": bias,
        "mlp_bias": bias,
    }
    tensors = tiny_tensors(config)
    if bias:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name])).bfloat16()
    layer = Layer(0, read_hparams(config), CPU)
    layer.read(_Memory(tensors), torch.bfloat16)
    states = torch.randn(60, 64, generator=torch.Generator().manual_seed(3))
    hidden = Hidden(states, (17, 40, 3))
    before = layer.run(hidden, None).states
    with torch.inference_mode():
        for fold in folds_of(layer.block):
            fold.apply(torch.rand(int(fold.sources.max()) + 1) + 0.25)
    assert torch.allclose(layer.run(hidden, None).states, before, rtol=1e-4, atol=1e-4)


def test_samples_do_not_attend_to_each_other() -> None:
    layer = Layer(1, read_hparams(CONFIG), CPU)
    layer.read(_Memory(tiny_tensors()), torch.bfloat16)
    states = torch.randn(50, 64)
    together = layer.run(Hidden(states, (20, 30)), None).states
    alone = layer.run(Hidden(states[20:], (30,)), None).states
    assert torch.allclose(together[20:], alone, atol=1e-5)


def test_smoothing_is_exact_and_reduces_int8_error() -> None:
    x, seen = inputs(64, outliers=True)
    weight = weights(16, 64)
    scale = smoothing_scale(weight, seen.max_abs, 0.5)
    assert torch.allclose((x / scale) @ (weight * scale).T, x @ weight.T, rtol=1e-3, atol=1e-2)
    grid = Grid(8, 64, True)

    def off(a: Tensor, w: Tensor) -> float:
        outputs = quantise_activations_int8(a) @ round_to_nearest(w, grid).dequantise().T
        return float((outputs - x @ weight.T).square().mean())

    assert off(x / scale, weight * scale) < 0.5 * off(x, weight)
    # alpha 0.5 makes the maxima of activations and weights equal.
    assert torch.allclose((x / scale).abs().amax(0), (weight * scale).abs().amax(0), rtol=1e-4)


def test_float8() -> None:
    weight = weights(200, 256) * torch.logspace(-3, 1, 200)[:, None]
    made = to_float8(weight, torch.bfloat16)
    largest = weight.abs().amax(1, keepdim=True)
    assert bool(((made.dequantise() - weight).abs() <= largest / 16).all())
    blocks = to_float8(weight, torch.bfloat16, block=128)
    assert blocks.scales.shape == (2, 2)
    assert bool(torch.isfinite(blocks.dequantise()).all())
    x = torch.randn(5, 256)
    for group in (None, 128):
        assert (quantise_activations_float8(x, group) - x).abs().max() < 0.25


def test_nf4() -> None:
    # The levels of the QLoRA paper.
    known = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    known += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    assert torch.allclose(nf4_table(), torch.tensor(known), atol=1e-5)
    weight = weights(8, 128)
    made = to_nf4(weight, 64)
    dense = made.dequantise()
    assert made.group == 64
    # Every code is the nearest level.
    choices = nf4_table() * made.scales.repeat_interleave(64, 1)[..., None]
    best = (choices - weight[..., None]).abs().amin(-1)
    assert torch.allclose((dense - weight).abs(), best, atol=1e-6)
