"""Mixture-of-experts kernels on a GPU, against the reference and in captured graphs."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.experts import ExpertActivation, ExpertKernels, ExpertWeights, Routing
from windlass.kernels.reference_experts import ReferenceMLP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
BF16 = 2**-7  # relative error: inputs, gates and rows of pairs are rounded
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


def test_most_tokens() -> None:
    weights = make_weights(Routing(num_experts=16, top_k=2), ExpertActivation(), 256, 128)
    mlp = ExpertKernels(CUDA, torch.bfloat16).prepare(weights).mlp
    x = torch.randn(16384, 256, device=CUDA).bfloat16()
    logits = torch.randn(16384, 16, device=CUDA)
    want = ReferenceMLP(weights, torch.bfloat16).apply(x, logits).float()
    assert (mlp.apply(x, logits).float() - want).norm() < BF16 * want.norm()
