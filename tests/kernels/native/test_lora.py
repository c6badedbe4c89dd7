"""LoRA by the native library against the reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.lora_stacks import NUM_IN, SIZES, make_stacks
from windlass.kernels.lora import Lora, ReferenceLora
from windlass.kernels.native.lora import NativeLora
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.reference import silu_mul
from windlass.runner.adapters import grouped

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [[1], [1, 0, 2, 3, 1], [0, 0], [2] * 33], ids=len)
@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_reference(ops: NativeOps, name: str, coded: bool, slots: list[int]) -> None:
    torch.manual_seed(0)
    stacks = make_stacks(SIZES[name], coded)
    x, y = torch.randn(len(slots), NUM_IN), torch.randn(len(slots), sum(stacks.sizes))
    plain, native = Lora(stacks, ReferenceLora()), Lora(stacks, NativeLora(ops.pool))
    rows = grouped(np.array(slots), CPU)
    got = native.end(y.clone(), native.begin(x, rows), rows)
    torch.testing.assert_close(got, plain.end(y.clone(), x, rows), atol=2e-3, rtol=1e-4)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[base], y[base])
    if name == "gate, up":
        active = native.gated(y.clone(), native.begin(x, rows), rows, silu_mul)
        torch.testing.assert_close(active, silu_mul(got))
    for i in range(len(slots)):
        one = slice(i, i + 1)
        own = grouped(np.array(slots[one]), CPU)
        alone = native.end(y[one].clone(), native.begin(x[one], own), own)
        assert torch.equal(alone, got[one])
