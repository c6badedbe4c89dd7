"""What adapters add to a product, in Triton's interpreter, against the plain version."""

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
PLAIN = [(name, False) for name in SIZES]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def compare(sizes: tuple[int, ...], slots: list[int], given: AdapterRows, coded: bool) -> None:
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    stacks = make_stacks(sizes, coded)
    x, y = torch.randn(len(slots), NUM_IN), torch.randn(len(slots), sum(sizes))
    plain, kernel = Lora(stacks, ReferenceLora()), Lora(stacks, TritonLora())
    rows = grouped(np.array(slots), CPU)
    want = plain.end(y.clone(), x, rows)
    got = kernel.end(y.clone(), kernel.begin(x, given), given)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
    if sizes == SIZES["gate, up"] and given.tiles is None:
        x = x / 50  # exp(-gate) must not be too large for the interpreter
        active = kernel.gated(y.clone(), kernel.begin(x, given), given, silu_mul)
        want = plain.gated(y.clone(), x, rows, silu_mul)
        torch.testing.assert_close(active, want, atol=1e-3, rtol=1e-3)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[base], y[base])
    assert not torch.equal(want, y)


@inside
@pytest.mark.parametrize(("name", "coded"), [*PLAIN, ("gate, up", True)])
def test_tokens_by_themselves(name: str, coded: bool) -> None:
    slots = [1, 0, 2, 3, 1]
    compare(SIZES[name], slots, AdapterRows(torch.tensor(slots, dtype=torch.int32)), coded)


@inside
@pytest.mark.parametrize(("name", "coded"), [*PLAIN, ("q, k, v", True)])
def test_tiles_of_rows(name: str, coded: bool) -> None:
    counts, rows = [1, LORA_TILE + 3, 5, 2], [2, 1, 0, 3]
    slots = np.repeat(rows, counts)
    given = in_tiles(slots, counts, CPU)
    assert given.tiles is not None
    assert given.tiles.tolist() == [[0, 1], [1, LORA_TILE], [1 + LORA_TILE, 3], [LORA_TILE + 9, 2]]
    compare(SIZES[name], slots.tolist(), given, coded)


@inside
@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("sizes", [(304, 32, 80), (144, 144), (416,)], ids=str)
@pytest.mark.parametrize("pieces", [False, True])
def test_codes_that_are_read_by_words(
    by_output: bool, sizes: tuple[int, ...], pieces: bool
) -> None:
    """Sizes of whole words and inputs of 16 bits: products of whole numbers."""
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    slots = [1, 0, 2, 3]
    stacks = make_stacks(sizes, coded=True, num_in=640, most=48, by_output=by_output)
    x, y = torch.randn(4, 640).half(), torch.randn(4, sum(sizes)).half()
    given = AdapterRows(torch.tensor(slots, dtype=torch.int32))
    if pieces:
        given = in_tiles(np.array(slots), [1] * 4, CPU)
        x, y = x.float(), y.float()
    kernel, plain = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
    rows = grouped(np.array(slots), CPU)
    got = kernel.end(y.clone(), kernel.begin(x, given), given)
    want = plain.end(y.float(), x.float(), rows)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=1e-3)
    if len(sizes) == 2 and not pieces:
        x = x / 50
        got = kernel.gated(y.clone(), kernel.begin(x, given), given, silu_mul)
        want = plain.gated(y.float(), x.float(), rows, silu_mul)
        torch.testing.assert_close(got.float(), want, atol=0.02, rtol=1e-2)


@inside
@pytest.mark.parametrize("coded", [False, True])
def test_tiles_beside_single_tokens(coded: bool) -> None:
    """Of one step: every token gets what it gets when all are pieces."""
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    counts, rows = [1, 5, 1, 3, 1], [1, 3, 0, 2, 2]
    slots, chunk = np.repeat(rows, counts), np.repeat(counts, counts) > 1
    for sizes in ((304, 32, 80), (144, 144), (416,)):
        stacks = make_stacks(sizes, coded, 640, 48, by_output=coded)
        x, y = torch.randn(11, 640) / 50, torch.randn(11, sum(sizes))
        pieces = in_tiles(slots * chunk, counts, CPU)
        alone = torch.from_numpy(slots * ~chunk).int()
        given = replace(pieces, slots=torch.from_numpy(slots).int(), alone=alone)
        kernel, plain = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
        groups, norm, residual = grouped(slots, CPU), _Norm(sum(sizes)), torch.randn_like(y)
        got = kernel.end(y.clone(), kernel.begin(x, given), given)
        torch.testing.assert_close(got, plain.end(y.clone(), x, groups), atol=5e-3, rtol=1e-3)
        if len(sizes) == 2:
            active = kernel.gated(y.clone(), kernel.begin(x, given), given, silu_mul)
            want = plain.gated(y.clone(), x, groups, silu_mul)
            torch.testing.assert_close(active, want, atol=5e-3, rtol=1e-3)
        if len(sizes) == 1:
            low = kernel.begin(x, given)
            found = kernel.then(y.clone(), low, given, residual.clone(), norm)
            wanted = plain.then(y.clone(), x, groups, residual.clone(), norm)
            torch.testing.assert_close(found, wanted, atol=5e-3, rtol=1e-3)


class _Norm:
    """As a layer's, in the interpreter."""

    eps = 1e-5

    def __init__(self, size: int) -> None:
        self.weight = torch.rand(size) + 0.5

    def rounding(self, num_rows: int) -> None:
        del num_rows

    def add(self, x, residual, unquantised=False):
        assert unquantised
        return add_rms_norm(x, residual, self.weight, self.eps)


@inside
@pytest.mark.parametrize(("coded", "by_output"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("most", [16, 48])
def test_a_norm_behind_the_change(coded: bool, by_output: bool, most: int) -> None:
    from windlass.kernels.triton.lora import TritonLora

    torch.manual_seed(0)
    slots = [3, 0, 2, 0] if most == 16 else [1, 0, 2, 3]
    stacks = make_stacks((304,), coded, 640, most, by_output)
    x, y, residual = torch.randn(4, 640), torch.randn(4, 304), torch.randn(4, 304)
    given, norm = AdapterRows(torch.tensor(slots, dtype=torch.int32)), _Norm(304)
    kernel, plain = Lora(stacks, TritonLora()), Lora(stacks, ReferenceLora())
    want = plain.then(y.clone(), x, grouped(np.array(slots), CPU), residual.clone(), norm)
    low = kernel.begin(x, given)
    got = kernel.then(y.clone(), low, given, residual.clone(), norm)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-3)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[1][base], (y + residual)[base])


@inside
def test_a_token_s_sums_are_the_same_in_every_step() -> None:
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
