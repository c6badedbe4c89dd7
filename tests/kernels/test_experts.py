"""Routing and the reference experts, against direct formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.divided_experts import check_choice, held
from windlass.kernels.experts import ExpertActivation, ExpertKernels, ExpertWeights, Routing
from windlass.kernels.packed import Int8Group
from windlass.kernels.reference_experts import route

CPU = torch.device("cpu")


def test_softmax_weights_are_normalised_over_the_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(logits, None, Routing(num_experts=4, top_k=2, normalised=True))
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_equal_scores_choose_the_lower_index() -> None:
    _, chosen = route(torch.zeros(3, 8), None, Routing(num_experts=8, top_k=3))
    assert chosen.tolist() == [[0, 1, 2]] * 3


def test_the_correction_bias_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[3.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 9.0])
    routing = Routing(num_experts=3, top_k=1, score="sigmoid", scale=2.5)
    weights, chosen = route(logits, bias, routing)
    assert chosen.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0]])) * 2.5)


def test_weights_of_the_experts_multiply_those_of_the_router() -> None:
    logits, scales = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([5.0, 3.0, 2.0])
    routing = Routing(num_experts=3, top_k=2, normalised=True)
    plain, _ = route(logits, None, routing)
    weights, chosen = route(logits, None, routing, scales)
    assert chosen.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, plain * torch.tensor([[2.0, 3.0]]))


@pytest.mark.parametrize(("group_score", "expected"), [("max", [2, 3]), ("top2", [0, 1])])
def test_experts_come_from_the_best_groups(group_score: str, expected: list[int]) -> None:
    logits = torch.tensor([[2.0, 2.0, 2.5, -9.0, 0.0, 0.0]])
    routing = Routing(
        num_experts=6,
        top_k=2,
        num_groups=3,
        top_groups=1,
        group_score=group_score,  # type: ignore[arg-type]
        score="sigmoid",
    )
    assert route(logits, None, routing)[1].tolist() == [expected]


def make_weights(routing: Routing, activation: ExpertActivation) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)
    hidden, inner, experts = 24, 16, routing.num_experts
    outputs = 2 * inner if activation.has_gate else inner

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 4

    return ExpertWeights(
        gate_up=random(experts * outputs, hidden),
        down=random(experts * hidden, inner),
        routing=routing,
        activation=activation,
        gate_up_bias=random(experts, outputs),
        down_bias=random(experts, hidden),
    )


def direct(weights: ExpertWeights, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Every expert for every token, one by one."""
    scales, chosen = route(logits, None, weights.routing)
    count = weights.routing.num_experts
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    gate_up, down = (
        weights.gate_up.unflatten(0, (count, -1)),
        weights.down.unflatten(0, (count, -1)),
    )
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for scale, expert in zip(scales[token], chosen[token].tolist(), strict=True):
            both = gate_up[expert] @ x[token] + weights.gate_up_bias[expert]  # type: ignore[index]
            gate, up = both.chunk(2)
            if weights.activation.interleaved:
                gate, up = both[0::2], both[1::2]
            if weights.activation.kind == "relu2":
                inner = both.clamp(min=0.0) ** 2
            elif weights.activation.kind == "clamped":
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                inner = torch.nn.functional.silu(gate) * up
            out[token] += scale * (down[expert] @ inner + weights.down_bias[expert])  # type: ignore[index]
    return out


@pytest.mark.parametrize(
    "activation",
    [
        ExpertActivation(),
        ExpertActivation(kind="clamped", interleaved=True),
        ExpertActivation(kind="relu2"),
    ],
    ids=["silu", "clamped", "relu2"],
)
def test_the_reference_computes_each_token_of_each_expert(activation: ExpertActivation) -> None:
    weights = make_weights(Routing(num_experts=5, top_k=3, normalised=True), activation)
    x, logits = torch.randn(7, 24), torch.randn(7, 5)
    prepared = ExpertKernels(CPU, torch.float32, plain=True).prepare(weights)
    torch.testing.assert_close(prepared.mlp.apply(x, logits), direct(weights, x, logits))


def test_packed_experts_are_cut_by_rows() -> None:
    weights = make_weights(Routing(num_experts=4, top_k=2), ExpertActivation())
    codes = torch.randint(-127, 128, weights.down.shape, dtype=torch.int8)
    scales = torch.rand(codes.shape[0], 1) / 100
    packed = Int8Group(codes=codes, scales=scales)
    kernels = ExpertKernels(CPU, torch.float32, plain=True)
    x, logits = torch.randn(5, 24), torch.randn(5, 4)
    common = {
        "gate_up": weights.gate_up,
        "routing": weights.routing,
        "gate_up_bias": weights.gate_up_bias,
    }
    found = kernels.prepare(ExpertWeights(down=packed, **common))  # type: ignore[arg-type]
    expected = kernels.prepare(ExpertWeights(down=packed.dequantise(), **common))  # type: ignore[arg-type]
    torch.testing.assert_close(found.mlp.apply(x, logits), expected.mlp.apply(x, logits))


def test_the_sum_over_ranks_is_the_whole() -> None:
    activation = ExpertActivation(kind="clamped", interleaved=True)
    weights = make_weights(Routing(num_experts=5, top_k=3), activation)
    kernels = ExpertKernels(CPU, torch.float32, plain=True, count_load=True)
    for tokens in (1, 9):
        x, logits = torch.randn(tokens, 24), torch.randn(tokens, 5)
        total, chosen = torch.zeros_like(x), torch.empty(tokens, 3, dtype=torch.int32)
        for experts in ((4, 0), (1, 3), (2,)):
            prepared = kernels.prepare(held(weights, experts))
            total += prepared.mlp.apply(x, logits, chosen)
            check_choice(replace(weights, load=prepared.load), logits, chosen, calls=1)
        want = kernels.prepare(weights).mlp.apply(x, logits)
        torch.testing.assert_close(total, want)
