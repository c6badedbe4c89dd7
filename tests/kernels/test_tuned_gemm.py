"""Which product is taken where several were measured; the measuring itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton")

from windlass.kernels.lora import Lora, ReferenceLora, Stacks
from windlass.kernels.triton import gemm as module
from windlass.kernels.triton.gemm import TunedGemm
from windlass.kernels.triton.skinny import Tiling
from windlass.lora.start import _run_with_lora

SHAPE = (192, 128)


class Fake(TunedGemm):
    """Counts how often the narrow kernel was asked for, which is the usual product here."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tiling] = []
        self._measured.add(SHAPE)

    def _skinny(self, x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        self.asked.append(tiling)
        return linear(x, weight)


def layer() -> tuple[Tensor, Lora]:
    torch.manual_seed(0)
    ranks = torch.full((3, 1), 4, dtype=torch.int32)
    down, up = torch.randn(3, 1, 4, SHAPE[1]), torch.randn(3, 4 * SHAPE[0])
    stacks = Stacks(down, up, ranks, (SHAPE[0],), {})
    for slot in range(3):
        stacks.clear(slot)
        if slot:
            stacks.destinations(slot, 0, 4)
    return torch.randn(SHAPE), Lora(stacks, ReferenceLora())


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Times by tiling; None is the usual way. Every product is computed once."""
    times: dict[Any, float] = {}

    def fake(group: list[Tensor], product: Callable[[Tensor], Any]) -> float:
        made = product(group[0])
        assert made.shape[1] == SHAPE[0]
        args = getattr(product, "args", ())
        return times.get(next((each for each in args if isinstance(each, Tiling)), None), 9.0)

    monkeypatch.setattr(module, "_time", fake)
    return times


def test_products_with_adapters_are_chosen_apart(timed: dict[Any, float]) -> None:
    gemm, (weight, lora) = Fake(), layer()
    slots = torch.tensor([1, 2] * 32, dtype=torch.int32)
    timed |= {None: 2.0, Tiling(64, 2): 1.0}
    gemm.tune_accompanied([(weight, lambda x, product: _run_with_lora(lora, slots, x, product))])
    x = torch.randn(64, SHAPE[1])
    gemm.asked.clear()
    assert torch.equal(gemm.linear(x, weight), linear(x, weight))
    assert not gemm.asked, "without adapters the usual way was the fastest that is known"
    with gemm.accompanied():
        gemm.linear(x, weight)
        assert gemm.asked == [Tiling(64, 2)]
        with gemm.accompanied(False):
            gemm.linear(x, weight)
        assert len(gemm.asked) == 1
        gemm.linear(torch.randn(64, 64), torch.randn(192, 64))
        assert len(gemm.asked) == 1, "a shape that was not measured"


@pytest.mark.parametrize(("rows", "best"), [(8, Tiling(32, 4)), (64, Tiling(64, 1))])
def test_few_rows_are_summed_as_one_is_where_it_costs_next_to_nothing(
    timed: dict[Any, float], rows: int, best: Tiling
) -> None:
    gemm, (weight, _) = Fake(), layer()
    timed |= {None: 2.0, Tiling(32, 4): 1.0}
    given = (module._tilings(SHAPE, 1), [weight], torch.randn(1, SHAPE[1]))
    gemm._try("linear", *given, lambda w: linear(given[2], w), gemm._skinny)
    timed |= {Tiling(32, 2): 0.99, Tiling(64, 4): 1.0, Tiling(64, 1): 0.99}
    x = torch.randn(rows, SHAPE[1])
    gemm._try(
        "linear",
        module._tilings(SHAPE, rows),
        [weight],
        x,
        lambda w: linear(x, w),
        gemm._skinny,
    )
    gemm.asked.clear()
    gemm.linear(x, weight)
    assert gemm.asked == [best]
