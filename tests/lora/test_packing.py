"""Packing of stored adapters: native and torch code equal the reference bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lora.folders import SPEC, lora_tensors, write_adapter
from tests.quant import folders
from windlass import LLM
from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora import packing, start
from windlass.lora.base import LoraWeights
from windlass.lora.codes import quantise
from windlass.lora.modules import AdaptedModules
from windlass.lora.packing import Target, to_array, write, write_reference
from windlass.lora.peft import AdapterFolder
from windlass.lora.stored import Array, StoredWeights

Write = Callable[[list[StoredWeights], list[Target]], int | None]
BOTH = pytest.mark.parametrize("call", [write, write_reference])
SHAPES = ((16, 300, 257), (1, 5, 3), (37, 64, 1000), (200, 31, 40))  # rank, inputs, outputs


def random(shape: tuple[int, int, int], dtype: torch.dtype, size: float = 0.02) -> LoraWeights:
    rank, num_in, num_out = shape
    generator = torch.Generator().manual_seed(rank)
    down, up = (
        (torch.randn(a, b, generator=generator) * size).to(dtype)
        for a, b in ((rank, num_in), (num_out, rank))
    )
    return LoraWeights(down, up)


def make_target(weights: LoraWeights, dtype: type, transposed: bool) -> Target:
    (num_out, rank), full = weights.up.shape, 77
    up = (
        np.full((rank, num_out), full, dtype).T
        if transposed
        else np.full((num_out, rank), full, dtype)
    )
    scales = np.full(rank, full, np.float32) if dtype is np.int8 else None
    return Target(np.full(weights.down.shape, full, dtype), up, scales)


def stored(weights: LoraWeights, scaling: float) -> StoredWeights:
    return StoredWeights(to_array(weights.down), to_array(weights.up), scaling)


def check_codes(call: Write, modules: list[LoraWeights], scaling: float, transposed: bool) -> None:
    targets = [make_target(weights, np.int8, transposed) for weights in modules]
    assert call([stored(weights, scaling) for weights in modules], targets) is None
    for weights, found in zip(modules, targets, strict=True):
        expected = quantise(LoraWeights(weights.down, weights.up * scaling))
        for array, tensor in zip(found, expected, strict=True):
            assert array is not None
            assert tensor is not None
            assert np.array_equal(array, tensor.numpy())


@BOTH
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.5, 0.7, math.sqrt(3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_codes_equal_the_reference(
    call: Write, dtype: torch.dtype, scaling: float, transposed: bool
) -> None:
    modules = [random(shape, dtype) for shape in SHAPES]
    modules[0].down[3], modules[0].up[:, 5] = 0, 0
    check_codes(call, modules, scaling, transposed)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e36])
def test_codes_of_extreme_magnitudes(call: Write, dtype: torch.dtype, size: float) -> None:
    check_codes(call, [random(shape, dtype, size) for shape in SHAPES], 0.7, transposed=False)


def test_every_bfloat16_value_is_quantised_exactly() -> None:
    """Each maximum of one octave, with all smaller nonzero values in the same rank."""
    bits = torch.arange(0x3F80 - 9 * 128, 0x4000, dtype=torch.int16)
    values = bits.view(torch.bfloat16).float()
    down = torch.where(values <= values[-128:, None], values, 0).bfloat16()
    check_codes(
        write,
        [LoraWeights(down, torch.cat([down, -down], 1).T.contiguous())],
        1.0,
        transposed=False,
    )


@BOTH
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 0.7])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32, torch.float16])
def test_dtype_conversion_rounds_as_torch(
    call: Write, source: torch.dtype, target: torch.dtype, scaling: float, transposed: bool
) -> None:
    modules = [random(shape, source) for shape in SHAPES]
    expected = [
        LoraWeights(weights.down.to(target), (weights.up * scaling).to(target))
        for weights in modules
    ]
    kind = to_array(expected[0].down).dtype.type
    targets = [make_target(weights, kind, transposed) for weights in modules]
    assert call([stored(weights, scaling) for weights in modules], targets) is None
    for found, weights in zip(targets, expected, strict=True):
        assert np.array_equal(found.down, to_array(weights.down))
        assert np.array_equal(found.up, to_array(weights.up))


@BOTH
@pytest.mark.parametrize("dtype", [np.int8, np.float32])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_first_non_finite_module_is_reported(
    call: Write, bad: float, half: int, dtype: type
) -> None:
    modules = [random(shape, torch.bfloat16) for shape in SHAPES]
    for weights in modules[2:]:
        weights[half][-1, -1] = bad  # type: ignore[index]
    targets = [make_target(weights, dtype, transposed=False) for weights in modules]
    assert call([stored(weights, 1.0) for weights in modules], targets) == 2


@BOTH
def test_overflow_by_scaling_is_detected(call: Write) -> None:
    weights = random(SHAPES[0], torch.bfloat16, 1e37)
    for scaling, wrong in ((1.0, None), (64.0, 0)):
        assert (
            call([stored(weights, scaling)], [make_target(weights, np.int8, transposed=False)])
            == wrong
        )


def test_native_code_is_available() -> None:
    assert packing.compiled_code() is not None


def test_torch_fallback_without_native_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SOURCES", tmp_path / "absent")
    missing = packing.compiled_code.__wrapped__
    assert missing() is None
    monkeypatch.setattr(packing, "compiled_code", missing)
    check_codes(write, [random(shape, torch.bfloat16) for shape in SHAPES], 0.7, transposed=True)


def test_stored_arrays_equal_the_file(tmp_path: Path) -> None:
    tensors = lora_tensors()
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
    for i, name in enumerate(tensors):
        tensors[name] = tensors[name].to(dtypes[i % 4])
    folder = write_adapter(tmp_path / "a", tensors=tensors, lora_alpha=6)
    found = AdapterFolder(folder, AdaptedModules(SPEC), 8).stored("a")
    assert found.file == str(folder / "adapter_model.safetensors")
    assert len(found.modules) == 14
    for module, change in found.modules.items():
        key = f"base_model.model.{module}.lora_"
        assert change.scaling == 1.5
        assert np.array_equal(change.down, to_array(tensors[f"{key}A.weight"]))
        assert np.array_equal(change.up, to_array(tensors[f"{key}B.weight"]))


def test_file_changed_during_read_is_rejected(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    whole = file.read_bytes()
    found = AdapterFolder(file.parent, AdaptedModules(SPEC), 8)
    file.write_bytes(whole[: len(whole) // 2])  # access to a mapping would kill the process
    words = f"was truncated while it was read: {len(whole) // 2} bytes are left"
    with pytest.raises(CheckpointError, match=words):
        found.stored("a")
    file.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        found.stored("a")
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        found.stored("a")


def test_copy_of_the_base_head_is_not_read(tmp_path: Path) -> None:
    tensors = lora_tensors(targets=["lm_head"])
    copy = {"base_model.model.lm_head.base_layer.weight": torch.zeros(97, 64)}
    folder = write_adapter(tmp_path / "a", targets=["lm_head"], tensors=tensors | copy)
    (change,) = AdapterFolder(folder, AdaptedModules(SPEC), 8).stored("a").modules.values()
    memory = change.down.base
    while memory.base is not None:
        memory = memory.base
    assert memory.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_integer_weights_are_rejected(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {name: one.int() for name, one in lora_tensors().items()}
    folder = AdapterFolder(write_adapter(tmp_path / "a", tensors=tensors), AdaptedModules(SPEC), 8)
    for read in (folder.stored, folder.read):
        with pytest.raises(UnsupportedError, match=r"stored as i32; adapter weights must"):
            read("a")


def test_other_float_types_are_converted(tmp_path: Path) -> None:
    tensors = {name: one.to(torch.float8_e4m3fn) for name, one in lora_tensors().items()}
    found = AdapterFolder(
        write_adapter(tmp_path / "a", tensors=tensors), AdaptedModules(SPEC), 8
    ).stored("a")
    for module, change in found.modules.items():
        expected: Array = tensors[f"base_model.model.{module}.lora_A.weight"].float().numpy()
        assert np.array_equal(change.down, expected)


@pytest.mark.parametrize("kind", [np.float32, np.int8])
@pytest.mark.parametrize("which", ["down", "up"])
def test_overflow_by_conversion_is_detected(kind: type, which: str) -> None:
    fine = random(SHAPES[0], torch.float64)
    large = fine._replace(**{which: getattr(fine, which) * 1e300})
    targets = [make_target(fine, kind, False) for _ in range(2)]
    assert write([stored(fine, 1.0), stored(large, 1.0)], targets) == 1


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folders.write_plain(tmp_path / "base")
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(start, "compiled_code", lambda: None)
        options = {"load_format": "dummy", "num_blocks": 64, "enable_lora": True}
        llm = LLM(str(model), device="cpu", **options)
        (choice,) = [choice for choice in llm.report.choices if choice.what == "adapters"]
        assert ("no compiler" in choice.reason) is missing
