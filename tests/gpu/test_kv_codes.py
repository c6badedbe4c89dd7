"""Quantised KV cache on a GPU: kernels against the reference, and an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engine import GREEDY, agreement, folder, outputs
from tests.gpu.test_kernels import CUDA, DTYPES, ROWS, make_batch, randn
from windlass import LLM, SamplingParams
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, StepBatch
from windlass.kernels.gemm_io import UnscaledOutputs

__all__ = ["folder"]  # a fixture of test_engine.py

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CODES = [torch.float8_e4m3fn, torch.int8]


def quantised_batch(
    rows: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, splits: int, codes: torch.dtype
) -> tuple[LayerKV, StepBatch]:
    kv, batch = make_batch(rows, heads, dtype, splits)
    keys, key_scales = reference.encode(kv.keys, codes)
    values, value_scales = reference.encode(kv.values * 0.05, codes)
    return LayerKV(keys, values, key_scales, value_scales), batch


def copy_of(kv: LayerKV) -> LayerKV:
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    return LayerKV(
        kv.keys.clone(), kv.values.clone(), kv.key_scales.clone(), kv.value_scales.clone()
    )


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """The kernels round queries and weights to float16 or bfloat16; sums are float32."""
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error <= 3 * 2**-8, float(error)


def assert_same_pages(ours: LayerKV, want: LayerKV) -> None:
    """Compare pages: rotated keys may differ in rounding; values are bitwise equal."""
    assert torch.equal(ours.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(ours.value_scales, want.value_scales)
    got, exact = (kv.keys.float() * kv.key_scales[..., None] for kv in (ours, want))
    step = want.key_scales[..., None] * (32 if want.keys.dtype != torch.int8 else 1)
    assert ((got - exact).abs() <= 1.1 * step).all()
    assert (got == exact).float().mean() > 0.9


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(8, 8, 96), Heads(8, 4, 256)], ids=str
)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_attention(rows, heads: Heads, splits: int, dtype: torch.dtype, codes) -> None:
    from windlass.kernels.triton.attention import attention

    kv, batch = quantised_batch(rows, heads, dtype, splits, codes)
    q = randn(sum(c for _, c in rows), heads.num_q, heads.dim, dtype=dtype)
    for window, cap in [(None, None), (50, None), (1, 5.0)]:
        want = reference.attention(q, kv, batch, AttentionOptions(heads.dim**-0.5, window, cap))
        close(attention(q, kv, batch, AttentionOptions(heads.dim**-0.5, window, cap)), want)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 4, 96)], ids=str)
def test_kv_writes(heads: Heads, normed: bool, codes: torch.dtype) -> None:
    """By the RoPE kernel, and by the fused attention."""
    from windlass.kernels.triton.attention import attend
    from windlass.kernels.triton.rope import rope_write

    dtype = torch.bfloat16
    rows = [(1023, 1), (0, 1), (62, 1), (63, 1), (64, 1), (2000, 1)]
    qkv = randn(len(rows), (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    qkv[2] = 0
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = None
    if normed:
        norms = QKNorms(randn(heads.dim, dtype=dtype), randn(heads.dim, dtype=dtype), 1e-6)
    for splits in (1, 2, 16):
        kv, batch = quantised_batch(rows, heads, dtype, splits, codes)
        written, attended = copy_of(kv), copy_of(kv)
        queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
        close(rope_write(qkv, heads, RopeOptions(table, norms=norms), written, batch), queries)
        assert_same_pages(written, kv)
        scale = heads.dim**-0.5
        want = reference.attention(queries, kv, batch, AttentionOptions(scale))
        close(
            attend(
                qkv,
                heads,
                RopeOptions(table, norms=norms),
                attended,
                batch,
                AttentionOptions(scale),
            ),
            want,
        )
        assert_same_pages(attended, kv)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 4, 96), Heads(8, 4, 256)], ids=str
)
def test_fused_rope_equals_the_separate_kernel(
    heads: Heads, normed: bool, splits: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """Without norms, pages are bitwise equal; norms are summed in another order."""
    from windlass.kernels.triton import attention
    from windlass.kernels.triton.rope import rope_write

    rows = [(1023, 1), (0, 1), (15, 1), (63, 1), (64, 1), (2000, 1)]
    kv, batch = quantised_batch(rows, heads, dtype, splits, codes)
    fused, separate = copy_of(kv), copy_of(kv)
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = UnscaledOutputs(
        randn(len(rows), width, dtype=dtype),
        torch.rand(len(rows), 1, device=CUDA) + 0.5,
        torch.rand(width, device=CUDA) + 0.5,
    )
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    norms = None
    if normed:
        norms = QKNorms(randn(heads.dim, dtype=dtype), randn(heads.dim, dtype=dtype), 1e-6)
    rope = RopeOptions(torch.cat([angle.cos(), angle.sin()], -1), norms=norms)
    options = AttentionOptions(heads.dim**-0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "rope_write", None)
        got = attention.attend(qkv, heads, rope, fused, batch, options)
    queries = rope_write(qkv, heads, rope, separate, batch)
    want = attention.attention(queries, separate, batch, options)
    if normed:
        assert_same_pages(fused, separate)
    else:
        for name in ("keys", "values", "key_scales", "value_scales"):
            ours, theirs = (getattr(each, name) for each in (fused, separate))
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    close(got, want)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("width", [4, 8, 12])
def test_fused_rope_of_adjacent_tokens_of_a_row(width: int, codes: torch.dtype) -> None:
    """Rows of `width` adjacent single tokens, as drafts are verified."""
    from windlass.kernels.triton import attention
    from windlass.kernels.triton.rope import rope_write

    heads, dtype = Heads(32, 8, 128), torch.bfloat16
    starts = [0, 15, 126, 1020]
    kv, batch = quantised_batch([(start, width) for start in starts], heads, dtype, 1, codes)
    count = len(starts) * width
    work = AttentionWork(
        singles=torch.arange(count, dtype=torch.int32, device=CUDA),
        tiles=torch.empty((0, 5), dtype=torch.int32, device=CUDA),
        splits=2,
        counters=torch.zeros(count * heads.num_kv, dtype=torch.int32, device=CUDA),
        width=width,
    )
    batch = replace(batch, work=work)
    fused, separate = copy_of(kv), copy_of(kv)
    qkv = randn(count, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    rope = RopeOptions(torch.cat([angle.cos(), angle.sin()], -1))
    options = AttentionOptions(heads.dim**-0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "rope_write", None)
        got = attention.attend(qkv, heads, rope, fused, batch, options)
    queries = rope_write(qkv, heads, rope, separate, batch)
    want = attention.attention(queries, separate, batch, options)
    for name in ("keys", "values", "key_scales", "value_scales"):
        ours, theirs = (getattr(each, name) for each in (fused, separate))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    close(got, want)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(9, 3, 64)], ids=str)
def test_chunk_attends_to_its_own_keys_before_quantisation(
    heads: Heads, codes: torch.dtype
) -> None:
    from windlass.kernels.triton.attention import attend

    rows = [(0, 700), (1000, 150), (37, 1), (64, 64), (5, 3)]
    kv, batch = quantised_batch(rows, heads, torch.bfloat16, 2, codes)
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = randn(len(batch.positions), width, dtype=torch.bfloat16)
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    exact = LayerKV(
        (kv.keys.float() * kv.key_scales[..., None]).bfloat16(),
        (kv.values.float() * kv.value_scales[..., None]).bfloat16(),
    )
    queries = reference.rope_write(qkv, heads, RopeOptions(table), exact, batch)
    chunks = torch.cat([torch.full((count,), count > 1) for _, count in rows]).to(CUDA)
    for window in (None, 50):
        want = reference.attention(queries, exact, batch, AttentionOptions(heads.dim**-0.5, window))
        got = attend(
            qkv,
            heads,
            RopeOptions(table),
            copy_of(kv),
            batch,
            AttentionOptions(heads.dim**-0.5, window),
        )
        close(got[chunks], want[chunks])


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_kernels_equal_the_reference(folder: Path, kv: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(12)]
    scores = []
    for plain in (False, True):
        options = {"num_blocks": 400, "plain_kernels": plain, "kv_cache_dtype": kv}
        llm = LLM(str(folder), load_format="dummy", **options)
        results = llm.generate(prompts, params)
        scores.append([score.logprob for result in results for score in result.prompt_logprobs])
    assert scores[0] == pytest.approx(scores[1], abs=0.05)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_captured_equals_eager(folder: Path, kv: str) -> None:
    captured = outputs(folder, GREEDY, kv_cache_dtype=kv)
    assert (
        agreement(captured, outputs(folder, GREEDY, kv_cache_dtype=kv, enforce_eager=True)) >= 0.8
    )
    # The two loops plan different chunks, and a chunk reads only its own keys unquantised.
    not_overlapped = outputs(folder, GREEDY, kv_cache_dtype=kv, overlap=False)
    assert agreement(captured, not_overlapped) >= 0.8


def test_deterministic_alone_equals_any_batch(folder: Path) -> None:
    prompt = [(11 * i) % 1000 for i in range(150)]
    others = [[(7 * i + j) % 1000 for j in range(2 + 23 * i)] for i in range(12)]
    params = SamplingParams(
        temperature=0, max_tokens=50, ignore_eos=True, logprobs=1, deterministic=True
    )
    found = []
    for prompts, more in [([prompt], {}), ([prompt, *others], {"max_num_batched_tokens": 48})]:
        options = {"num_blocks": 400, "max_num_seqs": 16, "kv_cache_dtype": "fp8", **more}
        output = LLM(str(folder), load_format="dummy", **options).generate(prompts, params)[0]
        scores = [score.logprob for score in output.outputs[0].logprobs]
        found.append((output.outputs[0].token_ids, scores))
    assert found[0] == found[1]
