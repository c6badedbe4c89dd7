"""Native norms, activations, gates and sums against the reference, on every backend, and recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.native.backends import Backend, runnable
from tests.kernels.native.test_ops import normal
from windlass.kernels import reference
from windlass.kernels.batch import Heads
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.native.program import ProgramInputs, ProgramLimits, record
from windlass.kernels.native.record import Unrecordable
from windlass.kernels.reference import ActivationKind

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 in another order
KINDS: tuple[ActivationKind, ...] = ("gelu", "gelu_tanh", "relu2", "silu")
SHAPES = [(1, 8), (3, 576), (17, 50), (65, 1), (2, 4099)]


@pytest.fixture(scope="module", params=runnable(), ids=lambda b: " ".join(b.flags))
def pool(request: pytest.FixtureRequest, built_pool: Callable[[Backend], Pool]) -> Pool:
    return built_pool(request.param)


@pytest.fixture(scope="module")
def ops(pool: Pool) -> NativeOps:
    return NativeOps(pool)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(ops: NativeOps, has_bias: bool) -> None:
    for rows, width in SHAPES:
        x, residual, weight = normal(rows, width) + 3, normal(rows, width, seed=1), normal(width)
        bias = normal(width, seed=3) if has_bias else None
        want = reference.layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), want, **CLOSE)
        want, total = reference.add_layer_norm(x, residual, weight, bias, 1e-5)
        got, summed = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
        assert torch.equal(summed, total)
        torch.testing.assert_close(got, want, **CLOSE)


def test_activations(ops: NativeOps) -> None:
    for rows, width in SHAPES:
        x = normal(rows, 2 * width) * 10
        x[0, :2] = torch.tensor([-200.0, 200.0])
        # torch adds 1 to a tanh near -1.
        torch.testing.assert_close(ops.gelu_mul(x), reference.gelu_mul(x), rtol=1e-5, atol=2e-5)
        for kind in KINDS:
            want = reference.activate(x, kind)
            torch.testing.assert_close(ops.activate(x, kind), want, rtol=1e-5, atol=2e-6)


def test_gelu_is_accurate_in_the_tail(ops: NativeOps) -> None:
    x = torch.linspace(-9, 9, 10001)[None]
    want = 0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)
    error = (ops.activate(x, "gelu").double() - want).abs() / want.abs().clamp_min(1e-30)
    assert float(error.max()) < 1e-5


def test_gates_of_query_heads_are_split_off(ops: NativeOps) -> None:
    for rows, heads in ((1, Heads(3, 1, 8)), (40, Heads(4, 2, 16))):
        qkv = normal(rows, 2 * (heads.num_q + heads.num_kv) * heads.dim)
        want, got = (each.split_gates(qkv, heads) for each in (reference, ops))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        q, gate = qkv[:, : 2 * heads.dim].chunk(2, dim=1)
        assert torch.equal(got[0][:, : heads.dim], q)
        assert torch.equal(got[1][:, : heads.dim], gate)


def test_columns_are_normalised_in_groups_and_multiplied(ops: NativeOps) -> None:
    weight = normal(16, seed=3)
    for rows, groups in ((1, 3), (40, 5)):
        x, y = normal(rows, 16), normal(rows, 16 * groups, seed=2)
        want = reference.mul_columns(x, y, 16)
        assert torch.equal(ops.mul_columns(x, y, 16), want)
        want = reference.group_norm(y, weight, 1e-6)
        torch.testing.assert_close(ops.group_norm(y.clone(), weight, 1e-6), want, **CLOSE)
        heads, qkv = Heads(groups, 2, 16), normal(rows, 16 * (groups + 4), seed=4)
        want = reference.value_norm(qkv, heads, weight, 1e-6)
        torch.testing.assert_close(ops.value_norm(qkv.clone(), heads, weight, 1e-6), want, **CLOSE)
        assert torch.equal(want[:, : 16 * (groups + 2)], qkv[:, : 16 * (groups + 2)])


def test_gate_and_soft_cap(ops: NativeOps) -> None:
    for rows, width in SHAPES:
        x, gate = normal(rows, width) * 20, normal(rows, 1, seed=4) * 5
        want = reference.sigmoid_gate(x, gate)
        torch.testing.assert_close(ops.sigmoid_gate(x, gate), want, **CLOSE)
        logits = normal(rows, 7, seed=6) * 5
        want = reference.scale_by_top_score(x, logits)
        torch.testing.assert_close(ops.scale_by_top_score(x, logits), want, **CLOSE)
        gates = normal(rows, width, seed=5) * 5
        want = reference.sigmoid_gate(x, gates)
        torch.testing.assert_close(ops.sigmoid_gate(x, gates), want, **CLOSE)
        torch.testing.assert_close(ops.soft_cap(x, 30.0), reference.soft_cap(x, 30.0), **CLOSE)
    small = torch.tensor([[0.0, 1e-4, -1e-4, 18.7, -18.8, 1e9, -1e9]])
    torch.testing.assert_close(
        ops.soft_cap(small, 30.0), reference.soft_cap(small, 30.0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("jitter", [0.01, 0.3, 0.9])
def test_sparse_mixer(ops: NativeOps, jitter: float) -> None:
    for rows, width in ((1, 2), (3, 16), (40, 7)):
        logits = normal(rows, width)
        want = reference.sparse_mixer(logits, jitter)
        torch.testing.assert_close(ops.sparse_mixer(logits, jitter), want, **CLOSE)
    ties = torch.tensor([[2.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -3.0, -1.0]])
    got, want = ops.sparse_mixer(ties, jitter), reference.sparse_mixer(ties, jitter)
    torch.testing.assert_close(got, want, **CLOSE)
    bad = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]])
    assert ops.sparse_mixer(bad, jitter).shape == (1, 4)


def test_special_values_stay_in_their_row(ops: NativeOps) -> None:
    x, weight = normal(6, 40), normal(40)
    bad = x.clone()
    bad[1, 3] = float("nan")
    bad[3, 30] = float("inf")
    results = {
        kind: (ops.activate(x, kind), ops.activate(bad, kind), reference.activate(bad, kind))
        for kind in KINDS
    }
    results["gelu"][2][3, 30] = float("inf")  # torch's vectorised GELU returns NaN
    results["soft_cap"] = (
        ops.soft_cap(x, 5.0),
        ops.soft_cap(bad, 5.0),
        reference.soft_cap(bad, 5.0),
    )
    results["gelu_mul"] = (ops.gelu_mul(x), ops.gelu_mul(bad), reference.gelu_mul(bad))
    results["layer_norm"] = (
        ops.layer_norm(x, weight, None, 1e-5),
        ops.layer_norm(bad, weight, None, 1e-5),
        reference.layer_norm(bad, weight, None, 1e-5),
    )
    for name, (clean, got, want) in results.items():
        assert torch.equal(got[0::2], clean[0::2]), name
        torch.testing.assert_close(got, want, **CLOSE, equal_nan=True, msg=name)
    gate = torch.tensor([[0.0], [float("nan")], [float("-inf")]])
    gated = ops.sigmoid_gate(x[:3], gate)
    assert gated[1].isnan().all()
    torch.testing.assert_close(gated, reference.sigmoid_gate(x[:3], gate), equal_nan=True)


def test_a_recorded_step_equals_the_eager_one() -> None:
    workers = Workers(2)
    ops, linear = NativeOps(workers.pool), NativeLinear(workers)
    table, weight, bias = normal(20, 64), normal(64), normal(64, seed=1)
    up = linear.prepare(normal(96, 64, seed=2) / 8)
    down, head = (linear.prepare(normal(n, 48, seed=3) / 7) for n in (64, 20))
    gate = linear.prepare(normal(1, 64, seed=4))

    def logits_of(ids: Tensor) -> Tensor:
        residual = ops.embedding(ids, table) * 2.5
        x = ops.layer_norm(residual, weight, bias, 1e-5)
        y = ops.sigmoid_gate(down.apply(ops.gelu_mul(up.apply(x))), gate.apply(x))
        x, residual = ops.add_layer_norm(y + x, residual, weight, bias, 1e-5)
        y = down.apply(ops.gelu_mul(up.apply(x)))
        x, residual = ops.add_layer_norm(y, residual, weight, None, 1e-5)
        total = ops.activate(up.apply(residual + x), "relu2")
        last = ops.gather(ops.gelu_mul(total), torch.arange(len(ids)))
        return ops.soft_cap(head.apply(last) * 0.125, 30.0)

    def forward() -> tuple[Tensor, Tensor]:
        logits = logits_of(torch.tensor([1, 2]))
        return logits, ops.argmax(logits)

    limits = ProgramLimits(tokens=8, rows=8)
    program = record(ops.pool, forward, limits, max_bytes=2**24)
    inputs = ProgramInputs(limits, torch.zeros(1, 1, 1, dtype=torch.int32))
    for count in (1, 3, 8):
        ids = torch.arange(count) * 2 + 1
        inputs.tokens[0, :count] = ids.numpy()
        inputs.step.num_tokens = inputs.step.num_sampled = count
        sampled = (ctypes.c_int32 * count)(*range(count))
        inputs.step.sampled = ctypes.addressof(sampled)
        program.run(inputs, draw=False)
        assert torch.equal(program.results[0][:count], logits_of(ids))


def test_sums_of_different_shapes_cannot_be_recorded(ops: NativeOps) -> None:
    def forward() -> tuple[Tensor, Tensor]:
        x = ops.embedding(torch.tensor([1, 2]), torch.ones(4, 8))
        y = ops.embedding(torch.tensor([1, 2]), torch.ones(4, 1))
        return x + y, ops.argmax(x)

    with pytest.raises(Unrecordable, match="ADD of different shapes or strides"):
        record(ops.pool, forward, ProgramLimits(4, 2), max_bytes=2**20)
