"""LoRA kernels in Triton's interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.lora_stacks import NUM_IN, SIZES, make_stacks
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.kernels.batch import LORA_TILE, AdapterRows
from windlass.kernels.lora import Lora, ReferenceLora
from windlass.kernels.reference import add_rms_norm, silu_mul
from windlass.runner.adapters import grouped, in_tiles

pytest.importorskip("triton")

CPU = torch.device("cpu")
UNQUANTISED = [(name, False) for name in SIZES]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def compare(
    sizes: tuple[int, ...], slots: list[int], adapters: AdapterRows, quantised: bool
) -> None:
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    stacks = make_stacks(sizes, quantised)
    x, y = torch.randn(len(slots), NUM_IN), torch.randn(len(slots), sum(sizes))
    reference, kernel = Lora(stacks, ReferenceLora()), Lora(stacks, TritonLora())
    rows = grouped(np.array(slots), CPU)
    want = reference.end(y.clone(), x, rows)
    got = kernel.end(y.clone(), kernel.begin(x, adapters), adapters)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
    if sizes == SIZES["gate, up"] and adapters.tiles is None:
        x = x / 50  # keeps exp(-gate) from overflowing in the interpreter
        active = kernel.gated(y.clone(), kernel.begin(x, adapters), adapters, silu_mul)
        want = reference.gated(y.clone(), x, rows, silu_mul)
        torch.testing.assert_close(active, want, atol=1e-3, rtol=1e-3)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[base], y[base])
    assert not torch.equal(want, y)


@inside
@pytest.mark.parametrize(("name", "quantised"), [*UNQUANTISED, ("gate, up", True)])
def test_single_tokens(name: str, quantised: bool) -> None:
    slots = [1, 0, 2, 3, 1]
    compare(SIZES[name], slots, AdapterRows(torch.tensor(slots, dtype=torch.int32)), quantised)


@inside
@pytest.mark.parametrize(("name", "quantised"), [*UNQUANTISED, ("q, k, v", True)])
def test_tiles(name: str, quantised: bool) -> None:
    counts, rows = [1, LORA_TILE + 3, 5, 2], [2, 1, 0, 3]
    slots = np.repeat(rows, counts)
    adapters = in_tiles(slots, counts, CPU)
    assert adapters.tiles is not None
    assert adapters.tiles.tolist() == [
        [0, 1],
        [1, LORA_TILE],
        [1 + LORA_TILE, 3],
        [LORA_TILE + 9, 2],
    ]
    compare(SIZES[name], slots.tolist(), adapters, quantised)


@inside
@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("sizes", [(304, 32, 80), (144, 144), (416,)], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
def test_int8_codes_in_words(by_output: bool, sizes: tuple[int, ...], tiled: bool) -> None:
    """Sizes of whole words and 16-bit inputs use the integer dot product."""
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    slots = [1, 0, 2, 3]
    stacks = make_stacks(sizes, quantised=True, num_in=640, max_rank=48, by_output=by_output)
    x, y = torch.randn(4, 640).half(), torch.randn(4, sum(sizes)).half()
    adapters = AdapterRows(torch.tensor(slots, dtype=torch.int32))
    if tiled:
        adapters = in_tiles(np.array(slots), [1] * 4, CPU)
        x, y = x.float(), y.float()
    kernel, reference = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
    rows = grouped(np.array(slots), CPU)
    got = kernel.end(y.clone(), kernel.begin(x, adapters), adapters)
    want = reference.end(y.float(), x.float(), rows)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=1e-3)
    if len(sizes) == 2 and not tiled:
        x = x / 50
        got = kernel.gated(y.clone(), kernel.begin(x, adapters), adapters, silu_mul)
        want = reference.gated(y.float(), x.float(), rows, silu_mul)
        torch.testing.assert_close(got.float(), want, atol=0.02, rtol=1e-2)


@inside
@pytest.mark.parametrize("quantised", [False, True])
def test_tiles_and_single_tokens_in_one_step(quantised: bool) -> None:
    """Every token gets the result that it gets when all tokens are in tiles."""
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    counts, rows = [1, 5, 1, 3, 1], [1, 3, 0, 2, 2]
    slots, chunk = np.repeat(rows, counts), np.repeat(counts, counts) > 1
    for sizes in ((304, 32, 80), (144, 144), (416,)):
        stacks = make_stacks(sizes, quantised, 640, 48, by_output=quantised)
        x, y = torch.randn(11, 640) / 50, torch.randn(11, sum(sizes))
        tiles = in_tiles(slots * chunk, counts, CPU)
        single_slots = torch.from_numpy(slots * ~chunk).int()
        adapters = replace(tiles, slots=torch.from_numpy(slots).int(), single_slots=single_slots)
        kernel, reference = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
        groups, norm, residual = grouped(slots, CPU), _Norm(sum(sizes)), torch.randn_like(y)
        got = kernel.end(y.clone(), kernel.begin(x, adapters), adapters)
        torch.testing.assert_close(got, reference.end(y.clone(), x, groups), atol=5e-3, rtol=1e-3)
        if len(sizes) == 2:
            active = kernel.gated(y.clone(), kernel.begin(x, adapters), adapters, silu_mul)
            want = reference.gated(y.clone(), x, groups, silu_mul)
            torch.testing.assert_close(active, want, atol=5e-3, rtol=1e-3)
        if len(sizes) == 1:
            low = kernel.begin(x, adapters)
            normed = kernel.then(y.clone(), low, adapters, residual.clone(), norm)
            want = reference.then(y.clone(), x, groups, residual.clone(), norm)
            torch.testing.assert_close(normed, want, atol=5e-3, rtol=1e-3)


class _Norm:
    """A layer's norm for the interpreter."""

    eps = 1e-5

    def __init__(self, size: int) -> None:
        self.weight = torch.rand(size) + 0.5

    def input_quant(self, num_rows: int) -> None:
        del num_rows

    def add(self, x, residual, unquantised=False):
        assert unquantised
        return add_rms_norm(x, residual, self.weight, self.eps)


@inside
@pytest.mark.parametrize(("quantised", "by_output"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("max_rank", [16, 48])
def test_norm_after_the_delta(quantised: bool, by_output: bool, max_rank: int) -> None:
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    slots = [3, 0, 2, 0] if max_rank == 16 else [1, 0, 2, 3]
    stacks = make_stacks((304,), quantised, 640, max_rank, by_output)
    x, y, residual = torch.randn(4, 640), torch.randn(4, 304), torch.randn(4, 304)
    adapters, norm = AdapterRows(torch.tensor(slots, dtype=torch.int32)), _Norm(304)
    kernel, reference = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
    want = reference.then(y.clone(), x, grouped(np.array(slots), CPU), residual.clone(), norm)
    low = kernel.begin(x, adapters)
    got = kernel.then(y.clone(), low, adapters, residual.clone(), norm)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-3)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[1][base], (y + residual)[base])


@inside
def test_token_is_bitwise_equal_in_every_step() -> None:
    from windlass.kernels.triton.lora import TritonLora

    stacks = make_stacks(SIZES["q, k, v"])
    kernel = Lora(stacks, TritonLora())
    x, y = torch.randn(3, NUM_IN), torch.randn(3, sum(stacks.sizes))
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    rows = AdapterRows(slots)
    together = kernel.end(y.clone(), kernel.begin(x, rows), rows)
    for i in range(3):
        one = slice(i, i + 1)
        rows = AdapterRows(slots[one])
        alone = kernel.end(y[one].clone(), kernel.begin(x[one], rows), rows)
        assert torch.equal(alone, together[one])
