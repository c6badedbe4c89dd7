"""Kernels that are compiled in parallel before their first launch, for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from windlass.errors import EngineError
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, StepBatch
from windlass.kernels.compile_only import is_compiling
from windlass.kernels.gemm_io import UnscaledOutputs
from windlass.kernels.triton import gemm, skinny
from windlass.kernels.triton.attention import attend
from windlass.kernels.triton.attention_kernels import paged_decode_kernel
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.gemm import TunedGemm
from windlass.kernels.triton.precompile import (
    compiling,
    counted,
    only_compiling,
)
from windlass.kernels.triton.rope import rope_write_kernel
from windlass.kernels.triton.skinny import Tiling
from windlass.runner.cuda import start_steps
from windlass.runner.cuda.graphs import AtStart, CudaBackend
from windlass.runner.cuda.start_steps import StartSteps, StepTimes
from windlass.runner.warmup import WarmUp


class Hopper:
    """A driver that can compile, but neither load nor launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", Hopper())
    kernel = skinny.skinny_linear_kernel
    kernel.device_caches.clear()
    yield
    kernel.device_caches.clear()


@pytest.mark.usefixtures("hopper")
def test_launches_only_compile_and_a_later_start_finds_the_kernels() -> None:
    x, weight = torch.randn(1, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    tilings = [Tiling(16, stages=2), Tiling(16, 2, 2)]
    space = skinny.Workspace(x.device, 64, tilings, tilings)
    with counted() as counts, compiling():
        for tiling in (*tilings, tilings[0]):
            skinny.linear(x, weight, tiling, space)
    assert counts == {"compiled": 2}
    kernels = skinny.skinny_linear_kernel.device_caches[0][0]
    assert sorted(each.metadata.num_stages for each in kernels.values()) == [2, 2]
    with counted() as counts, compiling():
        skinny.linear(x, weight, tilings[0], space)
    assert counts == {}  # of this process
    skinny.skinny_linear_kernel.device_caches.clear()
    with counted() as counts, compiling():
        skinny.linear(x, weight, tilings[0], space)
    assert counts == {"found": 1}
    assert not is_compiling()


@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_does_not_compile_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(1, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    tiling = Tiling(16, stages=2)
    space = skinny.Workspace(x.device, 64, [tiling], [tiling])

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("triton.backends.nvidia.compiler.CUDABackend.make_cubin", fail)
    with counted(), compiling():
        skinny.linear(x, weight, tiling, space)
    (record,) = caplog.records
    assert "not compiled before its first launch: OSError('no space left')" in record.message


@pytest.mark.usefixtures("hopper")
def test_whole_steps_only_compile() -> None:
    x, weight = torch.randn(1, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    tiling = Tiling(16, stages=2)
    space = skinny.Workspace(x.device, 64, [tiling], [tiling])
    with counted() as counts, only_compiling():
        found = skinny.linear(x, weight, tiling, space)
        assert not torch.empty(3, dtype=torch.int32).any()
        assert not found.new_empty((2, 2)).any()
        assert is_compiling()
    assert counts == {"compiled": 1}
    assert not found.any()
    assert not is_compiling()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("width", "kernels"), [(1, 1), (4, 1), (17, 2)])
def test_decode_attention_is_one_kernel_and_compiled_with_whole_steps(
    codes: torch.dtype | None, width: int, kernels: int
) -> None:
    """Rows of more than 16 tokens need another kernel that rotates and writes keys."""
    heads, indices = Heads(4, 2, 64), torch.arange(width, dtype=torch.int32)
    for kernel in (paged_decode_kernel, rope_write_kernel):
        kernel.device_caches.clear()
    pages = torch.zeros((2, 3, 2, 16, 64), dtype=codes or torch.bfloat16)
    scales = torch.ones((2, 3, 2, 16)) if codes is not None else (None, None)
    work = AttentionWork(
        singles=indices,
        tiles=torch.empty((0, 5), dtype=torch.int32),
        splits=2,
        counters=torch.zeros(2 * width, dtype=torch.int32),
        width=width,
    )
    batch = StepBatch(
        positions=indices,
        token_slots=torch.zeros_like(indices),
        tables=torch.zeros((1, 1, 2), dtype=torch.int32),
        spans=[],
        kv=[],
        work=work,
    )
    values = torch.zeros((width, 8 * 64)).bfloat16()
    qkv = UnscaledOutputs(values, torch.ones(width, 1), torch.ones(8 * 64))
    with counted() as counts, only_compiling():
        attend(
            *(qkv, heads, RopeOptions(torch.zeros(32, 64)), LayerKV(*pages, *scales), batch),
            AttentionOptions(0.1),
        )
    assert counts == {"compiled": kernels}


class Steps:
    """A builder's steps: the first launches one kernel, the others launch another."""

    def __init__(self) -> None:
        self.x, self.weight = torch.randn(1, 128).bfloat16(), torch.randn(64, 128).bfloat16()
        self.tilings = [Tiling(16, stages=2), Tiling(16, 2, 2)]
        self.space = skinny.Workspace(self.x.device, 64, self.tilings, self.tilings)
        self.ran: list[tuple[int, bool]] = []  # plan, and whether it was only compiled

    def run(self, plan: int) -> None:
        self.ran.append((plan, is_compiling()))
        skinny.linear(self.x, self.weight, self.tilings[min(plan, 1)], self.space)


@pytest.mark.usefixtures("hopper")
def test_a_cold_start_compiles_all_steps_at_once_and_a_warm_one_looks_at_one_step() -> None:
    steps = Steps()

    def make(at_start: AtStart | None) -> Any:
        if at_start is not None:
            steps.run(3)
        return steps

    found = WarmUp(2, [0, 1], "cached")  # type: ignore[arg-type,list-item]
    start = StartSteps(make, found, device=torch.device("cpu"), num_ranks=1, captures=True)
    every = [(plan, True) for plan in range(4)]
    with counted() as counts:
        start.compile()
    assert steps.ran == every
    assert counts == {"compiled": 2}
    steps.ran.clear()
    skinny.skinny_linear_kernel.device_caches.clear()  # a later process
    with counted() as counts:
        start.compile()
    assert steps.ran == every[:1]
    assert counts == {"found": 1}
    steps.ran.clear()
    start.compile()  # a second engine of the process
    assert steps.ran == every[:1]


class Plan(str):
    num_tokens = 700


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_longest_step_of_a_start_is_only_allocated(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """With several ranks it computes, since their collectives would wait."""
    found: Any = WarmUp(Plan("largest"), [Plan("a variant")], Plan("cached"))  # type: ignore[arg-type,list-item]
    ran: list[tuple[str, bool]] = []
    allocated = {"largest": 700, "a variant": 200, "cached": 900}
    runner = SimpleNamespace(run=lambda plan: ran.append((plan, is_compiling())))

    def timed(runner: Any, plan: str) -> tuple[float, float]:
        runner.run(plan)
        return 0.01, 0.5

    monkeypatch.setattr(start_steps, "timed", timed)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(
        cuda, "max_memory_allocated", lambda _: 100 + max(allocated[plan] for plan, _ in ran)
    )
    device: Any = "cuda"
    steps = StartSteps(
        lambda _: runner,  # type: ignore[arg-type,return-value]
        found,
        device=device,
        num_ranks=num_ranks,
        captures=True,
    )
    activations, times = steps.run_largest(lambda: None)
    assert activations == 900
    expected = [("largest", False), ("a variant", False), ("cached", num_ranks == 1)]
    if num_ranks == 1:
        expected.append(("a variant", False))  # how long a small step takes to launch
        assert times == StepTimes(launched=0.01, computed=0.5, num_tokens=700)
    else:
        assert times is None
    assert ran == expected


def test_an_error_inside_a_step_that_only_compiles_leaves_launches_as_they_were() -> None:
    launch = JITFunction.run
    with pytest.raises(RuntimeError, match="a fault"), only_compiling():
        raise RuntimeError("a fault")
    assert JITFunction.run is launch


class Recorded(TunedGemm):
    """Records the tilings that are compiled and those that are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[Tiling] = []

    def _skinny(self, x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        if is_compiling():
            self.compiled.append(tiling)
        return torch.nn.functional.linear(x, weight)


def test_all_tilings_are_compiled_before_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, measured = Recorded(), []

    def measure(group: list[Tensor], run: Callable[[Tensor], Any]) -> float:
        assert len(group) == 1
        assert not is_compiling()
        measured.extend(each for each in getattr(run, "args", ()) if isinstance(each, Tiling))
        return 1.0

    monkeypatch.setattr(gemm, "_time", measure)
    # One weight of a shape is an LM head, which has the unfused kernel only.
    tuned.tune([torch.randn(192, 128).bfloat16()])
    assert tuned.compiled == measured
    assert len(measured) > 30


def test_nothing_is_launched_while_compiling() -> None:
    class Kernel:
        def warmup(self, *args: object, **options: Any) -> None:
            tried.append((args, options))

    tried: list[Any] = []
    with compiling():
        fit(Kernel())[1, 2]("x", ROWS=16, num_stages=3)
    assert tried == [(("x",), {"grid": (1, 2), "ROWS": 16, "num_stages": 3})]


def test_graphs_that_are_only_compiled_keep_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    outputs: list[ref[Tensor]] = []

    def compute() -> tuple[Tensor, ...]:
        logits = torch.zeros(4, 9)
        outputs.append(ref(logits))
        return (logits,)

    with compiling():
        replay, _kept = CudaBackend().capture(compute)
    assert [each() for each in outputs] == [None]
    with pytest.raises(EngineError, match="not captured"):
        replay()
