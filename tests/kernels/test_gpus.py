"""What GPUs lack: kernels that need it are not chosen, with a reason, and stages fit the shared memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tests.quant.test_linears import weight
from windlass.errors import ConfigError
from windlass.kernels.batch import Heads
from windlass.kernels.copied import CopiedGemm
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.gemm_io import InputQuant
from windlass.kernels.gpu import MEASURED, Gpu, gpu_of
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Int4Group, Int8Group
from windlass.kernels.reference_linear import Unpacked
from windlass.kernels.select import Need, select
from windlass.kernels.triton import grouped_linear, lora, pdl
from windlass.kernels.triton.eight_bit import EightBitLinear
from windlass.kernels.triton.fit import Fitted
from windlass.kernels.triton.grouped_linear import GroupedLinear
from windlass.quant.rounding import SCHEMES, quantise

CUDA, ROCM = torch.device("cuda"), Gpu((9, 4), is_rocm=True)


class Kernel:
    """Needs 40 bytes of shared memory per stage."""

    __name__ = "some_kernel"

    def __init__(self, limit: int, lacking: str = "shared memory") -> None:
        self.limit, self.lacking = limit, lacking
        self.launched: list[dict[str, Any]] = []
        self.num_tries = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: object, num_stages: int, **options: Any) -> None:
        self.num_tries += 1
        if 40 * num_stages > self.limit:
            raise OutOfResources(40 * num_stages, self.limit, self.lacking)
        self.launched.append({"args": args, "num_stages": num_stages, **options})


def test_stages_fit_the_shared_memory() -> None:
    kernel = Kernel(100)
    fitted = Fitted(kernel)
    fitted[1,]("x", ROWS=16, STAGES=4, num_stages=4)
    assert kernel.launched[-1] == {"args": ("x",), "num_stages": 2, "ROWS": 16, "STAGES": 2}
    assert kernel.num_tries == 3
    fitted[1,]("x", ROWS=16, STAGES=4, num_stages=4)
    assert kernel.num_tries == 4  # the stages are remembered
    fitted[1,]("x", ROWS=16, num_stages=1)
    assert kernel.launched[-1]["num_stages"] == 1
    large = Kernel(230)
    Fitted(large)[1,](num_stages=4)
    assert large.launched == [{"args": (), "num_stages": 4}]


def test_a_kernel_that_never_fits_says_so() -> None:
    with pytest.raises(ConfigError, match=r"some_kernel needs 40 bytes .* has 30") as error:
        Fitted(Kernel(30))[1,](num_stages=4)
    assert "--plain-kernels" in str(error.value)


def test_other_resources_are_not_a_matter_of_stages() -> None:
    kernel = Kernel(30, "threads")
    with pytest.raises(OutOfResources, match="threads"):
        Fitted(kernel)[1,](num_stages=4)
    assert kernel.num_tries == 1


def test_gpus_before_ampere_have_no_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, (7, 5))
    chosen = select("attention", Need(CUDA, torch.float16, Heads(8, 2, 64)))
    assert chosen.name == "torch"
    assert "need compute capability 8.0, this is a GPU of compute capability 7.5" in chosen.reason
    decision = Linears(CUDA, torch.float16).decide(quantise(weight(), SCHEMES["w8a8"]))
    assert decision.kernel.name == "plain"
    assert "need compute capability 8.0" in decision.reason


def test_fp8_in_blocks_is_refused_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    form = quantise(weight(), SCHEMES["fp8-block"])
    _pretend(monkeypatch, (8, 6))
    why = EightBitLinear().refuse(form, CUDA, torch.bfloat16)
    assert (
        why
        == "fp8 tensor cores need compute capability 8.9, this is a GPU of compute capability 8.6"
    )
    _pretend(monkeypatch, (8, 9))
    assert EightBitLinear().refuse(form, CUDA, torch.bfloat16) is None
    _pretend(monkeypatch, (9, 4), hip="6.4")
    assert "NVIDIA" in str(EightBitLinear().refuse(form, CUDA, torch.bfloat16))


def test_int4_says_which_variants_a_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    form = quantise(torch.randn(64, 256), SCHEMES["int4"])
    for gpu, why in ((Gpu((8, 0)), "8.0"), (Gpu((10, 0)), "10.0"), (ROCM, "ROCm")):
        monkeypatch.setattr(grouped_linear, "gpu_of", lambda _, gpu=gpu: gpu)
        monkeypatch.setattr(
            grouped_linear.Int4HopperGemm, "refuse", lambda *_, gpu=gpu: gpu.lacks_warpgroups()
        )
        lacks = GroupedLinear().prepare(form).lacks
        assert lacks is not None
        assert lacks.startswith("weights are dequantised for more than 64 rows: warpgroup_mma")
        assert why in lacks


def test_w4a8_keeps_16_bit_activations_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(quantise(torch.randn(64, 256), SCHEMES["int4"]), activation="token")
    prepared = GroupedLinear().prepare(form)
    assert prepared.input_quant(100) is not None
    assert prepared.lacks is None
    monkeypatch.setattr(grouped_linear, "gpu_of", lambda _: Gpu((8, 0)))
    prepared = GroupedLinear().prepare(form)
    assert prepared.input_quant(100) is None
    assert "16-bit activations for more than 64 rows: fp8 tensor cores need" in str(prepared.lacks)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_grouped_gemms_want_planes_for_few_rows(scheme: str) -> None:
    form = quantise(torch.randn(64, 512), SCHEMES[scheme])
    assert isinstance(form, Int4Group | Int8Group)
    gemm = GroupedLinear().prepare(form)
    wanted = InputQuant("planes", min(2 * form.group, 256), min(form.group, 256))
    assert [gemm.input_quant(rows) for rows in (1, 16, 17, 64, 65)] == [*[wanted] * 4, None]
    permuted = GroupedLinear().prepare(replace(form, perm=torch.randperm(512)))
    assert permuted.input_quant(1) is None
    copied = CopiedGemm(gemm, Unpacked(form, torch.bfloat16, TorchGemm()))
    assert [copied.input_quant(rows) for rows in (64, 65)] == [wanted, None]


def test_the_hopper_gemm_wants_16_bit_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = GroupedLinear().prepare(quantise(torch.randn(64, 512), SCHEMES["int4"]))
    hopper = SimpleNamespace(plan=lambda rows: ("wide",) if rows > 32 else ())
    monkeypatch.setattr(gemm, "_hopper", hopper)
    assert [gemm.input_quant(rows) is None for rows in (16, 17, 32, 33, 64)] == [
        *[False] * 3,
        *[True] * 2,
    ]


def test_a_rocm_device_gets_no_nvidia_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, (9, 4), hip="6.4")
    assert gpu_of(CUDA) == ROCM
    pdl.options.cache_clear()
    lora._has_ptx.cache_clear()
    try:
        assert pdl.options() == {"PDL": False}
        assert not lora._has_ptx(CUDA)
    finally:
        pdl.options.cache_clear()
        lora._has_ptx.cache_clear()
    assert ROCM.lacks_triton() is None


def test_a_machine_without_a_gpu_plans_for_the_measured_one() -> None:
    assert gpu_of(torch.device("cpu")) == MEASURED


def _pretend(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None = None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
