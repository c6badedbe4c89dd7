"""Which kernels compute an int4 GEMM on Hopper, by the number of rows."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.triton.int4_hopper import Int4HopperGemm
from windlass.kernels.triton.int4_wide import Int4Weight
from windlass.kernels.triton.reduce import SplitWorkspace


def gemm(num_out: int, num_in: int, group: int = 128) -> Int4HopperGemm:
    codes = torch.empty(num_out, num_in // 2, dtype=torch.uint8, device="meta")
    groups = torch.empty(num_in // group, num_out, device="meta")
    weight = Int4Weight(codes, groups, groups, group=group, half=min(group, 128))
    return Int4HopperGemm(weight, SplitWorkspace())


@pytest.mark.parametrize(
    ("num_out", "num_in", "rows", "plan"),
    [
        (28672, 4096, 64, "wide 64"),
        (28672, 4096, 128, "wide 128"),
        (28672, 4096, 160, "many 160"),
        (28672, 4096, 288, "many 256, wide 32"),
        (28672, 4096, 512, "many 512"),
        (6144, 4096, 256, "wide 256"),
        (6144, 4096, 320, "many 320"),
        (6144, 4096, 768, "many 512, wide 256"),
        (4096, 14336, 1280, "many 1024, wide 256"),
        (5120, 13824, 2048, "many 2048"),
        (5120, 13824, 2049, ""),
        (4100, 4096, 512, "wide 512"),
        (4100, 4096, 513, ""),
    ],
)
def test_plans(num_out: int, num_in: int, rows: int, plan: str) -> None:
    """As measured on an H200; outputs that are no multiple of 8 have only one kernel."""
    found = gemm(num_out, num_in).plan(rows)
    names = {"Int4WideGemm": "wide", "Int4ManyGemm": "many"}
    assert ", ".join(f"{names[type(kernel).__name__]} {rows}" for kernel, rows in found) == plan


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336), (576, 576), (49152, 576)])
def test_plans_have_every_row_once(shape: tuple[int, int]) -> None:
    kernels = gemm(shape[0], -(-shape[1] // 256) * 256)
    assert all(sum(rows for _, rows in kernels.plan(num)) == num for num in range(17, 2049))


def test_groups_of_64_have_one_kernel() -> None:
    kernels = gemm(4096, 4096, 64)
    assert not kernels.plan(64)
    assert [rows for _, rows in kernels.plan(320)] == [320]
