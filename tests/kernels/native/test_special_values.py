"""NaN, infinities, -0.0, subnormals and large values through every native operation, on every backend.

Results are those of the plain versions: NaN where they have NaN, infinite where they are infinite, and
close elsewhere. A row's special value never changes another row. Where activations are rounded to
int8, a scale carries what is not finite, so NaN may stand for infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.lora_stacks import NUM_IN, make_stacks
from tests.kernels.native.backends import Backend, in_use, runnable
from tests.kernels.native.test_linear import codebook, inputs, int4, int8, table4
from tests.kernels.native.test_ops import batch_of, half_pages, normal
from windlass.kernels import reference
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.lora import Lora, ReferenceLora
from windlass.kernels.native import compiled, ops
from windlass.kernels.native.commands import Step
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.lora import NativeLora
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.packed import Packed
from windlass.kernels.plain_linear import PlainLinear
from windlass.runner import filters
from windlass.runner.adapters import grouped

_COMPILERS, _ = compiled.find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

BITS = {
    "NaN": 0x7FC00000,
    "NaN of CUDA": 0x7FFFFFFF,  # all payload bits set
    "negative NaN": -0x400000,  # 0xFFC00000: what x86-64 makes of 0 * infinity
    "infinity": 0x7F800000,
    "-infinity": -0x800000,
    "-0.0": -0x80000000,
    "subnormal": 0x000116C2,  # 1e-40
    "beyond float16": 0x4788B800,  # 70000
    "1e20": 0x60AD78EC,
    "-3e38": -0x9E4E1A,
}
SPECIALS = [pytest.param(bits, id=name) for name, bits in BITS.items()]
# Without numbers so large that a sum of products overflows or not by the order of its terms.
SUMMABLE = [param for param in SPECIALS if param.id != "-3e38"]
CPU = torch.device("cpu")
CLOSE = {"rtol": 2e-5, "atol": 2e-6, "equal_nan": True}


@pytest.fixture(scope="module", params=runnable(), ids=lambda b: " ".join(b.flags))
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    backend: Backend = request.param
    with in_use(backend, request.config) as pool:
        yield pool


def special(bits: int) -> Tensor:
    """A float32 of these bits. Python's own floats would not keep a NaN's payload."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def with_special(x: Tensor, row: int, place: int, bits: int) -> Tensor:
    changed = x.clone()
    changed[row, place] = special(bits)
    return changed


def assert_others(got: Tensor, clean: Tensor, row: int) -> None:
    """All rows but one are the same to the bit."""
    keep = torch.arange(len(clean)) != row
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("bits", SPECIALS)
def test_norms_and_gates(bits: int) -> None:
    rows, width = 3, 70
    x, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    clean = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    for place in (0, 33, 69):  # the second is behind the middle, the last behind whole vectors
        bad = with_special(x, 1, place, bits)
        got = ops.rms_norm(bad, weight, 1e-5)
        torch.testing.assert_close(got, reference.rms_norm(bad, weight, 1e-5), **CLOSE)
        assert_others(got, clean[0], 1)
        got, total = ops.add_rms_norm(bad, residual.clone(), weight, 1e-5)
        want, summed = reference.add_rms_norm(bad, residual, weight, 1e-5)
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(total, summed, rtol=0, atol=0, equal_nan=True)
        got = ops.silu_mul(bad)
        torch.testing.assert_close(got, reference.silu_mul(bad), **CLOSE)
        assert_others(got, clean[1], 1)
        changed = with_special(weight[None], 0, place, bits)[0]
        want = reference.rms_norm(x, changed, 1e-5)
        torch.testing.assert_close(ops.rms_norm(x, changed, 1e-5), want, **CLOSE)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("bits", SPECIALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_table(dtype: torch.dtype, bits: int) -> None:
    ids = torch.tensor([3, 1, 3])
    for place in (0, 20, 49):
        table = with_special(normal(5, 50), 3, place, bits).to(dtype)
        got = ops.embedding(ids, table)
        torch.testing.assert_close(got, table[ids].float(), rtol=0, atol=0, equal_nan=True)
        numbers = ~got.isnan()
        assert torch.equal(got.signbit()[numbers], table[ids].signbit()[numbers])
        rows = ops.gather(table.float(), ids)
        assert torch.equal(rows.view(torch.int32), table.float()[ids].view(torch.int32))


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("bits", SPECIALS)
@pytest.mark.parametrize("width", [3, 50, 1037])
def test_the_best_token(width: int, bits: int) -> None:
    params = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.8, 2, 0.9, 0.05), (1e-42, 0, 1.0, 0.0)]
    given = torch.tensor(params, dtype=torch.float64)
    keys = torch.tensor([filters.key(5, position) for position in range(len(params))])
    for place in sorted({0, width // 3, width // 2, width - 1}):
        for row in range(len(params)):
            x = with_special(normal(len(params), width), row, place, bits)
            assert ops.argmax(x).tolist() == x.argmax(dim=-1).tolist()
            assert ops.sample(x, given, keys).tolist() == filters.draw(x, given, keys).tolist()
    # One special value between others.
    x = special(bits).repeat(2, width)
    assert ops.argmax(x).tolist() == x.argmax(dim=-1).tolist()


def pages_as_numbers(pages: Tensor, scales: Tensor | None) -> Tensor:
    return pages.float() if scales is None else pages.float() * scales[..., None]


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("bits", SPECIALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_rotation_and_pages(dtype: torch.dtype, bits: int) -> None:
    heads, dim = Heads(2, 1, 16), 16
    _, whole, batch = batch_of([(5, 1), (0, 3)], 2, 1, dim)
    cos_sin, qkv = normal(64, dim), normal(4, 4 * dim, seed=3)
    step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 1e-5)
    for head in range(4):  # two of queries, one of keys, one of values
        bad = with_special(qkv, 2, head * dim + 5, bits)
        for norms in (None, (normal(dim, seed=4), normal(dim, seed=5), 1e-6)):
            ours, want = half_pages(whole, dtype), half_pages(whole, dtype)
            got = ops.rope_write(bad, heads, cos_sin, norms, ours, batch)
            wanted = reference.rope_write(bad, heads, cos_sin, norms, want, batch)
            torch.testing.assert_close(got, wanted, **CLOSE)
            for a, a_scales, b, b_scales in (
                (ours.keys, ours.key_scales, want.keys, want.key_scales),
                (ours.values, ours.value_scales, want.values, want.value_scales),
            ):
                found, expected = pages_as_numbers(a, a_scales), pages_as_numbers(b, b_scales)
                # A code may be rounded to the next one.
                atol = 1e-6 if b_scales is None else b_scales[b_scales.isfinite()].max().item()
                torch.testing.assert_close(found, expected, rtol=step, atol=atol, equal_nan=True)


def assert_attention(
    queries: Tensor, kv: LayerKV, batch: StepBatch, seeing: Tensor, window: int | None = None
) -> Tensor:
    """As the plain version, for the queries that see the special value; returns what all queries got.

    Others may differ: values that a query does not see are multiplied by 0, which makes NaN of infinity,
    and the plain version reads more of them.
    """
    got = ops.attention(queries, kv, batch, 0.125, window)
    want = reference.attention(queries, kv, batch, 0.125, window)[seeing]
    if kv.keys.dtype == torch.float16:
        # In 16-bit arithmetic large scores are coarse, and a small weight is 0: times infinity NaN.
        assert torch.equal(got[seeing].isfinite(), want.isfinite())
    else:
        torch.testing.assert_close(got[seeing], want, **CLOSE)
    return got


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("bits", SUMMABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_attention(dtype: torch.dtype, bits: int) -> None:
    """In a query, a key or a value; in the first part of the keys or in the last."""
    for rows in ([(150, 1), (40, 1)], [(145, 6), (20, 1)]):
        queries, whole, batch = batch_of(rows, 4, 2, 16)
        all_queries = torch.ones(len(queries), dtype=torch.bool)
        kv = half_pages(whole, dtype)
        clean = ops.attention(queries, kv, batch, 0.125)
        bad = queries.clone()
        bad[0, 1, 5] = special(bits)
        got = assert_attention(bad, kv, batch, all_queries)
        assert torch.equal(got[0, 0], clean[0, 0])
        assert_others(got, clean, 0)
        for position in (3, 140):
            block = int(batch.tables[0, position // 16])
            for name in ("keys", "values"):
                pages = getattr(whole, name).clone()
                pages[block, 1, position % 16, 7] = special(bits)
                changed = half_pages(replace(whole, **{name: pages}), dtype)
                sees = (batch.token_slots == 0) & (batch.positions >= position)
                got = assert_attention(queries, changed, batch, sees)
                assert torch.equal(got[-1], clean[-1]), "another request"
                sees &= batch.positions - 100 < position
                assert_attention(queries, changed, batch, sees, window=100)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 128, 256, 301])
def test_scores_of_minus_infinity_weigh_nothing(dtype: torch.dtype, count: int) -> None:
    """Whole parts of the keys, and all keys: then there is nothing to divide by."""
    queries, whole, batch = batch_of([(300, 1)], 4, 2, 16)
    queries[..., 3] = queries[..., 3].abs() + 0.1
    kv = half_pages(whole, dtype)
    for position in range(count):
        kv.keys[int(batch.tables[0, position // 16]), :, position % 16, 3] = -torch.inf
    got = assert_attention(queries, kv, batch, torch.ones(1, dtype=torch.bool))
    assert got.isnan().all() == (count == 301)


@pytest.mark.usefixtures("pool")
def test_large_values_of_keys_without_weight() -> None:
    """exp(-200) is 0, not the smallest float: times 3e38 that would be 4."""
    queries, whole, batch = batch_of([(20, 1)], 1, 1, 8)
    for position in range(21):
        block, place = int(batch.tables[0, position // 16]), position % 16
        whole.keys[block, 0, place] = 0.0
        whole.values[block, 0, place] = 3e38 if position else 1.0
        whole.keys[block, 0, place, 0] = -200.0 if position else 0.0
    queries[0, 0] = 1.0
    got = ops.attention(queries, whole, batch, 1.0)
    torch.testing.assert_close(got, torch.ones_like(got))


FORMS = {
    "int4": int4(21, 224, 32, seed=1),
    "int4 centred": int4(21, 224, 32, seed=2, centred=True),
    "int4, groups of 16": int4(21, 224, 16, seed=2),
    "int8": int8(21, 224, 32, seed=3),
    "int8 affine": int8(21, 224, 32, seed=4, affine=True),
    "W8A8 by token": replace(int8(21, 224, 224, seed=5), activation="token"),
    "W8A8 by tensor": replace(
        int8(21, 224, 224, seed=6), activation="tensor", input_scale=torch.tensor([0.02])
    ),
    "codebook": codebook(21, 224, 32, seed=11),
    "codebook of two levels": codebook(21, 256, 32, seed=12, two_levels=True),
    "table4": table4(21, 224, 32, seed=7),
    "float16": normal(21, 224, seed=8).half(),
    "bfloat16": normal(21, 224, seed=9).bfloat16(),
    "float32": normal(21, 224, seed=10),
}
NOT_ROUNDED = ("table4", "float16", "bfloat16", "float32")


def plain_product(x: Tensor, form: Packed | Tensor) -> Tensor:
    if isinstance(form, Tensor):
        return torch.nn.functional.linear(x, form.float())
    return PlainLinear().prepare(form).apply(x)


def assert_product(name: str, got: Tensor, want: Tensor) -> None:
    """To a share of the row's largest number, where int8 activations and weights are rounded."""
    assert torch.equal(got.isfinite(), want.isfinite())
    if name in NOT_ROUNDED:
        assert torch.equal(got.isnan(), want.isnan())
        infinite = want.isinf()
        assert torch.equal(got[infinite], want[infinite])
    finite = torch.where(want.isfinite(), want, 0)
    found = torch.where(got.isfinite(), got, 0)
    share = 1e-4 if name in NOT_ROUNDED else 0.05
    assert bool(((found - finite).abs() <= share * finite.abs().amax(dim=-1, keepdim=True)).all())


@pytest.mark.parametrize("bits", SUMMABLE)
@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", FORMS)
def test_products(pool: Pool, name: str, prompt: bool, bits: int) -> None:
    form = FORMS[name]
    product = NativeLinear(Workers(2, pool)).prepare(form)
    for rows in (1, 2, 4, 7, 19):
        x, row = inputs(rows, form.shape[1]), rows // 2
        spans = torch.tensor([(0, rows)], dtype=torch.int32)
        step = Step(num_tokens=rows, num_prompts=1, prompts=spans.data_ptr())
        with pool.in_network(step) if prompt else nullcontext():
            clean = product.apply(x)
            for place in (0, 100, form.shape[1] - 1):
                bad = with_special(x, row, place, bits)
                got = product.apply(bad)
                assert_product(name, got, plain_product(bad, form))
                assert_others(got, clean, row)


@pytest.mark.parametrize("bits", SUMMABLE)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_products_with_special_weights(pool: Pool, name: str, bits: int) -> None:
    weight = FORMS[name]
    assert isinstance(weight, Tensor)
    bad = with_special(weight.float(), 9, 50, bits).to(weight.dtype)
    product = NativeLinear(Workers(2, pool)).prepare(bad)
    for rows in (1, 7):
        x = inputs(rows, 224)
        assert_product(name, product.apply(x), plain_product(x, bad))
    ids = torch.tensor([9, 2])
    got, want = product.rows(ids), bad[ids].float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("part", ["scales", "mins"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_of_special_scales_are_refused(pool: Pool, part: str, value: float) -> None:
    """They are left to the plain version, which shows them: the loops of some CPUs would not."""
    kernel = NativeLinear(Workers(2, pool))
    name = "scales" if part == "scales" else "minima"
    for form in (FORMS["int4"], FORMS["int8 affine"]):
        assert not isinstance(form, Tensor)
        tensor = getattr(form, part).clone()
        tensor[4, 2] = value
        why = kernel.refuse(replace(form, **{part: tensor}), CPU, torch.float32)
        assert why == f"1 of {tensor.numel()} {name} are NaN or infinite"
        assert kernel.refuse(form, CPU, torch.float32) is None


@pytest.mark.parametrize("bits", SUMMABLE)
@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
@pytest.mark.usefixtures("pool")
def test_adapters(coded: bool, bits: int) -> None:
    torch.manual_seed(0)
    stacks = make_stacks((30, 20), coded)
    slots = [1, 1, 0, 2, 3]
    rows = grouped(np.array(slots), CPU)
    x, y = torch.randn(5, NUM_IN), torch.randn(5, 50)
    plain, native = Lora(stacks, ReferenceLora()), Lora(stacks, NativeLora())
    clean = native.end(y.clone(), native.begin(x, rows), rows)
    for row in range(5):
        bad = with_special(x, row, 77, bits)
        got = native.end(y.clone(), native.begin(bad, rows), rows)
        want = plain.end(y.clone(), bad, rows)
        assert torch.equal(got.isnan(), want.isnan())
        largest = torch.where(want.isfinite(), want, 0).abs().amax(dim=-1, keepdim=True)
        near = (got - want).abs() <= 1e-4 * largest + 2e-3
        assert bool((near | (got == want) | want.isnan()).all())
        assert_others(got, clean, row)
