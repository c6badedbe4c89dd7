"""Products of int4 weights with rows of prompts, against their definition, over odd shapes.

The definition rounds inputs and weights as the library does, so that only the order of float32 sums
may differ; the distance from the exact product is bounded too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.native.test_linear import SHAPES, SUMS, inputs, int4, nearest, outlying
from windlass.kernels.native import compiled
from windlass.kernels.native.commands import Step
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Int4Group

STRETCH = 192  # kStretch of prompt_panels.h
LIMITS = (4.0, 4.5)  # kOutlier and kOutlierOfRest of prompt_panels.cpp
ROUNDED = 0.02  # of the norm of the product: inputs and weights rounded to int8
_COMPILERS, _ = compiled.find_compilers()

pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(2)


@contextmanager
def prompt(workers: Workers, rows: int, *spans: tuple[int, int]) -> Iterator[None]:
    """While it lasts, products of so many rows have prompts there."""
    given = torch.tensor(spans, dtype=torch.int32)
    step = Step(num_tokens=rows, num_prompts=len(spans), prompts=given.data_ptr())
    with workers.pool.use_step(step):
        yield


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """A stretch's inputs as they are rounded, and those that are taken as they are."""
    kept = torch.zeros_like(x)
    for limit in LIMITS:
        rest = x - kept
        size = rest.square().mean(dim=-1, keepdim=True).sqrt()
        kept = torch.where(rest.abs() > limit * size, x, kept)
    codes, step = nearest(x - kept)
    return codes.double() * step.double(), kept.double()


def rounded_weight(codes: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
    """A stretch's weights, given code by code, as an output's one scale has them."""
    ends = torch.stack([lows.double(), lows.double() + 15 * scales.double()]).float().abs()
    peaks = ends.amax(dim=(0, 2)) * (torch.ones(()) / 127)
    step = ((peaks.view(torch.int32) + 0xFFF) & ~0xFFF).view(torch.float32)[:, None]
    inverse = torch.where(step > 0, torch.full_like(step, 256) / step, 0)
    factor, start = (scales * inverse).round(), (lows * inverse + 128).round()
    return ((codes * factor + start) / 256).floor().double() * step.double()


def definition(x: Tensor, form: Int4Group) -> Tensor:
    group, num_in = form.group, x.shape[1]
    if form.perm is not None:
        x = x[:, form.perm.long()]
    scales, lows = (
        part.float().repeat_interleave(group, dim=1) for part in (form.scales, form.offsets)
    )
    codes = torch.stack([form.codes & 15, form.codes >> 4], dim=-1).flatten(1).float()
    exact = form.dequantise().double()
    if form.perm is not None:
        exact = exact[:, form.perm.long()]
    block = 32 if group == num_in or group % 32 == 0 else 16
    total = torch.zeros(len(x), form.shape[0], dtype=torch.float64)
    for first in range(0, num_in, STRETCH):
        part = slice(first, min(first + STRETCH, num_in))
        count = part.stop - first
        padded = torch.nn.functional.pad(x[:, part], (0, -count % block))
        inexact, kept = rounded_inputs(padded)
        weight = rounded_weight(codes[:, part], scales[:, part], lows[:, part])
        total += inexact[:, :count] @ weight.T + kept[:, :count] @ exact[:, part].T
    return total


def assert_product(found: Tensor, x: Tensor, form: Int4Group) -> None:
    weight = form.dequantise().double()
    allowed = SUMS * (x.double().abs() @ weight.abs().T) + 1e-30
    assert bool(((found.double() - definition(x, form)).abs() <= allowed).all())
    exact = x.double() @ weight.T
    if exact.numel() >= 64:
        assert (found.double() - exact).norm() <= ROUNDED * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [False, True])
def test_prompts(workers: Workers, shape: tuple[int, int, int], centred: bool) -> None:
    form = int4(*shape, seed=1, centred=centred)
    product = NativeLinear(workers).prepare(form)
    for rows in (1, 7, 16, 33):
        for x in (inputs(rows, shape[1], seed=rows), outlying(rows, shape[1], seed=rows)):
            with prompt(workers, rows, (0, rows)):
                assert_product(product.apply(x), x, form)


def test_columns_in_another_order(workers: Workers) -> None:
    order = torch.randperm(416, generator=torch.Generator().manual_seed(5))
    form = replace(int4(21, 416, 32, seed=5), perm=order)
    x = outlying(9, 416)
    with prompt(workers, 9, (0, 9)):
        assert_product(NativeLinear(workers).prepare(form).apply(x), x, form)


def test_rows_of_prompts_and_others_do_not_depend_on_each_other(workers: Workers) -> None:
    """More rows than one piece of them has, and single rows between."""
    product = NativeLinear(workers).prepare(int4(19, 608, 32, seed=14))
    x = outlying(701, 608)
    decoded = product.apply(x)
    with prompt(workers, 701, (0, 701)):
        prompts = product.apply(x)
    assert not torch.equal(decoded, prompts)
    spans = ((2, 3), (5, 300), (301, 690))
    wanted = decoded.clone()
    for first, last in spans:
        wanted[first:last] = prompts[first:last]
    with prompt(workers, 701, *spans):
        assert torch.equal(product.apply(x), wanted)


@pytest.mark.parametrize("centred", [False, True])
def test_few_rows_are_as_among_many(workers: Workers, centred: bool) -> None:
    """What is left of 8 may be half of it or less, and has a loop of its own."""
    product = NativeLinear(workers).prepare(int4(19, 608, 32, seed=14, centred=centred))
    x = outlying(16, 608)
    with prompt(workers, 16, (0, 16)):
        wanted = product.apply(x)
    for rows in range(1, 16):
        with prompt(workers, rows, (0, rows)):
            assert torch.equal(product.apply(x[:rows]), wanted[:rows])


def test_only_the_wanted_rows(workers: Workers) -> None:
    """Rows may be some of the step's tokens: what each is decides."""
    product = NativeLinear(workers).prepare(int4(19, 64, 32, seed=14))
    x = outlying(4, 64)
    tokens = torch.tensor([3, 7, 8, 20], dtype=torch.int32)
    spans = torch.tensor([[0, 6], [8, 9]], dtype=torch.int32)
    step = Step(num_tokens=21, num_sampled=4, sampled=tokens.data_ptr(), num_prompts=2)
    step.prompts = spans.data_ptr()
    with workers.pool.use_step(step):
        found = product.apply(x)
    with prompt(workers, 4, (0, 1), (2, 3)):
        assert torch.equal(product.apply(x), found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_seen_in_its_row(workers: Workers, bad: float) -> None:
    product = NativeLinear(workers).prepare(int4(16, 224, 32, seed=3))
    x = inputs(5, 224)
    with prompt(workers, 5, (0, 5)):
        whole = product.apply(x)
        x[2, 200] = bad
        found = product.apply(x)
    assert not found[2].isfinite().any()
    siblings = [0, 1, 3, 4]
    assert torch.equal(found[siblings], whole[siblings])


def test_rows_of_zeros_and_tiny_numbers(workers: Workers) -> None:
    form = int4(16, 224, 32, seed=3)
    x = torch.stack([torch.zeros(224), 1e-25 * torch.ones(224), 1e-20 * inputs(1, 224)[0]])
    with prompt(workers, 3, (0, 3)):
        found = NativeLinear(workers).prepare(form).apply(x)
    exact = x.double() @ form.dequantise().double().T
    assert not found[0].any()
    assert (found[1:].double() - exact[1:]).norm() <= ROUNDED * exact[1:].norm()
