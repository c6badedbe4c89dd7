"""What is written of a stored adapter: to the bit what the definition says, whoever writes it."""

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
from windlass.lora.base import Low
from windlass.lora.codes import encode
from windlass.lora.packing import Place, array_of, write, write_plain
from windlass.lora.peft import AdapterFolder
from windlass.lora.stored import Array, Stored

Write = Callable[[list[Stored], list[Place]], int | None]
BOTH = pytest.mark.parametrize("call", [write, write_plain])
SHAPES = ((16, 300, 257), (1, 5, 3), (37, 64, 1000), (200, 31, 40))  # rank, inputs, outputs


def random(shape: tuple[int, int, int], dtype: torch.dtype, size: float = 0.02) -> Low:
    rank, num_in, num_out = shape
    generator = torch.Generator().manual_seed(rank)
    down, up = (
        (torch.randn(a, b, generator=generator) * size).to(dtype)
        for a, b in ((rank, num_in), (num_out, rank))
    )
    return Low(down, up)


def place(low: Low, dtype: type, turned: bool) -> Place:
    (num_out, rank), full = low.up.shape, 77
    up = (
        np.full((rank, num_out), full, dtype).T if turned else np.full((num_out, rank), full, dtype)
    )
    scales = np.full(rank, full, np.float32) if dtype is np.int8 else None
    return Place(np.full(low.down.shape, full, dtype), up, scales)


def stored(low: Low, scaling: float) -> Stored:
    return Stored(array_of(low.down), array_of(low.up), scaling)


def check_codes(call: Write, lows: list[Low], scaling: float, turned: bool) -> None:
    places = [place(low, np.int8, turned) for low in lows]
    assert call([stored(low, scaling) for low in lows], places) is None
    for low, found in zip(lows, places, strict=True):
        wanted = encode(Low(low.down, low.up * scaling))
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine is not None
            assert theirs is not None
            assert np.array_equal(mine, theirs.numpy())


@BOTH
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.5, 0.7, math.sqrt(3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_codes_are_those_of_the_definition(
    call: Write, dtype: torch.dtype, scaling: float, turned: bool
) -> None:
    lows = [random(shape, dtype) for shape in SHAPES]
    lows[0].down[3], lows[0].up[:, 5] = 0, 0
    check_codes(call, lows, scaling, turned)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e36])
def test_codes_of_the_smallest_and_largest_numbers(
    call: Write, dtype: torch.dtype, size: float
) -> None:
    check_codes(call, [random(shape, dtype, size) for shape in SHAPES], 0.7, turned=False)


def test_every_bfloat16_of_a_rank_is_rounded_as_if_alone() -> None:
    """All largest numbers of an octave, each beside all numbers below it that are no zeros."""
    bits = torch.arange(0x3F80 - 9 * 128, 0x4000, dtype=torch.int16)
    values = bits.view(torch.bfloat16).float()
    down = torch.where(values <= values[-128:, None], values, 0).bfloat16()
    check_codes(write, [Low(down, torch.cat([down, -down], 1).T.contiguous())], 1.0, turned=False)


@BOTH
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 0.7])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32, torch.float16])
def test_without_codes_numbers_are_rounded_as_torch_rounds(
    call: Write, source: torch.dtype, target: torch.dtype, scaling: float, turned: bool
) -> None:
    lows = [random(shape, source) for shape in SHAPES]
    wanted = [Low(low.down.to(target), (low.up * scaling).to(target)) for low in lows]
    kind = array_of(wanted[0].down).dtype.type
    places = [place(low, kind, turned) for low in lows]
    assert call([stored(low, scaling) for low in lows], places) is None
    for found, low in zip(places, wanted, strict=True):
        assert np.array_equal(found.down, array_of(low.down))
        assert np.array_equal(found.up, array_of(low.up))


@BOTH
@pytest.mark.parametrize("dtype", [np.int8, np.float32])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_the_first_with_numbers_that_are_none_is_told(
    call: Write, bad: float, half: int, dtype: type
) -> None:
    lows = [random(shape, torch.bfloat16) for shape in SHAPES]
    for low in lows[2:]:
        low[half][-1, -1] = bad  # type: ignore[index]
    places = [place(low, dtype, turned=False) for low in lows]
    assert call([stored(low, 1.0) for low in lows], places) == 2


@BOTH
def test_scaling_may_make_numbers_infinite(call: Write) -> None:
    low = random(SHAPES[0], torch.bfloat16, 1e37)
    for scaling, wrong in ((1.0, None), (64.0, 0)):
        assert call([stored(low, scaling)], [place(low, np.int8, turned=False)]) == wrong


def test_here_the_native_call_is_what_is_tested() -> None:
    assert packing.compiled_code() is not None


def test_without_the_native_call_torch_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_CODE", tmp_path / "absent")
    missing = packing.compiled_code.__wrapped__
    assert missing() is None
    monkeypatch.setattr(packing, "compiled_code", missing)
    check_codes(write, [random(shape, torch.bfloat16) for shape in SHAPES], 0.7, turned=True)


def test_a_file_is_mapped(tmp_path: Path) -> None:
    tensors = lora_tensors()
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
    for i, name in enumerate(tensors):
        tensors[name] = tensors[name].to(dtypes[i % 4])
    folder = write_adapter(tmp_path / "a", tensors=tensors, lora_alpha=6)
    found = AdapterFolder(folder, SPEC, 8).stored("a")
    assert found.file == str(folder / "adapter_model.safetensors")
    assert len(found.modules) == 14
    for module, change in found.modules.items():
        key = f"base_model.model.{module}.lora_"
        assert change.scaling == 1.5
        assert np.array_equal(change.down, array_of(tensors[f"{key}A.weight"]))
        assert np.array_equal(change.up, array_of(tensors[f"{key}B.weight"]))


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    whole = file.read_bytes()
    found = AdapterFolder(file.parent, SPEC, 8)
    file.write_bytes(whole[: len(whole) // 2])  # a map of it would end the process
    words = f"was cut off while it was read: {len(whole) // 2} bytes are left"
    with pytest.raises(CheckpointError, match=words):
        found.stored("a")
    file.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        found.stored("a")
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        found.stored("a")


def test_a_copy_of_the_head_is_not_read(tmp_path: Path) -> None:
    tensors = lora_tensors(targets=["lm_head"])
    copy = {"base_model.model.lm_head.base_layer.weight": torch.zeros(97, 64)}
    folder = write_adapter(tmp_path / "a", targets=["lm_head"], tensors=tensors | copy)
    (change,) = AdapterFolder(folder, SPEC, 8).stored("a").modules.values()
    memory = change.down.base
    while memory.base is not None:
        memory = memory.base
    assert memory.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {name: one.int() for name, one in lora_tensors().items()}
    folder = AdapterFolder(write_adapter(tmp_path / "a", tensors=tensors), SPEC, 8)
    for read in (folder.stored, folder.read):
        with pytest.raises(UnsupportedError, match=r"stored as torch.int32; adapters are read"):
            read("a")


def test_types_that_are_not_mapped_are_converted(tmp_path: Path) -> None:
    tensors = {name: one.to(torch.float8_e4m3fn) for name, one in lora_tensors().items()}
    found = AdapterFolder(write_adapter(tmp_path / "a", tensors=tensors), SPEC, 8).stored("a")
    for module, change in found.modules.items():
        wanted: Array = tensors[f"base_model.model.{module}.lora_A.weight"].float().numpy()
        assert np.array_equal(change.down, wanted)


@pytest.mark.parametrize("kind", [np.float32, np.int8])
@pytest.mark.parametrize("which", ["down", "up"])
def test_numbers_that_are_too_large_once_rounded_are_found(kind: type, which: str) -> None:
    fine = random(SHAPES[0], torch.float64)
    large = fine._replace(**{which: getattr(fine, which) * 1e300})
    places = [place(fine, kind, False) for _ in range(2)]
    assert write([stored(fine, 1.0), stored(large, 1.0)], places) == 1


def test_a_machine_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.write_plain(tmp_path / "base")
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(start, "compiled_code", lambda: None)
        options = {"load_format": "dummy", "num_blocks": 64, "enable_lora": True}
        llm = LLM(str(model), device="cpu", **options)
        (choice,) = [choice for choice in llm.report.choices if choice.what == "adapters"]
        assert ("no compiler here" in choice.reason) is missing
