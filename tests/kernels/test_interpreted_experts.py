"""Mixture-of-experts kernels in Triton's interpreter, in float32, against the reference.

The cases run in a separate process, like those of test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.divided_experts import check_choice, held
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.kernels import reference_experts
from windlass.kernels.experts import ExpertActivation, ExpertKernels, ExpertWeights, Routing
from windlass.kernels.packed import Float8, Int4Group, Packed, Table4, pack_nibbles
from windlass.quant.rounding import SCHEMES, quantise

pytest.importorskip("triton")

CPU = torch.device("cpu")
CLAMPED = ExpertActivation(kind="clamped", interleaved=True)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@inside
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(num_experts=8, top_k=2),
        Routing(num_experts=60, top_k=4, normalised=True, scale=2.5),
        Routing(num_experts=12, top_k=3, num_groups=4, top_groups=2),
        Routing(
            num_experts=40,
            top_k=6,
            score="sigmoid",
            normalised=True,
            num_groups=8,
            top_groups=3,
            group_score="top2",
        ),
    ],
    ids=["softmax", "normalised", "groups", "top2"],
)
@pytest.mark.parametrize("biased", [False, True])
def test_routing(tokens: int, routing: Routing, biased: bool) -> None:
    from windlass.kernels.triton.experts_routing import route

    logits = torch.randn(tokens, routing.num_experts)
    logits[0] = logits[0].round()  # ties
    bias = torch.rand(routing.num_experts) if biased else None
    want_weights, want = reference_experts.route(logits, bias, routing)
    found = route(logits, bias, routing)
    assert torch.equal(found.experts.long(), want)
    torch.testing.assert_close(found.weights, want_weights)


@inside
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("tokens", [3, 50])
def test_sorted_pairs_fill_tiles_of_one_expert(rows: int, tokens: int) -> None:
    from windlass.kernels.triton.experts_routing import route, sort_pairs

    logits = torch.randn(tokens, 12) + torch.arange(12) / 2  # uneven, and some without tokens
    counts = torch.zeros(12, dtype=torch.int32)
    routed = route(logits, None, Routing(num_experts=12, top_k=3), counts=counts)
    tiles = sort_pairs(routed, rows)
    assert tiles.num_rows is not None
    assert tiles.pairs is not None
    found = []
    for tile, count in enumerate(tiles.num_rows.tolist()):
        pairs = tiles.pairs[tile * rows : tile * rows + count].tolist()
        found += pairs
        assert all(routed.experts.flatten()[p] == tiles.experts[tile] for p in pairs)
    assert sorted(found) == list(range(3 * tokens))


def make_weights(
    routing: Routing,
    activation: ExpertActivation | None = None,
    hidden: int = 64,
    inner: int = 32,
    biased: bool = False,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)
    experts, activation = routing.num_experts, activation or ExpertActivation()
    outputs = 2 * inner if activation.has_gate else inner

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 4

    return ExpertWeights(
        gate_up=random(experts * outputs, hidden),
        down=random(experts * hidden, inner),
        routing=routing,
        activation=activation,
        correction_bias=random(experts) if biased else None,
        expert_scales=torch.linspace(0.8, 1.2, experts) if biased else None,
        gate_up_bias=random(experts, outputs) if biased else None,
        down_bias=random(experts, hidden) if biased else None,
    )


def check(
    weights: ExpertWeights,
    tokens: int,
    rows: int,
    tiling: tuple[int, int] = (64, 32),
    spreads: tuple[float, ...] = (1.0, 0.0),
    bound: float = 1e-5,
) -> None:
    """Compare tiles of `rows` pairs with the reference.

    Without a spread of the logits all tokens go to the same experts. The tiling is outputs and inputs.
    """
    from windlass.kernels.triton.experts import Plan, Tiling, TritonExperts

    torch.manual_seed(0)
    plan = Plan(float("inf"), rows, Tiling(*tiling), Tiling(*tiling))
    kernel = TritonExperts(plans=(plan,))
    assert kernel.refuse(weights, CPU, torch.float32) is None
    mlp = kernel.prepare(weights, torch.float32)
    expected = ExpertKernels(CPU, torch.float32, plain=True).prepare(weights).mlp
    x = torch.randint(-7, 8, (tokens, weights.hidden_size)).float()
    x[:, ::64] = 7  # with this maximum e4m3 codes are exact
    x /= 8
    for spread in spreads:
        logits = torch.randn(tokens, weights.routing.num_experts) * spread
        want = expected.apply(x, logits)
        assert (mlp.apply(x, logits) - want).norm() < bound * want.norm()


ROUTING = Routing(num_experts=6, top_k=2, normalised=True)


@inside
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 1), (1, 16), (21, 16), (40, 64)])
@pytest.mark.parametrize(
    ("activation", "biased"),
    [
        (ExpertActivation(), False),
        (CLAMPED, True),
        (ExpertActivation(kind="gelu_tanh"), True),
        (ExpertActivation(kind="relu2"), True),
    ],
    ids=["silu", "clamped", "gelu", "relu2"],
)
def test_experts(tokens: int, rows: int, activation: ExpertActivation, biased: bool) -> None:
    check(make_weights(ROUTING, activation, biased=biased), tokens, rows)


def packed(weight: torch.Tensor, name: str) -> Packed:
    """The weight in a packed form; MXFP4 and codebooks with sub-scales get random codes."""
    if name in SCHEMES:
        return quantise(weight, SCHEMES[name])
    if name == "fp8, 16-bit activations":
        return replace(quantise(weight, SCHEMES["fp8-block"]), activation="none")
    rows, size = weight.shape
    codes = pack_nibbles(torch.randint(0, 16, (rows, size)))
    if name == "mxfp4":
        levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
        scales = 2.0 ** torch.randint(-6, -3, (rows, size // 32))
        return Table4(codes, torch.cat([levels, -levels]), scales)
    assert name == "sub-scales", name
    table = torch.randint(-100, 100, (16,), dtype=torch.int8)
    subs = torch.randint(-8, 8, (rows, size // 16), dtype=torch.int8)
    scales = (torch.rand(rows, size // 64) / 500).half()
    return Table4(codes, table, scales, subs, unit=0.25)


E4M3 = 0.1  # relative error: the interpreter truncates activations to e4m3


@inside
@pytest.mark.parametrize(
    ("gate_up", "down", "bound"),
    [
        ("fp8", "fp8, 16-bit activations", 1e-5),
        ("fp8-block", "int8", 1e-5),
        ("w8a8", "fp8-block", E4M3),
        ("int4", "fp8", E4M3),
        ("mxfp4", "sub-scales", 1e-5),
        ("int4", "nf4", 1e-5),
    ],
)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 32)])
def test_packed_experts(gate_up: str, down: str, bound: float, tokens: int, rows: int) -> None:
    # 192 inputs: the second block of 128 is not full.
    plain = make_weights(replace(ROUTING, num_experts=3), CLAMPED, 192, 128, biased=True)
    assert isinstance(plain.gate_up, torch.Tensor)
    assert isinstance(plain.down, torch.Tensor)
    if "fp8" in down:  # a block must not span experts
        plain = make_weights(replace(ROUTING, num_experts=3), CLAMPED, 128, 192, biased=True)
    weights = replace(plain, gate_up=packed(plain.gate_up, gate_up), down=packed(plain.down, down))
    check(weights, tokens, rows, tiling=(256, 128), spreads=(1.0,), bound=bound)


@inside
@pytest.mark.parametrize("form", ["plain", "fp8-block", "mxfp4"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 1), (1, 16), (21, 16)])
def test_the_sum_over_ranks_is_the_whole(form: str, tokens: int, rows: int) -> None:
    from windlass.kernels.triton.experts import Plan, Tiling, TritonExperts

    weights = make_weights(ROUTING, hidden=128, inner=64, biased=True)
    assert isinstance(weights.gate_up, torch.Tensor)
    if form != "plain":
        weights = replace(weights, gate_up=packed(weights.gate_up, form))
    kernel = TritonExperts(plans=(Plan(float("inf"), rows, Tiling(64, 32), Tiling(64, 32)),))
    x, logits = torch.randn(tokens, 128), torch.randn(tokens, 6)
    chosen = torch.empty(tokens, 2, dtype=torch.int32)
    total = torch.zeros_like(x)
    for experts in ((5, 0), (3,), (1, 2, 4)):
        local = held(weights, experts)
        assert kernel.refuse(local, CPU, torch.float32) is None
        mlp = kernel.prepare(local, torch.float32)
        # Rows of other ranks' pairs are never written: NaN there must not matter.
        torch.use_deterministic_algorithms(True)
        total += mlp.apply(x, logits, chosen)
        torch.use_deterministic_algorithms(False)
        check_choice(local, logits, chosen, calls=1)
    want = kernel.prepare(weights, torch.float32).apply(x, logits)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)


@inside
def test_quantised_tiles_equal_quantised_inputs() -> None:
    """A row has the same codes whether its tile or a separate kernel quantises it."""
    plain = make_weights(replace(ROUTING, num_experts=2, top_k=1), hidden=128, inner=128)
    assert isinstance(plain.gate_up, torch.Tensor)
    assert isinstance(plain.down, torch.Tensor)
    from windlass.kernels.triton.experts import Plan, Tiling, TritonExperts

    weights = replace(
        plain, gate_up=packed(plain.gate_up, "fp8-block"), down=packed(plain.down, "fp8")
    )
    x, logits = torch.randn(3, 128), torch.randn(3, 2)
    few, many = (Plan(float("inf"), rows, Tiling(64), Tiling(64)) for rows in (1, 32))
    mlp = TritonExperts(plans=(few,)).prepare(weights, torch.float32)
    torch.testing.assert_close(mlp.apply(x, logits), mlp.with_plans((many,)).apply(x, logits))


@inside
def test_sizes_need_not_be_multiples_of_the_tile() -> None:
    weights = make_weights(ROUTING, hidden=80, inner=48, biased=True)
    check(weights, tokens=2, rows=1, tiling=(64, 64))
    check(weights, tokens=19, rows=32, tiling=(64, 64))


@inside
def test_all_plans_compute_the_same() -> None:
    from windlass.kernels.triton.experts import PLANS, TritonExperts

    for plans in PLANS.values():
        assert [plan.max_pairs for plan in plans] == sorted(plan.max_pairs for plan in plans)
        assert plans[-1].max_pairs == float("inf")
    weights = make_weights(replace(ROUTING, num_experts=2, top_k=1), hidden=32, inner=16)
    x, logits = torch.randn(56, weights.hidden_size), torch.randn(56, 2)
    mlp = TritonExperts().prepare(weights, torch.float32)
    whole = mlp.apply(x, logits)
    for tokens in (1, 15, 40):
        torch.testing.assert_close(mlp.apply(x[:tokens], logits[:tokens]), whole[:tokens])


@inside
def test_refusals() -> None:
    from windlass.kernels.triton.experts import TritonExperts

    many = make_weights(Routing(num_experts=600, top_k=1), hidden=16, inner=16)
    assert "600" in str(TritonExperts().refuse(many, CPU, torch.float32))
    odd = make_weights(ROUTING, hidden=40)
    assert "40 inputs" in str(TritonExperts().refuse(odd, CPU, torch.float32))
    scales = torch.ones(6 * 64, 2)
    permuted = Int4Group(torch.zeros(6 * 64, 16), scales, scales, perm=torch.arange(32))
    weights = replace(make_weights(ROUTING), down=permuted)
    assert "act-order" in str(TritonExperts().refuse(weights, CPU, torch.float32))
    blocks = Float8(torch.zeros(6 * 64, 32), torch.ones(3, 1), "block", block=(128, 128))
    weights = replace(weights, down=blocks)
    assert "64 rows per expert" in str(TritonExperts().refuse(weights, CPU, torch.float32))
