"""Sums in memory that all ranks can read: ranks are processes that share buffers, in Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Check
from windlass.kernels.gemm_io import InputQuant, PlaneInputs, QuantisedInputs

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
CPU = torch.device("cpu")
SIZE, EPS = 40, 1e-5


class GainNorm:
    """An RMS norm whose reader wants inputs as they are, or quantised."""

    fusable = True
    eps = EPS

    def __init__(self, size: int, wanted: InputQuant | None = None) -> None:
        self.weight = torch.linspace(0.5, 1.5, size)
        self._wanted = wanted

    def input_quant(self, num_rows: int) -> InputQuant | None:
        del num_rows
        return self._wanted


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_sums_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def call_inputs(call: int, rank: int, rows: int, size: int = SIZE) -> Tensor:
    """What a rank adds in a call: values of very different sizes, so that the order matters."""
    made = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(rows, size, generator=made) * 10 ** (rank % 3)


def total_of(call: int, ranks: int, rows: int, size: int = SIZE) -> Tensor:
    total = torch.zeros(rows, size)
    for rank in range(ranks):
        total += call_inputs(call, rank, rows, size)
    return total


def with_residual(total: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """(normalised, residual) after a sum."""
    residual = residual + total
    scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + norm.eps)
    return residual * scale * norm.weight, residual


# Rows of successive calls, and whether each is a two-shot sum.
CALLS = [(3, False), (1, True), (5, True), (5, False), (2, False), (1, False), (5, True), (4, True)]


def sum_as_rank(rank: int, buffers: Tensor, results: list[tuple[Tensor, ...]]) -> None:
    from windlass.kernels.triton.all_reduce import SharedBuffers

    addresses = [row.data_ptr() for row in buffers]
    shared, norm = SharedBuffers.of(rank, addresses, CPU), GainNorm(SIZE)
    for call, (rows, two_shot) in enumerate(CALLS):
        x = call_inputs(call, rank, rows)
        results[call][0].copy_(shared.all_reduce(x, two_shot=two_shot))
        residual = torch.full((rows, SIZE), 0.25)
        out, residual = shared.all_reduce_norm(x, residual, norm, two_shot=two_shot)
        assert isinstance(out, Tensor)
        results[call][1].copy_(out)
        results[call][2].copy_(residual)


@inside
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_same_sums(ranks: int) -> None:
    from windlass.kernels.triton.all_reduce import BUFFER_BYTES

    context = multiprocessing.get_context("fork")
    buffers = torch.zeros(ranks, BUFFER_BYTES, dtype=torch.uint8).share_memory_()
    results = [
        [tuple(torch.zeros(rows, SIZE).share_memory_() for _ in range(3)) for rows, _ in CALLS]
        for _ in range(ranks)
    ]
    processes: list[BaseProcess] = [
        context.Process(target=sum_as_rank, args=(rank, buffers, results[rank]))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks
    norm = GainNorm(SIZE)
    for call, (rows, _) in enumerate(CALLS):
        total = total_of(call, ranks, rows)
        normed, residual = with_residual(total, torch.full((rows, SIZE), 0.25), norm)
        for of_rank in results:
            assert torch.equal(of_rank[call][0], total)
            assert torch.equal(of_rank[call][2], residual)
            torch.testing.assert_close(of_rank[call][1], normed, atol=1e-5, rtol=1e-5)


@inside
def test_a_rank_does_not_wait_for_a_lost_one_once_it_is_released() -> None:
    from windlass.kernels.triton.all_reduce import BUFFER_BYTES, SharedBuffers

    buffers = torch.zeros(2, BUFFER_BYTES, dtype=torch.uint8).share_memory_()
    shared = SharedBuffers.of(0, [row.data_ptr() for row in buffers], CPU)
    shared.counters.share_memory_()
    shared.counters[:] = 2**31 - 1  # the next number wraps around
    x = call_inputs(0, 0, 2)
    process = multiprocessing.get_context("fork").Process(target=shared.all_reduce, args=(x,))
    process.start()
    process.join(1)
    assert process.is_alive()
    shared.release(buffers[0])
    process.join(60)
    process.kill()
    assert process.exitcode == 0


@inside
def test_batch_invariant_steps_sum_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.kernels.triton import all_reduce
    from windlass.runner.collectives import SymmetricMemoryGroup

    monkeypatch.setattr(all_reduce, "MAX_ROWS", 4)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    buffer = torch.zeros(all_reduce.BUFFER_BYTES, dtype=torch.uint8)
    memory: Any = SimpleNamespace(buffer=buffer, addresses=[buffer.data_ptr()])
    nccl: Any = SimpleNamespace(rank=0, size=1, all_reduce=torch.zeros_like)
    group, x = SymmetricMemoryGroup(nccl, memory, CPU), call_inputs(0, 0, 11)
    assert torch.equal(group.all_reduce(x[:4]), x[:4])
    assert not group.all_reduce(x).any()  # by NCCL
    group.is_batch_invariant = lambda: True
    assert torch.equal(group.all_reduce(x), x)
    assert group.why_not_in_order(8192, torch.float32) is None
    assert group.why_not_in_order(8193, torch.float32) == "a row exceeds its slot"


@inside
def test_a_norm_may_quantise_the_sum() -> None:
    from windlass.kernels.triton.all_reduce import BUFFER_BYTES, SharedBuffers
    from windlass.kernels.triton.norm import add_rms_norm

    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
    shared = SharedBuffers.of(0, [buffer.data_ptr()], CPU)
    x, norm = call_inputs(0, 0, 2), GainNorm(SIZE, InputQuant("rows"))
    out, _ = shared.all_reduce_norm(x, torch.zeros_like(x), norm)
    assert isinstance(out, QuantisedInputs)
    want, _ = add_rms_norm(x, torch.zeros_like(x), norm.weight, EPS, InputQuant("rows"))
    assert isinstance(want, QuantisedInputs)
    assert torch.equal(out.scales, want.scales)
    assert torch.equal(out.codes.view(torch.uint8), want.codes.view(torch.uint8))
    norm = GainNorm(SIZE, InputQuant("planes", 64, 32))
    planes, _ = shared.all_reduce_norm(x, torch.zeros_like(x), norm)
    wanted, _ = add_rms_norm(x, torch.zeros_like(x), norm.weight, EPS, norm.input_quant(2))
    assert isinstance(planes, PlaneInputs)
    assert isinstance(wanted, PlaneInputs)
    assert torch.equal(planes.codes, wanted.codes)
    assert torch.equal(planes.scales, wanted.scales)
    assert torch.equal(planes.sums, wanted.sums)


def test_large_tensors_are_refused() -> None:
    from windlass.kernels.triton.all_reduce import MAX_ROWS, SLOT_BYTES, SharedBuffers

    shared = SharedBuffers.of(0, [0], CPU)
    assert shared.why_not(torch.empty(MAX_ROWS, SLOT_BYTES // 4)) is None
    assert shared.why_not(torch.empty(MAX_ROWS + 1, 8)) == f"more than {MAX_ROWS} rows"
    assert shared.why_not(torch.empty(1, SLOT_BYTES // 4 + 1)) == "a row exceeds its slot"
    assert shared.why_not(torch.empty(1, 8, dtype=torch.int64)) == "torch.int64 is not summed"
