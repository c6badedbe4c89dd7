"""Reading a region of a tensor touches no more of the memory-mapped file than the region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.tiny import Type, write_gguf
from tests.quant.blocks import weights_of
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.quant.shard import Region

ROWS, COLUMNS = 16, 1024
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0
NAME = "model.layers.0.mlp.down_proj.weight"
REGIONS = {
    "rows": (slice(4, 8), slice(None)),
    "columns": (slice(None), slice(COLUMNS // 4, COLUMNS // 2)),
    "both": (slice(4, 12), slice(COLUMNS // 2, COLUMNS)),
}


def gguf_file(path: Path, kind: Type) -> GGUFCheckpoint:
    tensors = {"blk.0.ffn_down.weight": weights_of(kind.name, ROWS, COLUMNS)}
    return GGUFCheckpoint(write_gguf(path / "m.gguf", "qwen2", kind, tensors))


def assert_is_view(part: Tensor, whole: Tensor, region: Region) -> None:
    """The part has the region's values and lies where they are in the whole tensor's memory."""
    expected = whole[region]
    assert torch.equal(part, expected)
    assert (part.data_ptr(), part.stride()) == (expected.data_ptr(), expected.stride())


@pytest.mark.parametrize("stored", [(ROWS, COLUMNS), (ROWS * COLUMNS, 1)], ids=["matrix", "flat"])
@pytest.mark.parametrize("name", REGIONS)
def test_safetensors_regions_are_views(name: str, stored: tuple[int, ...], tmp_path: Path) -> None:
    file, shape = tmp_path / "x.safetensors", (ROWS, COLUMNS)
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int32)
    save_file({NAME: values.view(stored)}, file)
    checkpoint = SafetensorsCheckpoint([file])
    whole = checkpoint.read(NAME, shape)
    assert torch.equal(whole, values.view(shape))
    assert_is_view(checkpoint.read(NAME, shape, REGIONS[name]), whole, REGIONS[name])


@pytest.mark.parametrize("name", REGIONS)
def test_gguf_regions_of_bytes_are_views(name: str, tmp_path: Path) -> None:
    rows, columns = REGIONS[name]
    start, stop, _ = columns.indices(COLUMNS)
    region = (rows, slice(start // BLOCK * BLOCK_BYTES, stop // BLOCK * BLOCK_BYTES))
    checkpoint, shape = gguf_file(tmp_path, Type.Q8_0), (ROWS, COLUMNS // BLOCK * BLOCK_BYTES)
    whole = checkpoint.read(NAME, shape, raw=True)
    assert_is_view(checkpoint.read(NAME, shape, region, raw=True), whole, region)


@pytest.mark.parametrize("name", REGIONS)
def test_only_blocks_of_the_region_are_dequantised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, shape = gguf_file(tmp_path, Type.Q8_0), (ROWS, COLUMNS)
    whole = checkpoint.read(NAME, shape)
    dequantize, num_bytes = gguf.quants.dequantize, []

    def spy(blocks: np.ndarray, kind: Any) -> np.ndarray:
        num_bytes.append(blocks.nbytes)
        return dequantize(blocks, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", spy)
    part = checkpoint.read(NAME, shape, REGIONS[name])
    assert torch.equal(part, whole[REGIONS[name]])
    assert num_bytes == [part.numel() // BLOCK * BLOCK_BYTES]


def test_dequantised_values_are_cut_within_a_block(tmp_path: Path) -> None:
    checkpoint = gguf_file(tmp_path, Type.Q4_K)
    whole = checkpoint.read(NAME, (ROWS, COLUMNS))
    region = (slice(3, 5), slice(100, 777))
    assert torch.equal(checkpoint.read(NAME, (ROWS, COLUMNS), region), whole[region])
