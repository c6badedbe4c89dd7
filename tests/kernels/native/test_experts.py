"""Native experts against the reference's routing and activation around native GEMMs of single experts.

So the quantisation of activations must be that of a dense layer, and only the order of float32 sums may
differ. A row's result must be the same in any batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.divided_experts import check_choice, held
from tests.kernels.native.backends import Backend, runnable
from tests.kernels.native.test_linear import codebook, int4, int8, table4
from tests.kernels.native.test_prompts import has_prompt_gemm
from windlass.kernels.experts import ExpertActivation, ExpertKernels, ExpertWeights, Routing
from windlass.kernels.native.commands import Step
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.experts import NativeExperts
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.native.program import ProgramInputs, ProgramLimits, record
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.reference_experts import activate, expert_rows, route

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 6, 96, 64
ROUTING = Routing(num_experts=EXPERTS, top_k=3, normalised=True)


def _plain(num_out: int, num_in: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_out, num_in, generator=generator) / 8).to(dtype)


FORMS: dict[str, Callable[[int, int, int], Packed | Tensor]] = {
    "float32": _plain,
    "float16": lambda n, k, seed: _plain(n, k, seed, torch.float16),
    "bfloat16": lambda n, k, seed: _plain(n, k, seed, torch.bfloat16),
    "int4": lambda n, k, seed: int4(n, k, 32, seed),
    "centred int4": lambda n, k, seed: int4(n, k, 32, seed, centred=True),
    "int8": lambda n, k, seed: int8(n, k, 16, seed),
    "int8 with int8 inputs": lambda n, k, seed: replace(int8(n, k, k, seed), activation="token"),
    "table": lambda n, k, seed: table4(n, k, 32, seed),
    "codebook": lambda n, k, seed: codebook(n, k, 32, seed),
}


def weights_of(gate_up: str, down: str, parts: int = 2, **changes: object) -> ExpertWeights:
    """`parts`: gate and up, or up alone."""
    weights = ExpertWeights(
        gate_up=FORMS[gate_up](EXPERTS * parts * INNER, HIDDEN, 1),
        down=FORMS[down](EXPERTS * HIDDEN, INNER, 2),
        routing=ROUTING,
    )
    return replace(weights, **changes)  # type: ignore[arg-type]


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator) ** 3  # some blocks have an outlier
    return x, torch.randn(rows, EXPERTS, generator=generator)


@contextmanager
def prompt(pool: Pool, rows: int, first: int, last: int) -> Iterator[None]:
    """Declare rows [first, last) of `rows` as prompt tokens inside the context."""
    spans = torch.tensor([(first, last)], dtype=torch.int32)
    with pool.use_step(Step(num_tokens=rows, num_prompts=1, prompts=spans.data_ptr())):
        yield


def definition(
    weights: ExpertWeights, pool: Pool, x: Tensor, logits: Tensor, is_prompt: bool = False
) -> Tensor:
    """The chosen experts of each token, one by one, each as a dense native MLP."""
    linear = NativeLinear(Workers(pool=pool))

    def multiply(rows: Packed | Tensor, x: Tensor) -> Tensor:
        with prompt(pool, len(x), 0, len(x) if is_prompt else 0):
            return linear.prepare(rows).apply(x)

    scales, chosen = route(logits, weights.correction_bias, weights.routing, weights.expert_scales)
    out = torch.zeros(x.shape)
    for expert in range(EXPERTS):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        first = weights.num_gate_up
        rows = expert_rows(weights.gate_up, expert * first, first)
        gate_up = multiply(rows, x[tokens])
        if weights.gate_up_bias is not None:
            gate_up = gate_up + weights.gate_up_bias[expert]
        rows = expert_rows(weights.down, expert * HIDDEN, HIDDEN)
        y = multiply(rows, activate(gate_up, weights.activation))
        if weights.down_bias is not None:
            y = y + weights.down_bias[expert]
        out.index_add_(0, tokens, y * scales[tokens, places, None])
    return out


def check(weights: ExpertWeights, pool: Pool, rows: int) -> None:
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights, torch.float32)
    x, logits = inputs(rows)
    got = mlp.apply(x, logits)
    want = definition(weights, pool, x, logits)
    # A rounded gate may quantise an input of `down` to the next code.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-3 * float(want.abs().mean()))
    for first, last in ((0, 1), (rows // 2, rows)):
        part = mlp.apply(x[first:last], logits[first:last])
        assert torch.equal(part, got[first:last])


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Workers(2).pool


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("form", FORMS)
def test_forms(pool: Pool, form: str, rows: int) -> None:
    check(weights_of(form, form), pool, rows)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("form", ["bfloat16", "int4", "int8 with int8 inputs", "codebook"])
def test_the_sum_over_ranks_is_the_whole(pool: Pool, form: str, rows: int) -> None:
    biases = {
        "gate_up_bias": _plain(EXPERTS, 2 * INNER, 3),
        "down_bias": _plain(EXPERTS, HIDDEN, 4),
    }
    weights = weights_of(form, form, **biases)
    kernel = NativeExperts(Workers(pool=pool))
    x, logits = inputs(rows)
    chosen = torch.empty(rows, ROUTING.top_k, dtype=torch.int32)
    total = torch.zeros_like(x)
    for experts in ((4, 0), (5,), (1, 2, 3)):
        local = held(weights, experts)
        assert kernel.refuse(local, CPU, torch.float32) is None
        mlp = kernel.prepare(local, torch.float32)
        part = mlp.apply(x, logits, chosen)
        check_choice(local, logits, chosen, calls=1)
        assert torch.equal(mlp.apply(x[:1], logits[:1]), part[:1])
        total += part
    want = kernel.prepare(weights, torch.float32).apply(x, logits)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", runnable(), ids=lambda b: " ".join(b.flags))
def test_backends(pool: Backend, built_pool: Callable[[Backend], Pool]) -> None:
    for gate_up, down in (("int4", "int8"), ("codebook", "bfloat16"), ("float16", "table")):
        check(weights_of(gate_up, down), built_pool(pool), 17)


@pytest.mark.parametrize(
    "activation",
    [
        ExpertActivation(kind="gelu_tanh"),
        ExpertActivation(interleaved=True),
        ExpertActivation(kind="clamped", interleaved=True, limit=0.5),
    ],
    ids=str,
)
def test_activations_and_biases(pool: Pool, activation: ExpertActivation) -> None:
    biases = {
        "gate_up_bias": _plain(EXPERTS, 2 * INNER, 3),
        "down_bias": _plain(EXPERTS, HIDDEN, 4, torch.bfloat16),
    }
    check(weights_of("float32", "float32", activation=activation, **biases), pool, 9)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("form", ["float32", "int4"])
def test_experts_without_a_gate(pool: Pool, form: str, rows: int) -> None:
    activation, bias = ExpertActivation(kind="relu2"), _plain(EXPERTS, INNER, 3)
    check(weights_of(form, form, 1, activation=activation, gate_up_bias=bias), pool, rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalised": False, "scale": 2.5},
        {"score": "sigmoid"},
        {"num_groups": 3, "top_groups": 2},
        {"num_groups": 3, "top_groups": 1, "group_score": "top2", "top_k": 2, "score": "sigmoid"},
        {"top_k": EXPERTS},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing(pool: Pool, changes: dict[str, object], has_bias: bool) -> None:
    routing = replace(ROUTING, **changes)  # type: ignore[arg-type]
    bias = torch.linspace(-0.3, 0.3, EXPERTS) if has_bias else None
    scales = torch.linspace(0.5, 2.0, EXPERTS) if has_bias else None
    weights = weights_of(
        "float32", "float32", routing=routing, correction_bias=bias, expert_scales=scales
    )
    check(weights, pool, 33)
    # Equal logits: the lower index is chosen.
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights, torch.float32)
    x, logits = inputs(4)
    logits = logits.round()
    torch.testing.assert_close(
        mlp.apply(x, logits), definition(weights, pool, x, logits), rtol=1e-5, atol=1e-5
    )


def test_prompt_rows_are_quantised_as_in_a_dense_layer(pool: Pool) -> None:
    weights = weights_of("int4", "int4")
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights, torch.float32)
    assert mlp.coarse_prompts == has_prompt_gemm(Workers(pool=pool))
    x, logits = inputs(40)
    decode = mlp.apply(x, logits)
    with prompt(pool, 40, 5, 30):
        mixed = mlp.apply(x, logits)
    with prompt(pool, 25, 0, 25):
        alone = mlp.apply(x[5:30], logits[5:30])
    assert torch.equal(mixed[:5], decode[:5])
    assert torch.equal(mixed[30:], decode[30:])
    assert torch.equal(mixed[5:30], alone)
    assert torch.equal(alone, decode[5:30]) != mlp.coarse_prompts
    want = definition(weights, pool, x[5:30], logits[5:30], is_prompt=True)
    torch.testing.assert_close(alone, want, rtol=1e-5, atol=3e-3 * float(want.abs().mean()))


@pytest.mark.parametrize("form", ["float32", "int4", "int8"])
def test_special_values_stay_in_their_row(pool: Pool, form: str) -> None:
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights_of(form, form), torch.float32)
    x, logits = inputs(12)
    clean = mlp.apply(x, logits)
    bad_x, bad_logits = x.clone(), logits.clone()
    bad_x[1, 7] = float("nan")
    bad_x[3, 0] = float("inf")
    bad_logits[5, 2] = float("nan")
    bad_logits[7] = float("nan")
    bad_logits[9, 1] = float("inf")
    bad_logits[11, 4] = float("-inf")
    got = mlp.apply(bad_x, bad_logits)
    assert torch.equal(got[0::2], clean[0::2])
    for row in (1, 5, 7, 9):
        assert got[row].isnan().all()
    assert not got[3].isfinite().any()
    assert got[11].isfinite().all()


def test_a_recorded_step_equals_the_eager_one(pool: Pool) -> None:
    ops, linear = NativeOps(pool), NativeLinear(Workers(pool=pool))
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights_of("int4", "int8"), torch.float32)
    table, norm = _plain(20, HIDDEN, 5), torch.ones(HIDDEN)
    router, head = linear.prepare(_plain(EXPERTS, HIDDEN, 6)), linear.prepare(_plain(20, HIDDEN, 7))

    def logits_of(ids: Tensor) -> Tensor:
        residual = ops.embedding(ids, table)
        x = ops.rms_norm(residual, norm, 1e-5)
        y = mlp.apply(x, router.apply(x))
        normed, _ = ops.add_rms_norm(y, residual, norm, 1e-5)
        return head.apply(ops.gather(normed, torch.arange(len(ids))))

    def forward() -> tuple[Tensor, Tensor]:
        logits = logits_of(torch.tensor([1, 2]))
        return logits, ops.argmax(logits)

    limits = ProgramLimits(tokens=8, rows=8)
    program = record(pool, forward, limits, max_bytes=2**24)
    recorded = ProgramInputs(limits, torch.zeros(1, 1, 1, dtype=torch.int32))
    for count in (1, 3, 8):
        ids = torch.arange(count) * 2 + 1
        recorded.tokens[0, :count] = ids.numpy()
        step = recorded.step
        step.num_tokens = step.num_sampled = count
        sampled = (ctypes.c_int32 * count)(*range(count))
        step.sampled = ctypes.addressof(sampled)
        program.run(recorded, draw=False)
        assert torch.equal(program.results[0][:count], logits_of(ids))


def test_two_engines_share_the_weights(pool: Pool) -> None:
    mlp = NativeExperts(Workers(pool=pool)).prepare(weights_of("int4", "int8"), torch.float32)
    twin = mlp.using(Workers(1))
    x, logits = inputs(4)
    assert torch.equal(twin.apply(x, logits), mlp.apply(x, logits))
    addresses = [
        [tensor.data_ptr() for tensor in each.tensors() if tensor is not None]
        for each in (mlp, twin)
    ]
    assert addresses[0] == addresses[1]


def test_refusals_name_the_reason(pool: Pool) -> None:
    kernel = NativeExperts(Workers(pool=pool))

    def refusal(weights: ExpertWeights) -> str | None:
        return kernel.refuse(weights, CPU, torch.float32)

    assert refusal(weights_of("int4", "float32")) is None
    odd = replace(weights_of("float32", "float32"), down=_plain(EXPERTS * 24, INNER, 1))
    assert refusal(odd) == "24 outputs of an expert, not a multiple of 16"
    codes = torch.zeros(EXPERTS * HIDDEN, INNER).to(torch.float8_e4m3fn)
    fp8 = replace(weights_of("float32", "float32"), down=Float8(codes, torch.ones(1, 1)))
    assert refusal(fp8) == "no fp8 GEMM on a CPU"
    groups = replace(ROUTING, num_groups=4)
    assert refusal(weights_of("int4", "int4", routing=groups)) == "6 experts in 4 groups"
    prepared = ExpertKernels(CPU, torch.float32, workers=Workers(pool=pool)).prepare(fp8)
    assert (prepared.kernel, prepared.reason) == ("plain", "native: no fp8 GEMM on a CPU")
