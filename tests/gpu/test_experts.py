"""Mixture-of-experts kernels on a GPU, against the reference and in captured graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.divided_experts import held
from windlass.kernels.experts import ExpertActivation, ExpertKernels, ExpertWeights, Routing
from windlass.kernels.packed import Packed, Table4, pack_nibbles
from windlass.kernels.reference_experts import ReferenceMLP
from windlass.quant.rounding import SCHEMES, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
BF16 = 2**-7  # relative error: inputs, gates and rows of pairs are rounded
E4M3 = 0.06  # the same with activations rounded to 3 mantissa bits before both GEMMs
CLAMPED = ExpertActivation(kind="clamped", interleaved=True)


def make_weights(
    routing: Routing, activation: ExpertActivation, hidden: int, inner: int
) -> ExpertWeights:
    experts = routing.num_experts

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=CUDA) / 16).bfloat16()

    biased = activation.kind == "clamped"
    return ExpertWeights(
        gate_up=random(experts * 2 * inner, hidden),
        down=random(experts * hidden, inner),
        routing=routing,
        activation=activation,
        gate_up_bias=random(experts, 2 * inner) if biased else None,
        down_bias=random(experts, hidden) if biased else None,
    )


MODELS = {
    "qwen3": (Routing(num_experts=128, top_k=8, normalised=True), ExpertActivation(), 2048, 768),
    "gpt-oss": (Routing(num_experts=32, top_k=4, normalised=True), CLAMPED, 2880, 2880),
    "grouped": (
        Routing(
            num_experts=64,
            top_k=6,
            score="sigmoid",
            num_groups=8,
            top_groups=3,
            group_score="top2",
            scale=2.5,
        ),
        ExpertActivation(),
        2048,
        1408,
    ),
}


def check(weights: ExpertWeights, bound: float) -> None:
    """Compare with the reference, alone = in a batch, and replay = eager."""
    prepared = ExpertKernels(CUDA, torch.bfloat16).prepare(weights)
    assert prepared.kernel == "triton experts", prepared.reason
    expected = ReferenceMLP(weights, torch.bfloat16)
    x = torch.randn(1500, weights.hidden_size, device=CUDA).bfloat16()
    logits = torch.randn(1500, weights.routing.num_experts, device=CUDA).bfloat16()
    logits[700:] = logits[700]  # uneven: many tokens choose the same experts
    whole = prepared.mlp.apply(x, logits)
    want = expected.apply(x, logits).float()
    assert (whole.float() - want).norm() < bound * want.norm()
    for count in (1, 3, 8, 17, 64, 200, 777):
        found = prepared.mlp.apply(x[:count], logits[:count])
        assert torch.equal(found, whole[:count]), f"{count} rows"
    for count in (1, 64):
        _check_graph(prepared.mlp, x[:count].clone(), logits[:count].clone())


def _check_graph(mlp, x: torch.Tensor, logits: torch.Tensor) -> None:
    mlp.apply(x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mlp.apply(mlp.apply(x, logits), logits)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(out, mlp.apply(mlp.apply(x, logits), logits))


@pytest.mark.parametrize("name", MODELS)
def test_experts(name: str) -> None:
    check(make_weights(*MODELS[name]), BF16)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_adds_its_own_experts(name: str) -> None:
    weights = make_weights(*MODELS[name])
    check(held(weights, tuple(range(1, weights.routing.num_experts, 2))), BF16)


def test_load_is_counted_outside_of_graphs() -> None:
    weights = make_weights(Routing(num_experts=16, top_k=2), ExpertActivation(), 256, 128)
    prepared = ExpertKernels(CUDA, torch.bfloat16, count_load=True).prepare(weights)
    x, logits = torch.randn(40, 256, device=CUDA).bfloat16(), torch.randn(40, 16, device=CUDA)
    prepared.mlp.apply(x, logits)
    assert prepared.load is not None
    assert prepared.load.sum() == 80
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.mlp.apply(x, logits)
    graph.replay()
    assert prepared.load.sum() == 80


def test_most_tokens() -> None:
    weights = make_weights(Routing(num_experts=16, top_k=2), ExpertActivation(), 256, 128)
    mlp = ExpertKernels(CUDA, torch.bfloat16).prepare(weights).mlp
    x = torch.randn(16384, 256, device=CUDA).bfloat16()
    logits = torch.randn(16384, 16, device=CUDA)
    want = ReferenceMLP(weights, torch.bfloat16).apply(x, logits).float()
    assert (mlp.apply(x, logits).float() - want).norm() < BF16 * want.norm()


def packed(weight: torch.Tensor, name: str) -> Packed:
    """The weight in a packed form; MXFP4 gets random codes."""
    if name in SCHEMES:
        return quantise(weight, SCHEMES[name])
    assert name == "mxfp4", name
    rows, size = weight.shape
    codes = pack_nibbles(torch.randint(0, 16, (rows, size), device=CUDA))
    levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=CUDA)
    scales = 2.0 ** torch.randint(-7, -5, (rows, size // 32), device=CUDA)
    return Table4(codes, torch.cat([levels, -levels]), scales)


@pytest.mark.parametrize(
    ("name", "form", "bound"),
    [
        ("qwen3", "fp8", E4M3),
        ("qwen3", "fp8-block", E4M3),
        ("grouped", "fp8", E4M3),
        ("gpt-oss", "mxfp4", BF16),
        ("qwen3", "int4", BF16),
        ("grouped", "nf4", BF16),
        ("gpt-oss", "int8", BF16),
    ],
)
def test_packed_experts(name: str, form: str, bound: float) -> None:
    plain = make_weights(*MODELS[name])
    assert isinstance(plain.gate_up, torch.Tensor)
    assert isinstance(plain.down, torch.Tensor)
    weights = replace(plain, gate_up=packed(plain.gate_up, form), down=packed(plain.down, form))
    check(weights, bound)
