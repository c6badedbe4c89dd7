"""GGUF's storage types against the gguf package: the same weights from the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.quant.blocks import weights_of
from windlass.errors import CheckpointError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Int4Group, Int8Group, Table4
from windlass.kernels.reference_linear import form_bytes
from windlass.models.gguf_header import TENSOR_TYPES
from windlass.quant import gguf_blocks
from windlass.quant.base import Part
from windlass.quant.gguf import KINDS, Gguf
from windlass.quant.gguf_blocks import pack
from windlass.quant.gguf_codebooks import CODEBOOK_KINDS
from windlass.quant.shard import Shard

ROWS, COLUMNS = 7, 512


def random_blocks(name: str) -> np.ndarray:
    return weights_of(name, ROWS, COLUMNS)


def test_every_type_that_a_file_may_have_stays_packed() -> None:
    types = {kind.name for kind in TENSOR_TYPES.values()}
    assert types - {"F32", "F16", "BF16"} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_blocks_dequantise_to_the_same_weights(name: str) -> None:
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
    if name in CODEBOOK_KINDS:
        assert isinstance(form, Table4)
        assert form.scales.dtype == torch.float16
    else:
        assert isinstance(form, Int4Group if KINDS[name].bits <= 4 else Int8Group)
        if isinstance(form, Int8Group):
            assert form.bits == (8 if name == "Q8_0" else 6)
            assert int(form.codes.min()) >= -(2 ** (form.bits - 1))
            assert int(form.codes.max()) < 2 ** (form.bits - 1)


@pytest.mark.parametrize("name", ["Q5_1", "Q3_K", "TQ1_0", "IQ2_XXS", "IQ1_M", "MXFP4"])
def test_rows_parsed_in_slices_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.from_numpy(random_blocks(name))
    whole = pack(blocks, KINDS[name])
    monkeypatch.setattr(gguf_blocks, "_AT_ONCE", 2 * COLUMNS)
    sliced = pack(blocks, KINDS[name])
    assert torch.equal(sliced.codes, whole.codes)
    assert torch.equal(sliced.dequantise(), whole.dequantise())


# Bytes of a form for 256 weights: half a byte a weight, scales, and the sub-scales of IQ types.
FORM_BYTES = {
    "IQ2_XXS": 128 + 2 + 8,
    "IQ2_XS": 128 + 2 + 16,
    "IQ2_S": 128 + 2 + 16,
    "IQ3_XXS": 128 + 2 + 8,
    "IQ3_S": 128 + 2 + 8,
    "IQ1_S": 128 + 2 + 8,
    "IQ1_M": 128 + 2 + 16,
    "IQ4_NL": 128 + 16,
    "IQ4_XS": 128 + 2 + 8,
    "MXFP4": 128 + 16,
}


@pytest.mark.parametrize("name", FORM_BYTES)
def test_codebook_forms_take_few_bytes(name: str) -> None:
    form = pack(torch.from_numpy(random_blocks(name)), KINDS[name])
    assert isinstance(form, Table4)
    assert form_bytes(form) - form.table.nbytes == FORM_BYTES[name] * ROWS * COLUMNS // 256


def test_mxfp4_keeps_exponents_that_float16_lacks() -> None:
    blocks = random_blocks("MXFP4").reshape(ROWS, -1, 17)
    blocks[..., 0] = 40
    blocks[2, 3, 0] = 200
    blocks = blocks.reshape(ROWS, -1)
    form = pack(torch.from_numpy(blocks), KINDS["MXFP4"])
    assert form.scales.dtype == torch.float32
    want = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.MXFP4))
    assert torch.equal(form.dequantise(), want)


def test_an_mxfp4_block_of_zeros_may_have_any_exponent() -> None:
    weight = np.random.default_rng(1).normal(0, 0.1, (4, 256)).astype(np.float32)
    weight[1, 32:64] = 0  # stored with exponent 0
    blocks = quantize(weight, GGMLQuantizationType.MXFP4)
    form = pack(torch.from_numpy(blocks), KINDS["MXFP4"])
    assert form.scales.dtype == torch.float16
    want = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.MXFP4))
    assert torch.equal(form.dequantise(), want)


def test_an_mxfp4_exponent_of_255_is_nan() -> None:
    blocks = torch.from_numpy(random_blocks("MXFP4"))
    blocks[3, 17] = 255
    method = Gguf("MXFP4", Linears(torch.device("cpu"), torch.float32))
    with pytest.raises(CheckpointError, match=r"tensor model\.x\.weight: 1 of 112 .* nan"):
        method.form(part("model.x", blocks), (ROWS, COLUMNS))


def part(name: str, blocks: torch.Tensor) -> Part:
    return Part(name, {"weight": blocks}, outputs=Shard(ROWS), inputs=Shard(COLUMNS))


@pytest.mark.parametrize("name", KINDS)
def test_block_sizes_match_the_gguf_package(name: str) -> None:
    kind = KINDS[name]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (kind.values, kind.num_bytes)


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
)
def test_checkpoints_of_the_original_tools_are_read_exactly(name: str) -> None:
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


def test_a_nan_scale_names_the_tensor() -> None:
    blocks = torch.from_numpy(random_blocks("Q4_K"))
    blocks[3, 0:2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    method = Gguf("Q4_K", Linears(torch.device("cpu"), torch.float32))
    with pytest.raises(CheckpointError, match=r"tensor model\.x\.weight: 8 of 112 .* nan"):
        method.form(part("model.x", blocks), (ROWS, COLUMNS))


def test_blocks_of_zeros_are_valid() -> None:
    method = Gguf("Q8_0", Linears(torch.device("cpu"), torch.float32))
    blocks = torch.zeros(2, 34, dtype=torch.uint8)
    form = method.form(part("x", blocks), (2, 32))
    assert form.dequantise().abs().max() == 0
