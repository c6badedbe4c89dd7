"""GGUF's storage types against the gguf package: the same weights from the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from windlass.errors import CheckpointError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Int4Group, Int8Group
from windlass.quant.base import Part
from windlass.quant.gguf import Gguf
from windlass.quant.gguf_blocks import KINDS, pack

ROWS, COLUMNS = 7, 512
# Where a block keeps its float16 scales: bytes that must be a sensible number.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str) -> np.ndarray:
    """Any bytes are a block, but for the scales."""
    kind, random = KINDS[name], np.random.default_rng(3)
    blocks = random.integers(0, 256, (ROWS, COLUMNS // kind.values, kind.num_bytes), np.uint8)
    for at in SCALES_AT[name]:
        scales = random.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_stand_for_the_same_weights(name: str) -> None:
    blocks = random_blocks(name)
    form = pack(torch.from_numpy(blocks), KINDS[name])
    want = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[name]))
    got = form.dequantise()
    if name.endswith("_K"):
        # A scale that is a product of two is rounded to float16 once: 2^-11 of it at most.
        most = 2**-11 * (form.scales.float().abs().max() * 128 + want.abs().max())
        assert (got - want).abs().max() <= most
    else:
        assert torch.equal(got, want)
    assert form.group == KINDS[name].group
    assert isinstance(form, Int4Group if KINDS[name].bits <= 4 else Int8Group)


@pytest.mark.parametrize("name", KINDS)
def test_sizes_are_the_gguf_packages(name: str) -> None:
    kind = KINDS[name]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (kind.values, kind.num_bytes)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_its_own_tool_quantised_is_read_exactly(name: str) -> None:
    weight = np.random.default_rng(1).normal(0, 0.1, (16, 256)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    blocks = quantize(weight, kind)
    form = pack(torch.from_numpy(blocks), KINDS[name])
    assert torch.equal(form.dequantise(), torch.from_numpy(dequantize(blocks, kind)))


@pytest.mark.parametrize("name", KINDS)
def test_an_outline_has_the_sizes_of_the_form(name: str) -> None:
    method = Gguf(name, Linears(torch.device("cpu"), torch.float32))
    outline = method.outline(ROWS, COLUMNS)
    form = pack(torch.from_numpy(random_blocks(name)), KINDS[name])
    assert type(outline) is type(form)
    assert (outline.shape, outline.group) == (form.shape, form.group)
    assert (outline.codes.dtype, outline.scales.dtype) == (form.codes.dtype, form.scales.dtype)


def test_a_scale_that_is_no_number_is_an_error_with_the_tensors_name() -> None:
    blocks = torch.from_numpy(random_blocks("Q4_K"))
    blocks[3, 0:2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    method = Gguf("Q4_K", Linears(torch.device("cpu"), torch.float32))
    with pytest.raises(CheckpointError, match=r"tensor model\.x\.weight: 8 of 112 .* nan"):
        method.form(Part("model.x", {"weight": blocks}), (ROWS, COLUMNS))


def test_zero_blocks_are_fine() -> None:
    method = Gguf("Q8_0", Linears(torch.device("cpu"), torch.float32))
    blocks = torch.zeros(2, 34, dtype=torch.uint8)
    form = method.form(Part("x", {"weight": blocks}), (2, 32))
    assert form.dequantise().abs().max() == 0
