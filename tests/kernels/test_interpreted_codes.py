"""Kernels over a quantised KV cache in Triton's interpreter, against the reference.

The interpreter rounds to fp8 differently, so writes are compared with the reference in int8 only, and
in fp8 with those of another kernel. The cases run in a separate process, like those of
test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, StepBatch
from windlass.kernels.gemm_io import Outputs, UnscaledOutputs

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def quantised_batch(
    heads: Heads, rows: list[tuple[int, int]], dtype: torch.dtype = torch.int8
) -> tuple[LayerKV, StepBatch]:
    kv, batch = make_batch(heads, rows)
    keys, key_scales = reference.encode(kv.keys, dtype)
    values, value_scales = reference.encode(kv.values * 1e-3, dtype)
    return LayerKV(keys, values, key_scales, value_scales), batch


def copy_of(kv: LayerKV) -> LayerKV:
    return LayerKV(
        kv.keys.clone(), kv.values.clone(), kv.key_scales.clone(), kv.value_scales.clone()
    )


def assert_same_pages(ours: LayerKV, want: LayerKV) -> None:
    """Compare pages: rotated keys may differ in the last bit, so codes by one; values are exact."""
    assert (ours.keys.int() - want.keys.int()).abs().max() <= 1
    torch.testing.assert_close(ours.key_scales, want.key_scales)
    assert torch.equal(ours.values, want.values)
    assert torch.equal(ours.value_scales, want.value_scales)


@inside
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(normed: bool) -> None:
    from windlass.kernels.triton.rope import rope_write

    heads = Heads(6, 2, 24)
    kv, batch = quantised_batch(heads, [(5, 1), (12, 9)])
    qkv = torch.randn(10, 10 * 24)
    qkv[3] = 0
    angle = torch.rand(64, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = copy_of(kv)
    want = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
    torch.testing.assert_close(
        rope_write(qkv, heads, RopeOptions(table, norms=norms), ours, batch), want
    )
    assert_same_pages(ours, kv)


@inside
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, 5.0)])
def test_attention(window: int | None, cap: float | None, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 48)
    kv, batch = quantised_batch(heads, [(600, 1), (0, 1), (90, 40)], dtype)
    q = torch.randn(42, 6, 48)
    want = reference.attention(q, kv, batch, AttentionOptions(0.2, window, cap))
    got = attention(q, kv, batch, AttentionOptions(0.2, window, cap))
    # The kernel rounds queries and weights to float16.
    assert (got - want).abs().max() < 2e-3 * want.abs().max()
    assert not batch.work.counters.any()


@inside
@pytest.mark.parametrize("normed", [False, True])
def test_decode_with_fused_rope(normed: bool) -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(6, 2, 24)
    kv, batch = quantised_batch(heads, [(600, 1), (0, 1), (15, 1), (128, 1)])
    qkv = torch.randn(4, 10 * 24)
    angle = torch.rand(640, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    for window in (None, 20):
        ours = copy_of(kv)
        queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
        want = reference.attention(queries, kv, batch, AttentionOptions(0.2, window))
        got = attend(
            qkv, heads, RopeOptions(table, norms=norms), ours, batch, AttentionOptions(0.2, window)
        )
        assert (got - want).abs().max() < 4e-3 * want.abs().max()
        assert_same_pages(ours, kv)


def assert_fused_equals_separate(
    qkv: Outputs,
    heads: Heads,
    rope: RopeOptions,
    kv: LayerKV,
    batch: StepBatch,
    options: AttentionOptions,
    used: list[int] | None = None,
) -> None:
    """Compare pages, and results. `used`: the tokens that are; others write to the last slot.

    Without norms all bits are equal; norms are summed in another order.
    """
    from windlass.kernels.triton import attention
    from windlass.kernels.triton.rope import rope_write

    ours, theirs = copy_of(kv), copy_of(kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "rope_write", None)  # the fused kernel does not need it
        got = attention.attend(qkv, heads, rope, ours, batch, options)
    queries = rope_write(qkv, heads, rope, theirs, batch)
    want = attention.attention(queries, theirs, batch, options)
    assert batch.work is not None
    assert not batch.work.counters.any()
    slots = batch.tables[0]
    if used is not None:
        got, want, slots = got[used], want[used], slots[:-1]
    real = slots.flatten().long()
    for name in ("keys", "values", "key_scales", "value_scales"):
        mine, other = (getattr(each, name)[real] for each in (ours, theirs))
        if rope.norms is None or name.startswith("value"):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), name
        else:
            torch.testing.assert_close(mine.float(), other.float(), rtol=2**-3, atol=1)
            assert (mine.float() == other.float()).float().mean() > 0.9
    assert want.isfinite().all()
    if rope.norms is None:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


def rotation(size: int, positions: int = 2048) -> torch.Tensor:
    angle = torch.rand(positions, size // 2) * 6
    return torch.cat([angle.cos(), angle.sin()], -1)


def norms_of(heads: Heads, kind: str, per_head: bool) -> QKNorms:
    q, k = (torch.randn(*([n] if per_head else []), heads.dim) for n in (heads.num_q, heads.num_kv))
    return QKNorms(q.half(), k.half(), 1e-6, kind=kind)  # type: ignore[arg-type]


# Contexts of one token, most of a block, a whole block, several blocks, and several splits.
CONTEXTS = [(0, 1), (14, 1), (15, 1), (16, 1), (129, 1), (1025, 1)]


@inside
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("contexts", "splits"), [([(1025, 1)], 1), (CONTEXTS, 4), ([(600, 1)], 16), ([(2000, 1)], 32)]
)
def test_fused_rope_equals_the_separate_kernel(
    contexts: list[tuple[int, int]], splits: int, dtype: torch.dtype
) -> None:
    heads = Heads(6, 2, 48)
    kv, batch = quantised_batch(heads, contexts, dtype)
    assert batch.work is not None
    batch = replace(batch, work=replace(batch.work, splits=splits))
    qkv = torch.randn(len(contexts), 10 * 48).half()
    rope = RopeOptions(rotation(48))
    assert_fused_equals_separate(qkv, heads, rope, kv, batch, AttentionOptions(0.2))


@inside
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("options", "rotated", "interleaved", "norms"),
    [
        (AttentionOptions(0.2, 20), 24, False, None),
        (AttentionOptions(0.2, 64, chunked=True), 16, False, None),
        (
            AttentionOptions(0.2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])),
            24,
            True,
            None,
        ),
        (AttentionOptions(0.2, 50, 5.0), 0, False, None),
        (AttentionOptions(0.2), 24, False, ("rms", False)),
        (AttentionOptions(0.2), 8, True, ("layer", True)),
    ],
)
def test_fused_rope_with_all_options(
    options: AttentionOptions,
    rotated: int,
    interleaved: bool,
    norms: tuple[str, bool] | None,
    dtype: torch.dtype,
) -> None:
    """The outputs of a GEMM without their scales."""
    heads = Heads(6, 2, 24)
    contexts = CONTEXTS[1:5]
    kv, batch = quantised_batch(heads, contexts, dtype)
    count = len(contexts)
    rows, columns = torch.rand(count, 1) + 0.5, torch.rand(10 * 24) + 0.5
    qkv = UnscaledOutputs(torch.randn(count, 10 * 24).half(), rows, columns)
    rope = RopeOptions(
        rotation(rotated) if rotated else None,
        interleaved=interleaved,
        norms=norms_of(heads, *norms) if norms is not None else None,
    )
    assert_fused_equals_separate(qkv, heads, rope, kv, batch, options)


@inside
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("width", "window", "normed"),
    [(3, None, False), (3, 20, True), (11, None, False)],
)
def test_fused_rope_of_adjacent_tokens_of_a_row(
    width: int, window: int | None, normed: bool, dtype: torch.dtype
) -> None:
    """Rows of `width` adjacent single tokens, of which one row uses two."""
    heads = Heads(3, 1, 24)
    starts, padding = [200, 0, 13], 3
    rows = [(start, width) for start in starts]
    rows[1] = (0, 2)
    kv, rows_batch = quantised_batch(heads, [*rows, (0, 1)], dtype)
    tokens = [(row, i) for row in range(len(rows)) for i in range(width)]
    used = [at for at, (row, i) in enumerate(tokens) if i < rows[row][1]]
    count = len(tokens)
    counters = torch.zeros(count * heads.num_kv, dtype=torch.int32)
    batch = StepBatch(
        positions=torch.tensor([rows[r][0] + i if i < rows[r][1] else 0 for r, i in tokens]).int(),
        token_slots=torch.tensor([r if i < rows[r][1] else padding for r, i in tokens]).int(),
        tables=rows_batch.tables,
        spans=[],
        kv=[kv],
        work=AttentionWork(
            singles=torch.arange(count, dtype=torch.int32),
            tiles=torch.empty((0, 5), dtype=torch.int32),
            splits=4,
            counters=counters,
            width=width,
        ),
    )
    qkv = torch.randn(count, 5 * 24).half()
    rope = RopeOptions(rotation(24), norms=norms_of(heads, "rms", False) if normed else None)
    options = AttentionOptions(0.2, window)
    assert_fused_equals_separate(qkv, heads, rope, kv, batch, options, used)


@inside
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (20, False), (32, True)])
def test_chunk_attends_to_its_own_keys_before_quantisation(
    window: int | None, chunked: bool
) -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(12, 2, 24)  # 16 tokens fill a tile
    kv, batch = quantised_batch(heads, [(90, 20), (0, 40), (15, 1)])
    qkv = torch.randn(61, 16 * 24)
    angle = torch.rand(160, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    exact = LayerKV(
        kv.keys.float() * kv.key_scales[..., None], kv.values.float() * kv.value_scales[..., None]
    )
    queries = reference.rope_write(qkv, heads, RopeOptions(table), exact, batch)
    options = AttentionOptions(0.2, window, chunked=chunked)
    want = reference.attention(queries, exact, batch, options)
    got = attend(qkv, heads, RopeOptions(table), kv, batch, options)
    assert (got - want)[:60].abs().max() < 4e-3 * want.abs().max()
