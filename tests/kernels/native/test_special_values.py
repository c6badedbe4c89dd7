"""NaN, infinities, -0.0, subnormals and large values through every native operation, on every backend.

The reference implementation defines the result: NaN where it returns NaN, infinite where it is infinite,
and close elsewhere. A special value in one row never changes another row. Where activations are quantised
to int8, only a scale can carry NaN or infinity, so NaN may replace infinity.

One call covers many special values: each lies in a row (or request) of its own, next to rows without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.lora_stacks import NUM_IN, make_stacks
from tests.kernels.native.backends import Backend, runnable
from tests.kernels.native.test_linear import SHAPES, codebook, inputs, int4, int6, int8, table4
from tests.kernels.native.test_ops import batch_of, normal, pages_of_type
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.lora import Lora, ReferenceLora
from windlass.kernels.native.commands import Step
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.lora import NativeLora
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.packed import Packed
from windlass.kernels.reference_linear import ReferenceLinear
from windlass.runner import filters
from windlass.runner.adapters import grouped

_COMPILERS, _ = find_compilers()
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
# Without a value so large that the order of a sum decides whether it overflows.
SUMMABLE = [name for name in BITS if name != "-3e38"]
CPU = torch.device("cpu")
RTOL, ATOL = 2e-5, 2e-6


@pytest.fixture(scope="module", params=runnable(), ids=lambda b: " ".join(b.flags))
def pool(request: pytest.FixtureRequest, built_pool: Callable[[Backend], Pool]) -> Pool:
    return built_pool(request.param)


@pytest.fixture(scope="module")
def ops(pool: Pool) -> NativeOps:
    return NativeOps(pool)


@dataclass(frozen=True, slots=True)
class Special:
    """A special value and its column in a row."""

    name: str
    column: int

    @property
    def value(self) -> Tensor:
        """A float32 with these bits. Python's floats would not keep a NaN's payload."""
        return torch.tensor(BITS[self.name], dtype=torch.int32).view(torch.float32)

    def __str__(self) -> str:
        return f"{self.name} in column {self.column}"


def every(names: Sequence[str], columns: Sequence[int]) -> list[Special]:
    return [Special(name, column) for name in names for column in columns]


def with_specials(x: Tensor, specials: Sequence[Special], first: int = 1, step: int = 2) -> Tensor:
    """Copy x with one special value in each row first, first + step, ..."""
    changed = x.clone()
    for i, special in enumerate(specials):
        changed[first + i * step, special.column] = special.value
    return changed


def is_close(got: Tensor, want: Tensor, rtol: float, atol: float | Tensor) -> Tensor:
    """Compare elements: NaN equals NaN, an infinity only itself."""
    near = (got - want).abs() <= atol + rtol * want.abs()
    return (got == want) | (got.isnan() & want.isnan()) | (near & want.isfinite())


def assert_rows(good: Tensor, labels: Sequence[object], what: str) -> None:
    """Require every element of `good`, and name the rows where one is False."""
    rows = good if good.dim() == 1 else good.flatten(1).all(dim=1)
    bad = [str(label) for label, fine in zip(labels, rows.tolist(), strict=True) if not fine]
    assert not bad, f"{what}: wrong with {'; '.join(bad)}"


def assert_unchanged(got: Tensor, clean: Tensor, what: str) -> None:
    """Require rows without a special value to be equal bit by bit."""
    changed = (got != clean).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert not changed, f"{what}: a special value changed the rows {changed} beside it"


def test_norms_and_gates(ops: NativeOps) -> None:
    specials = every(list(BITS), (0, 33, 69))  # first, in the second half, after the whole vectors
    rows, width = 2 * len(specials), 70
    x, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    bad = with_specials(x, specials)
    got, clean = ops.rms_norm(bad, weight, 1e-5), ops.rms_norm(x, weight, 1e-5)
    want = reference.rms_norm(bad, weight, 1e-5)
    assert_rows(is_close(got, want, RTOL, ATOL)[1::2], specials, "rms_norm")
    assert_unchanged(got[::2], clean[::2], "rms_norm")
    got, total = ops.add_rms_norm(bad, residual.clone(), weight, 1e-5)
    want, want_total = reference.add_rms_norm(bad, residual, weight, 1e-5)
    assert_rows(is_close(got, want, RTOL, ATOL)[1::2], specials, "add_rms_norm")
    assert_rows(is_close(total, want_total, 0, 0)[1::2], specials, "residual of add_rms_norm")
    got, clean = ops.silu_mul(bad), ops.silu_mul(x)
    assert_rows(is_close(got, reference.silu_mul(bad), RTOL, ATOL)[1::2], specials, "silu_mul")
    assert_unchanged(got[::2], clean[::2], "silu_mul")
    some = x[:3]
    for special in specials:
        changed = with_specials(weight[None], [special], first=0)[0]
        got, want = ops.rms_norm(some, changed, 1e-5), reference.rms_norm(some, changed, 1e-5)
        assert is_close(got, want, RTOL, ATOL).all(), f"rms_norm: weight with {special}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_table_rows(ops: NativeOps, dtype: torch.dtype) -> None:
    specials = every(list(BITS), (0, 20, 49))
    table = with_specials(normal(2 * len(specials), 50), specials).to(dtype)
    ids = torch.arange(len(table)).flip(0)
    labels = [specials[i // 2] for i in ids.tolist()]
    got, want = ops.embedding(ids, table), table[ids].float()
    good = is_close(got, want, 0, 0) & (got.isnan() | (got.signbit() == want.signbit()))
    assert_rows(good, labels, "embedding")
    rows = ops.gather(table.float(), ids)
    assert_rows(rows.view(torch.int32) == want.view(torch.int32), labels, "gather")


@pytest.mark.parametrize("width", [3, 50, 1037])
def test_argmax_and_sample(ops: NativeOps, width: int) -> None:
    params = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.8, 2, 0.9, 0.05), (1e-42, 0, 1.0, 0.0)]
    columns = sorted({0, width // 3, width // 2, width - 1})
    specials = [special for special in every(list(BITS), columns) for _ in params]
    count = len(specials)
    x = with_specials(normal(count, width), specials, first=0, step=1)
    given = torch.tensor(params, dtype=torch.float64).repeat(count // len(params), 1)
    keys = torch.tensor([filters.key(5, position) for position in range(count)])
    assert_rows(ops.argmax(x) == x.argmax(dim=-1), specials, "argmax")
    labels = [f"{special}, {params[i % len(params)]}" for i, special in enumerate(specials)]
    got, want = ops.sample(x, given, keys), filters.draw(x, given, keys)
    assert_rows(got == want, labels, "sample")
    # The same special value everywhere.
    uniform = torch.stack([Special(name, 0).value.expand(width) for name in BITS])
    assert_rows(ops.argmax(uniform) == uniform.argmax(dim=-1), list(BITS), "argmax of equals")


def dequantised(pages: Tensor, scales: Tensor | None) -> Tensor:
    return pages.float() if scales is None else pages.float() * scales[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_rope_and_pages(ops: NativeOps, dtype: torch.dtype) -> None:
    heads, dim = Heads(2, 1, 16), 16
    # In each of two query heads, the key head and the value head.
    specials = every(list(BITS), [head * dim + 5 for head in range(4)])
    tokens = 2 * len(specials)
    _, whole, batch = batch_of([(5, 1), (0, tokens - 1)], 2, 1, dim)
    cos_sin, qkv = normal(tokens, dim), normal(tokens, 4 * dim, seed=3)
    bad = with_specials(qkv, specials)
    rtol = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 1e-5)
    blocks = batch.tables[0, batch.token_slots, batch.positions // 16]
    norms = QKNorms(normal(dim, seed=4), normal(dim, seed=5), 1e-6)
    for options in (
        RopeOptions(cos_sin),
        RopeOptions(cos_sin, norms=norms),
        RopeOptions(cos_sin, interleaved=True, norms=replace(norms, kind="layer")),
    ):
        ours, theirs = pages_of_type(whole, dtype), pages_of_type(whole, dtype)
        got = ops.rope_write(bad, heads, options, ours, batch)
        want = reference.rope_write(bad, heads, options, theirs, batch)
        labels = [specials[i // 2] for i in range(tokens)]
        assert_rows(is_close(got, want, RTOL, ATOL), labels, "queries")
        for name in ("keys", "values"):
            scales = getattr(theirs, name.removesuffix("s") + "_scales")
            own_scales = getattr(ours, name.removesuffix("s") + "_scales")
            found = dequantised(getattr(ours, name), own_scales)
            expected = dequantised(getattr(theirs, name), scales)
            # A code may be rounded to the next one.
            atol = 1e-6 if scales is None else torch.where(scales.isfinite(), scales, 0)[..., None]
            good = is_close(found, expected, rtol, atol)
            assert_rows(good[blocks, :, batch.positions % 16], labels, name)
            good[blocks, :, batch.positions % 16] = True
            assert good.all(), f"{name}: a page changed that no token belongs to"


_OPTIONS = AttentionOptions(0.125)


def assert_attention(
    ops: NativeOps,
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    seeing: Tensor,
    options: AttentionOptions = _OPTIONS,
    names: Sequence[str] = (),
) -> Tensor:
    """Compare the queries that see a special value with the reference; return all results.

    Other queries may differ: values that a query must not see are multiplied by 0, which turns infinity
    into NaN, and the reference reads more of them. `names` has the value of each request.
    """
    got = ops.attention(queries, kv, batch, options)
    want = reference.attention(queries, kv, batch, options)[seeing]
    if kv.keys.dtype == torch.float16:
        # In 16-bit arithmetic large scores are coarse, and a small weight is 0: times infinity NaN.
        good = got[seeing].isfinite() == want.isfinite()
    else:
        good = is_close(got[seeing], want, RTOL, ATOL)
    slots = batch.token_slots[seeing].tolist()
    labels = [names[slot] if slot < len(names) else "another request" for slot in slots]
    assert_rows(good, labels, f"attention of {kv.keys.dtype}, {options}")
    return got


def check_attention(
    ops: NativeOps,
    rows: list[tuple[int, int]],
    names: list[str],
    dtype: torch.dtype,
    options: AttentionOptions = _OPTIONS,
) -> None:
    """Put one special value into each request but the last: in a query, a key or a value."""
    queries, whole, batch = batch_of(rows, 4, 2, 16)
    kv = pages_of_type(whole, dtype)
    clean = ops.attention(queries, kv, batch, options)
    firsts = [span.first for span in batch.spans[:-1]]
    values = [Special(name, 0).value for name in names]
    bad = queries.clone()
    for first, value in zip(firsts, values, strict=True):
        bad[first, 1, 5] = value
    got = assert_attention(
        ops, bad, kv, batch, torch.ones(len(queries), dtype=torch.bool), options, names
    )
    others = torch.ones(len(queries), dtype=torch.bool)
    others[firsts] = False
    assert_unchanged(got[firsts, 0], clean[firsts, 0], "another head")
    assert_unchanged(got[others], clean[others], "another query")
    of_special = batch.token_slots < len(names)
    for position in (3, 140):  # in the first chunk of the keys and in the last
        for tensor in ("keys", "values"):
            pages = getattr(whole, tensor).clone()
            for slot, value in enumerate(values):
                block = int(batch.tables[0, slot, position // 16])
                pages[block, 1, position % 16, 7] = value
            changed = pages_of_type(replace(whole, **{tensor: pages}), dtype)
            sees = of_special & (batch.positions >= position)
            got = assert_attention(ops, queries, changed, batch, sees, options, names)
            assert torch.equal(got[-1], clean[-1]), f"{tensor} changed another request"
            sees &= batch.positions - 100 < position
            assert_attention(
                ops, queries, changed, batch, sees, replace(options, window=100), names
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_attention(ops: NativeOps, dtype: torch.dtype) -> None:
    """Few single tokens split their keys between threads; many, and prefill chunks, do not."""
    for first in range(0, len(SUMMABLE), 2):
        names = SUMMABLE[first : first + 2]
        check_attention(ops, [(150, 1)] * len(names) + [(40, 1)], names, dtype)
    check_attention(ops, [(150, 1)] * len(SUMMABLE) + [(40, 1)], SUMMABLE, dtype)
    check_attention(ops, [(145, 6)] * len(SUMMABLE) + [(20, 1)], SUMMABLE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_with_a_soft_cap_and_sinks(ops: NativeOps, dtype: torch.dtype) -> None:
    for options in (replace(_OPTIONS, soft_cap=3.0), replace(_OPTIONS, sinks=normal(4))):
        check_attention(ops, [(150, 1)] * 2 + [(40, 1)], ["NaN", "infinity"], dtype, options)
        check_attention(ops, [(145, 6)] * len(SUMMABLE) + [(20, 1)], SUMMABLE, dtype, options)


def test_special_sinks(ops: NativeOps) -> None:
    """-infinity is no sink; where a sink is far above all scores, the result is 0."""
    queries, kv, batch = batch_of([(150, 1), (3, 2)], 4, 2, 16)
    sinks = torch.tensor([torch.nan, -torch.inf, 1e30, torch.inf])
    got = ops.attention(queries, kv, batch, replace(_OPTIONS, sinks=sinks))
    want = reference.attention(queries, kv, batch, replace(_OPTIONS, sinks=sinks))
    assert is_close(got, want, RTOL, ATOL).all()
    assert not got[:, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_of_minus_infinity_have_no_weight(ops: NativeOps, dtype: torch.dtype) -> None:
    """Whole chunks of keys, and all keys: then the softmax divides 0 by 0."""
    queries, whole, batch = batch_of([(300, 1)], 4, 2, 16)
    queries[..., 3] = queries[..., 3].abs() + 0.1
    for count in (1, 128, 256, 301):
        kv = pages_of_type(replace(whole, keys=whole.keys.clone()), dtype)
        for position in range(count):
            kv.keys[int(batch.tables[0, 0, position // 16]), :, position % 16, 3] = -torch.inf
        one = torch.ones(1, dtype=torch.bool)
        got = assert_attention(
            ops, queries, kv, batch, one, _OPTIONS, [f"{count} keys of -infinity"]
        )
        assert got.isnan().all() == (count == 301), f"{count} keys of -infinity"


def test_large_values_of_keys_without_weight(ops: NativeOps) -> None:
    """exp(-200) is 0, not the smallest float: times 3e38 that would be 4."""
    queries, whole, batch = batch_of([(20, 1)], 1, 1, 8)
    for position in range(21):
        block, offset = int(batch.tables[0, 0, position // 16]), position % 16
        whole.keys[block, 0, offset] = 0.0
        whole.values[block, 0, offset] = 3e38 if position else 1.0
        whole.keys[block, 0, offset, 0] = -200.0 if position else 0.0
    queries[0, 0] = 1.0
    got = ops.attention(queries, whole, batch, AttentionOptions(1.0))
    torch.testing.assert_close(got, torch.ones_like(got))


FORMS = {
    "int4": int4(21, 224, 32, seed=1),
    "int4 centred": int4(21, 224, 32, seed=2, centred=True),
    "int4, groups of 16": int4(21, 224, 16, seed=2),
    "int6": int6(21, 224, 16, seed=3),
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
FLOAT_FORMS = ("table4", "float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class SpecialRows:
    """Rows with one special value each, and the reference GEMM of them with one form."""

    specials: list[Special]
    x: Tensor
    want: Tensor


@cache
def special_rows(name: str) -> SpecialRows:
    """The reference does not depend on the backend."""
    form = FORMS[name]
    specials = every(SUMMABLE, (0, 100, form.shape[1] - 1))
    x = with_specials(inputs(len(specials), form.shape[1]), specials, first=0, step=1)
    return SpecialRows(specials, x, reference_gemm(x, form))


def reference_gemm(x: Tensor, form: Packed | Tensor) -> Tensor:
    if isinstance(form, Tensor):
        return torch.nn.functional.linear(x, form.float())
    return ReferenceLinear().prepare(form).apply(x)


def gemm_is_close(name: str, got: Tensor, want: Tensor, size: Tensor) -> Tensor:
    """Compare to a share of `size`, since int8 activations and weights are quantised."""
    good = got.isfinite() == want.isfinite()
    if name in FLOAT_FORMS:
        good &= want.isfinite() | (got == want) | (got.isnan() & want.isnan())
    share = 1e-4 if name in FLOAT_FORMS else 0.05
    return good & (((got - want).abs() <= share * size) | ~want.isfinite())


def largest_of_rows(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0).abs().amax(dim=-1, keepdim=True)


@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", FORMS)
def test_gemms(pool: Pool, name: str, prompt: bool) -> None:
    form, bank = FORMS[name], special_rows(name)
    gemm = NativeLinear(Workers(2, pool)).prepare(form)
    for rows in (1, 2, 4, 7, 19):
        x = inputs(rows, form.shape[1])
        at = torch.arange(rows // 2 % 2, rows, 2)[: max(1, rows // 2)]  # rows of special values
        others = torch.ones(rows, dtype=torch.bool)
        others[at] = False
        spans = torch.tensor([(0, rows)], dtype=torch.int32)
        step = Step(num_tokens=rows, num_prompts=1, prompts=spans.data_ptr())
        with pool.use_step(step) if prompt else nullcontext():
            clean = gemm.apply(x)
            for first in range(0, len(bank.specials), len(at)):
                chosen = torch.arange(first, first + len(at)) % len(bank.specials)
                bad = x.clone()
                bad[at] = bank.x[chosen]
                got, want = gemm.apply(bad), bank.want[chosen]
                good = gemm_is_close(name, got[at], want, largest_of_rows(want))
                labels = [bank.specials[i] for i in chosen.tolist()]
                assert_rows(good, labels, f"{rows} rows by {name}")
                assert_unchanged(got[others], clean[others], f"{rows} rows by {name}")


@pytest.mark.parametrize("affine", [False, True])
def test_six_bits_give_the_bits_of_eight(pool: Pool, affine: bool) -> None:
    kernel = NativeLinear(Workers(2, pool))
    kernel.prepare(int4(8, 32, 32, seed=17))  # heads quantise once, with outliers
    for shape in (*SHAPES[2:], (1030, 64, 32), (513, 32, 16), (11, 50, 50)):
        num_out, num_in, _ = shape
        form = int6(*shape, seed=17, affine=affine)
        six, eight = kernel.prepare(form), kernel.prepare(replace(form, bits=8))
        assert eight.num_bytes - six.num_bytes >= num_out * num_in / 4
        for rows in (*range(1, 10), 16, 33, 130):
            x = inputs(rows, num_in, seed=rows)
            x[::2] = x[::2] ** 3
            assert torch.equal(six.apply(x), eight.apply(x)), (shape, rows)
        ids = torch.arange(num_out)
        assert torch.equal(six.rows(ids), eight.rows(ids))


def test_inputs_near_the_largest_float_stay_finite(pool: Pool) -> None:
    """They lie beyond the largest bfloat16 value."""
    weight = normal(21, 224, seed=9).bfloat16() * 2.0**-80
    x = inputs(7, 224)
    x[::2, 50] = torch.finfo(torch.float32).max
    x[1, 50] = torch.finfo(torch.float32).min
    got, want = NativeLinear(Workers(2, pool)).prepare(weight).apply(x), reference_gemm(x, weight)
    assert bool(((got - want).abs() <= 1e-5 * (x.abs() @ weight.float().abs().T)).all())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_gemms_with_special_weights(pool: Pool, name: str) -> None:
    """One special value in every second output, and only those that stay finite in 16 bits."""
    weight = FORMS[name]
    assert isinstance(weight, Tensor)
    finite = [n for n in SUMMABLE if Special(n, 0).value.to(weight.dtype).isfinite()]
    for names in (SUMMABLE, finite):
        specials = every(names, [50])
        bad = with_specials(weight.float(), specials).to(weight.dtype)
        labels = [specials[min(i // 2, len(specials) - 1)] for i in range(len(bad))]
        gemm = NativeLinear(Workers(2, pool)).prepare(bad)
        for rows in (1, 7):
            x = inputs(rows, 224)
            got, want = gemm.apply(x), reference_gemm(x, bad)
            size = x.abs() @ torch.where(bad.isfinite(), bad, 0).float().abs().T
            assert_rows(gemm_is_close(name, got, want, size).T, labels, f"{rows} rows by {name}")
        got, want = gemm.rows(torch.arange(len(bad))), bad.float()
        assert_rows(is_close(got, want, 0, 0), labels, f"rows of {name}")


def test_weights_with_special_scales_are_refused(pool: Pool) -> None:
    """The reference shows them; the loops of some CPUs would not."""
    kernel = NativeLinear(Workers(2, pool))
    for form in (FORMS["int4"], FORMS["int8 affine"]):
        assert not isinstance(form, Tensor)
        assert kernel.refuse(form, CPU, torch.float32) is None
        for name in ("scales", "offsets"):
            for value in (torch.nan, torch.inf, -torch.inf):
                tensor = getattr(form, name).clone()
                tensor[4, 2] = value
                why = kernel.refuse(replace(form, **{name: tensor}), CPU, torch.float32)
                assert why == f"1 of {tensor.numel()} {name} are NaN or infinite", value


@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
def test_lora(pool: Pool, coded: bool) -> None:
    torch.manual_seed(0)
    stacks = make_stacks((30, 20), coded)
    slots = [1, 1, 0, 2, 3]
    specials = every(SUMMABLE, [77])
    rows = grouped(np.array(slots * len(specials)), CPU)
    x, y = torch.randn(5, NUM_IN).repeat(len(specials), 1), torch.randn(5 * len(specials), 50)
    plain, native = Lora(stacks, ReferenceLora()), Lora(stacks, NativeLora(pool))
    clean = native.end(y.clone(), native.begin(x, rows), rows)
    for row, slot in enumerate(slots):
        bad = with_specials(x, specials, first=row, step=len(slots))
        got = native.end(y.clone(), native.begin(bad, rows), rows)
        want = plain.end(y.clone(), bad, rows)
        near = (got - want).abs() <= 1e-4 * largest_of_rows(want) + 2e-3
        good = (got.isnan() == want.isnan()) & (near | (got == want) | want.isnan())
        assert_rows(good[row :: len(slots)], specials, f"adapter in slot {slot}")
        others = torch.arange(len(x)) % len(slots) != row
        assert_unchanged(got[others], clean[others], f"adapter in slot {slot}")
