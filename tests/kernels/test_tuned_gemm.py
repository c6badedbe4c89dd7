"""Which GEMM kernel is chosen from measured times. Measuring itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton")

from windlass.kernels import reference
from windlass.kernels.gemm_io import UnnormalisedInputs
from windlass.kernels.lora import Lora, ReferenceLora, Stacks
from windlass.kernels.triton import gemm as module
from windlass.kernels.triton.gemm import TunedGemm, _workspace
from windlass.kernels.triton.gemm_candidates import (
    KINDS,
    KNOWN,
    MEASURED_AT,
    candidates,
    kinds_of,
)
from windlass.kernels.triton.skinny import Tiling, padded
from windlass.kernels.triton.tiling_cache import TilingCache, open_tiling_cache
from windlass.lora.start import _run_with_lora
from windlass.measurement_cache import MeasurementCache

SHAPE = (192, 128)


class FakeTunedGemm(TunedGemm):
    """Records calls of the skinny kernel, which is replaced by torch's linear here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tiling] = []
        self._measured.add(SHAPE)

    def _skinny(self, x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        self.calls.append(tiling)
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
    """FakeTunedGemm times by tiling; None is the default GEMM. Every candidate is computed once."""
    times: dict[Any, float] = {}

    def fake_time(group: list[Tensor], run: Callable[[Tensor], Any]) -> float:
        assert run(group[0]).shape[1] == SHAPE[0]
        args = getattr(run, "args", ())
        return times.get(next((each for each in args if isinstance(each, Tiling)), None), 9.0)

    monkeypatch.setattr(module, "_time", fake_time)
    return times


def test_overlapped_gemm_has_its_own_choice(timed: dict[Any, float]) -> None:
    gemm, (weight, lora) = FakeTunedGemm(), layer()
    slots = torch.tensor([1, 2] * 32, dtype=torch.int32)
    timed |= {None: 2.0, Tiling(64, 2): 1.0}
    gemm.tune_overlapped([(weight, lambda x, run: _run_with_lora(lora, slots, x, run))])
    x = torch.randn(64, SHAPE[1])
    gemm.calls.clear()
    assert torch.equal(gemm.linear(x, weight), linear(x, weight))
    assert not gemm.calls, "without adapters the default GEMM is used"
    with gemm.overlapped():
        gemm.linear(x, weight)
        assert gemm.calls == [Tiling(64, 2)]
        with gemm.overlapped(False):
            gemm.linear(x, weight)
        assert len(gemm.calls) == 1
        gemm.linear(torch.randn(64, 64), torch.randn(192, 64))
        assert len(gemm.calls) == 1, "the shape was not measured"


def test_one_row_reads_whole_rows_of_the_weight(timed: dict[Any, float]) -> None:
    gemm, (weight, _) = FakeTunedGemm(), layer()
    timed |= {None: 2.0, Tiling(32, 4): 0.5, Tiling(4, stages=0): 1.0}
    for rows, best in ((1, [Tiling(4, stages=0)]), (4, [Tiling(32, 4)])):
        x = torch.randn(rows, SHAPE[1])
        gemm._try("linear", [weight], x, partial(linear, x), gemm._skinny)
        gemm.calls.clear()
        gemm.linear(x, weight)
        assert gemm.calls == best
    whole_rows = [Tiling(2, stages=0), Tiling(4, stages=0)]
    assert candidates("linear", (64, 16384), 1) == whole_rows
    assert candidates("gated", (64, 16384), 1) == whole_rows[:1]
    assert not any(each.whole_rows for each in candidates("linear", (64, 16448), 1))


@pytest.mark.parametrize(("took", "normalises"), [(1.8, True), (1.95, False)])
def test_a_gemm_normalises_its_inputs_if_that_is_clearly_faster(
    timed: dict[Any, float], monkeypatch: pytest.MonkeyPatch, took: float, normalises: bool
) -> None:
    gemm, (weight, _) = FakeTunedGemm(), layer()
    residual, gains = torch.randn(1, SHAPE[1]), torch.randn(SHAPE[1])
    x = UnnormalisedInputs(residual, residual.square().sum(1), gains, 1e-5)
    monkeypatch.setattr(module, "rms_norm", reference.rms_norm)
    monkeypatch.setattr(gemm, "_skinny", lambda x, w, _: linear(module._normalised(x), w))
    timed |= {None: 2.0, Tiling(4, stages=0): took}
    gemm._try("norm linear", [weight], x, partial(gemm.linear, x), gemm._skinny)
    assert gemm.takes_unnormalised(weight, 1) == normalises
    assert not gemm.takes_unnormalised(weight, 2)
    want = linear(reference.rms_norm(residual, gains, 1e-5), weight)
    assert torch.equal(gemm.linear(x, weight), want)


def test_a_small_weight_may_measure_slower_and_splits_into_more_programs(
    timed: dict[Any, float],
) -> None:
    gemm, (weight, _) = FakeTunedGemm(), layer()
    timed |= {None: 1.0, Tiling(16, 8): 1.2}
    x = torch.randn(4, SHAPE[1])
    gemm._try("linear", [weight], x, lambda w: linear(x, w), gemm._skinny)
    gemm.calls.clear()
    gemm.linear(x, weight)
    assert gemm.calls == [Tiling(16, 8)]


def test_ranks_take_the_choices_of_the_first_for_shapes_that_it_has() -> None:
    """Shapes that only one of them has are of divided weights, and keep their own choice."""
    common, of_first, of_second = (64, 128), (96, 128), (32, 128)
    barrier, given = Barrier(2), [[], []]
    gemms = []
    for rank, own in enumerate((of_first, of_second)):

        def agree(numbers: list[int], rank: int = rank) -> list[int]:
            given[rank] = numbers
            barrier.wait(10)
            found = list(given[0])
            barrier.wait(10)
            return found

        gemm = TunedGemm(agree)
        gemm._measured = {common, own}
        gemm._chosen = {
            ("linear", common, 1): Tiling(16 << rank, 2, 8),
            ("gated", own, 64): Tiling(64),
        }
        gemms.append(gemm)
    gemms[0]._chosen["deferred norm", common, 4] = Tiling(32, 4, 3)
    gemms[1]._chosen["overlapped", common, 16] = Tiling(16)
    threads = [Thread(target=gemm._adopt) for gemm in gemms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    chosen = {
        ("linear", common, 1): Tiling(16, 2, 8),
        ("deferred norm", common, 4): Tiling(32, 4, 3),
    }
    assert gemms[0]._chosen == {**chosen, ("gated", of_first, 64): Tiling(64)}
    assert gemms[1]._chosen == {**chosen, ("gated", of_second, 64): Tiling(64)}


class CountedGemm(TunedGemm):
    """Counts the shapes that it measures; every shape gets the same choices."""

    def __init__(self, path: Path) -> None:
        super().__init__(cache=TilingCache(MeasurementCache(path)))
        self.num_measured = 0

    def _tune_groups(self, groups: Any) -> None:
        if module.is_compiling():
            return
        self.num_measured += len(groups)
        for group in groups:
            self._chosen |= {
                ("linear", group.shape, 1): Tiling(32, 4, 8),
                ("gated", group.shape, 64): Tiling(64, stages=3),
            }


def test_a_later_start_takes_the_choices_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "gemm" / "gpu.json"
    weights = [torch.zeros(SHAPE).bfloat16(), torch.zeros(64, 128).bfloat16()]
    first = CountedGemm(path)
    assert "measured now" in first.tune(weights)[1]
    assert first.num_measured == 2
    second = CountedGemm(path)
    assert "measured by an earlier start" in second.tune(weights)[1]
    assert second.num_measured == 0
    assert second._chosen == first._chosen
    assert len(first._chosen) == 4
    third = CountedGemm(path)
    third.tune([*weights, torch.zeros(32, 64).bfloat16(), weights[0].half()])
    assert third.num_measured == 2, "a new shape, and another dtype of one"


def test_a_cache_with_unknown_tilings_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "gemm" / "gpu.json"
    weights = [torch.zeros(SHAPE).bfloat16()]
    CountedGemm(path).tune(weights)
    kept = path.read_text()
    for broken in (kept.replace("32, 4, 8", "4096, 4, 8"), kept.replace("32, 4, 8", "[]"), "{"):
        assert broken != kept
        path.write_text(broken)
        gemm = CountedGemm(path)
        gemm.tune(weights)
        assert gemm.num_measured == 1
        assert path.read_text() == kept


def test_the_cache_is_of_one_gpu_and_of_the_kernels_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    names = ["a GPU", "another GPU", "a GPU", "a GPU"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: names.pop(0))
    sources = iter(["1", "1", "1", "2"])
    monkeypatch.setattr("windlass.kernels.triton.tiling_cache._sources", lambda: next(sources))
    paths = [open_tiling_cache(torch.device("cuda"))._file._path for _ in range(4)]
    assert paths[0] == paths[2]
    assert len(set(paths)) == 3


def test_only_kinds_that_a_network_has_are_measured() -> None:
    """Qwen3-0.6B: q, k and v; o; gate and up; down; the head."""
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
    counts = (28, 28, 28, 28, 1)
    kinds = [kinds_of(shape, n, shapes) for shape, n in zip(shapes, counts, strict=True)]
    leaves, takes = ("linear", "deferred norm"), ("linear", "gated", "norm linear", "norm gated")
    assert kinds == [takes, leaves, takes, leaves, ("linear",)]


@pytest.mark.parametrize("rows", MEASURED_AT)
@pytest.mark.parametrize("shape", [(576, 576), (3072, 576), (28672, 4096), (256, 14336)])
def test_candidates_are_known_and_fit_the_workspace(rows: int, shape: tuple[int, int]) -> None:
    space = _workspace(torch.device("meta"))
    for kind in KINDS:
        for tiling in candidates(kind, shape, rows):
            assert tiling in KNOWN
            if tiling.splits > 1:
                assert kind != "gated"
                assert padded(rows) * shape[0] * tiling.splits <= space.partial_sums.numel()
                assert -(-shape[0] // tiling.outputs) <= space.counters.numel()
