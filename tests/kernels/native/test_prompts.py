"""Prompt GEMMs against their definitions, over odd shapes.

int4 weights without AMX: the definition quantises inputs and weights as the library does, so that only the
order of float32 sums may differ. The error against the exact GEMM is bounded too. With AMX inputs and weights
are rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.native.backends import PORTABLE, Backend, runnable
from tests.kernels.native.test_linear import (
    SHAPES,
    SUM_TOLERANCE,
    codebook,
    heavy_tailed,
    inputs,
    int4,
    int6,
    int8,
    quantise_blocks,
)
from windlass.kernels.native.commands import Step
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.packed import Int4Group, Int8Group, Table4

BLOCK = 192  # kPromptBlock of prompt_panels.h
LIMITS = (4.0, 4.5)  # kOutlier and kOutlierOfOthers of prompt_panels.cpp
QUANTISED = 0.02  # of the norm of the result: inputs and weights quantised to int8
ROUNDED = 0.006  # the same with bfloat16
_COMPILERS, _ = find_compilers()

pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")


@pytest.fixture(scope="module")
def any_workers() -> Workers:
    return Workers(2)


@pytest.fixture(scope="module", params=["blocks", "bfloat16"])
def workers(
    request: pytest.FixtureRequest,
    any_workers: Workers,
    built_pool: Callable[[Backend], Pool],
) -> Workers:
    """With the GEMM: another backend's, where this CPU's backend has none of this kind."""
    if request.param == "bfloat16":
        if not rounds_to_bfloat16(any_workers):
            pytest.skip("no AMX")
        return any_workers
    if rounds_to_bfloat16(any_workers):
        without = [backend for backend in runnable() if "AMX" not in backend.name]
        return Workers(pool=built_pool(without[-1]))
    return any_workers if has_prompt_gemm(any_workers) else Workers(pool=built_pool(PORTABLE))


def has_prompt_gemm(workers: Workers) -> bool:
    """Whether int4 weights have one."""
    return NativeLinear(workers).prepare(int4(8, 32, 32, seed=1)).coarse_prompts


def rounds_to_bfloat16(workers: Workers) -> bool:
    return workers.pool.native.simd.endswith("AMX")


@contextmanager
def prompt(workers: Workers, rows: int, *spans: tuple[int, int]) -> Iterator[None]:
    """Declare prompt spans for GEMMs of `rows` rows inside the context."""
    span_tensor = torch.tensor(spans, dtype=torch.int32)
    step = Step(num_tokens=rows, num_prompts=len(spans), prompts=span_tensor.data_ptr())
    with workers.pool.use_step(step):
        yield


def quantised_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quantised inputs of a prompt block, and its outliers."""
    kept = torch.zeros_like(x)
    for limit in LIMITS:
        rest = x - kept
        size = rest.square().mean(dim=-1, keepdim=True).sqrt()
        kept = torch.where(rest.abs() > limit * size, x, kept)
    codes, step = quantise_blocks(x - kept)
    return codes.double() * step.double(), kept.double()


def requantised_weight(codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Requantise the weights of a prompt block with one scale per output."""
    ends = torch.stack([offsets.double(), offsets.double() + 15 * scales.double()]).float().abs()
    peaks = ends.amax(dim=(0, 2)) * (torch.ones(()) / 127)
    step = ((peaks.view(torch.int32) + 0xFFF) & ~0xFFF).view(torch.float32)[:, None]
    inverse = torch.where(step > 0, torch.full_like(step, 256) / step, 0)
    factor, start = (scales * inverse).round(), (offsets * inverse + 128).round()
    return ((codes * factor + start) / 256).floor().double() * step.double()


def definition(x: Tensor, form: Int4Group) -> Tensor:
    group, num_in = form.group, x.shape[1]
    if form.perm is not None:
        x = x[:, form.perm.long()]
    scales, offsets = (
        part.float().repeat_interleave(group, dim=1) for part in (form.scales, form.offsets)
    )
    codes = torch.stack([form.codes & 15, form.codes >> 4], dim=-1).flatten(1).float()
    exact = form.dequantise().double()
    if form.perm is not None:
        exact = exact[:, form.perm.long()]
    block = 32 if group == num_in or group % 32 == 0 else 16
    total = torch.zeros(len(x), form.shape[0], dtype=torch.float64)
    for first in range(0, num_in, BLOCK):
        part = slice(first, min(first + BLOCK, num_in))
        count = part.stop - first
        padded = torch.nn.functional.pad(x[:, part], (0, -count % block))
        quantised, kept = quantised_inputs(padded)
        weight = requantised_weight(codes[:, part], scales[:, part], offsets[:, part])
        total += quantised[:, :count] @ weight.T + kept[:, :count] @ exact[:, part].T
    return total


def assert_gemm(workers: Workers, found: Tensor, x: Tensor, form: Int4Group) -> None:
    if rounds_to_bfloat16(workers):
        assert_rounded_gemm(found, x, form)
        return
    weight = form.dequantise().double()
    allowed = SUM_TOLERANCE * (x.double().abs() @ weight.abs().T) + 1e-30
    assert bool(((found.double() - definition(x, form)).abs() <= allowed).all())
    exact = x.double() @ weight.T
    if exact.numel() >= 64:
        assert (found.double() - exact).norm() <= QUANTISED * exact.norm()


def assert_rounded_gemm(found: Tensor, x: Tensor, form: Int4Group | Int8Group | Table4) -> None:
    """bfloat16 has 8 bits: an input and a weight have a relative error of up to 2^-9 each."""
    weight = form.dequantise().double()
    step = weight.abs().amax(dim=1, keepdim=True) * 1e-4  # a weight is computed in float32
    allowed = x.double().abs() @ (weight.abs() * 2.01**-8 + step).T
    exact = x.double() @ weight.T
    assert bool(((found.double() - exact).abs() <= allowed + 1e-30).all())
    if exact.numel() >= 64:
        assert (found.double() - exact).norm() <= ROUNDED * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [False, True])
def test_prompts(workers: Workers, shape: tuple[int, int, int], centred: bool) -> None:
    form = int4(*shape, seed=1, centred=centred)
    gemm = NativeLinear(workers).prepare(form)
    for rows in (1, 7, 16, 33):
        for x in (inputs(rows, shape[1], seed=rows), heavy_tailed(rows, shape[1], seed=rows)):
            with prompt(workers, rows, (0, rows)):
                assert_gemm(workers, gemm.apply(x), x, form)


@pytest.mark.parametrize("shape", [*SHAPES, (37, 416, 208), (17, 400, 80), (40, 1100, 1100)])
@pytest.mark.parametrize("kind", ["int6", "int8", "int8 affine", "codebook"])
def test_other_forms_are_rounded_to_bfloat16(
    any_workers: Workers, kind: str, shape: tuple[int, int, int]
) -> None:
    """Not an LM head: it multiplies few rows of a prompt."""
    form: Int8Group | Table4
    if kind == "codebook":
        form = codebook(*shape, seed=1)
    elif kind == "int6":
        form = int6(*shape, seed=2)
    else:
        form = int8(*shape, seed=3, affine=kind == "int8 affine")
    gemm = NativeLinear(any_workers).prepare(form)
    assert gemm.coarse_prompts == rounds_to_bfloat16(any_workers)
    if not gemm.coarse_prompts:
        return
    x = heavy_tailed(67, shape[1])
    with prompt(any_workers, 67, (0, 67)):
        want = gemm.apply(x)
    assert_rounded_gemm(want, x, form)
    for rows in (1, 16, 17, 33):
        with prompt(any_workers, rows, (0, rows)):
            assert torch.equal(gemm.apply(x[:rows]), want[:rows])


def test_permuted_columns(workers: Workers) -> None:
    order = torch.randperm(416, generator=torch.Generator().manual_seed(5))
    form = replace(int4(21, 416, 32, seed=5), perm=order)
    x = heavy_tailed(9, 416)
    with prompt(workers, 9, (0, 9)):
        found = NativeLinear(workers).prepare(form).apply(x)
    assert_gemm(workers, found, x, form)


def test_a_cpu_without_the_gemm_multiplies_prompts_as_other_rows(any_workers: Workers) -> None:
    gemm = NativeLinear(any_workers).prepare(int4(19, 608, 32, seed=14))
    assert gemm.coarse_prompts == has_prompt_gemm(any_workers)
    x = heavy_tailed(21, 608)
    decoded = gemm.apply(x)
    with prompt(any_workers, 21, (0, 21)):
        prompts = gemm.apply(x)
    assert torch.equal(decoded, prompts) != gemm.coarse_prompts


def test_prompt_and_decode_rows_are_independent(workers: Workers) -> None:
    """More rows than one chunk of panels, with decode rows between."""
    gemm = NativeLinear(workers).prepare(int4(19, 608, 32, seed=14))
    x = heavy_tailed(701, 608)
    decoded = gemm.apply(x)
    with prompt(workers, 701, (0, 701)):
        prompts = gemm.apply(x)
    assert not torch.equal(decoded, prompts)
    spans = ((2, 3), (5, 300), (301, 690))
    want = decoded.clone()
    for first, last in spans:
        want[first:last] = prompts[first:last]
    with prompt(workers, 701, *spans):
        assert torch.equal(gemm.apply(x), want)


@pytest.mark.parametrize("shape", [*SHAPES, (19, 608, 32), (37, 416, 208), (17, 400, 80)])
@pytest.mark.parametrize("centred", [False, True])
def test_few_rows_equal_many(workers: Workers, shape: tuple[int, int, int], centred: bool) -> None:
    """Up to 4 rows, and the last 4 rows or less of a pair of panels, have loops of their own."""
    gemm = NativeLinear(workers).prepare(int4(*shape, seed=14, centred=centred))
    x = heavy_tailed(16, shape[1])
    with prompt(workers, 16, (0, 16)):
        want = gemm.apply(x)
    for rows in range(1, 16):
        with prompt(workers, rows, (0, rows)):
            assert torch.equal(gemm.apply(x[:rows]), want[:rows])
    for row in range(1, 5):
        with prompt(workers, 1, (0, 1)):
            assert torch.equal(gemm.apply(x[row : row + 1]), want[row : row + 1])


def test_sampled_rows_only(workers: Workers) -> None:
    """Rows may be a subset of the step's tokens; each is treated as its token."""
    gemm = NativeLinear(workers).prepare(int4(19, 64, 32, seed=14))
    x = heavy_tailed(4, 64)
    tokens = torch.tensor([3, 7, 8, 20], dtype=torch.int32)
    spans = torch.tensor([[0, 6], [8, 9]], dtype=torch.int32)
    step = Step(num_tokens=21, num_sampled=4, sampled=tokens.data_ptr(), num_prompts=2)
    step.prompts = spans.data_ptr()
    with workers.pool.use_step(step):
        found = gemm.apply(x)
    with prompt(workers, 4, (0, 1), (2, 3)):
        assert torch.equal(gemm.apply(x), found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_row(workers: Workers, value: float) -> None:
    gemm = NativeLinear(workers).prepare(int4(16, 224, 32, seed=3))
    x = inputs(5, 224)
    with prompt(workers, 5, (0, 5)):
        whole = gemm.apply(x)
        x[2, 200] = value
        found = gemm.apply(x)
    assert not found[2].isfinite().any()
    siblings = [0, 1, 3, 4]
    assert torch.equal(found[siblings], whole[siblings])


def test_rows_of_zeros_and_tiny_values(workers: Workers) -> None:
    form = int4(16, 224, 32, seed=3)
    x = torch.stack([torch.zeros(224), 1e-25 * torch.ones(224), 1e-20 * inputs(1, 224)[0]])
    with prompt(workers, 3, (0, 3)):
        found = NativeLinear(workers).prepare(form).apply(x)
    exact = x.double() @ form.dequantise().double().T
    assert not found[0].any()
    assert (found[1:].double() - exact[1:]).norm() <= QUANTISED * exact[1:].norm()
