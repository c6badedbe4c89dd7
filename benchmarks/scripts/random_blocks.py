"""Random weights in any quantised GGUF type, for types without a quantiser in Python.

Any bytes are valid codes; only the scales must have sensible values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

# Byte offsets of a block's float16 scales. Types that are not listed have one scale at offset 0.
_SCALES_AT: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
}
_SAMPLE = (16, 1024)  # shape of the weights that measure a type's standard deviation
_E8M0_ONE = 128  # exponent of the scale 1, where values are doubled
_MXFP4_SPREAD = 5.0  # of random codes, whose values are 0 to 12 with either sign


def random_blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, spread: float, seed: int = 0
) -> NDArray[Any]:
    """uint8 [rows, bytes]: weights with a standard deviation of about `spread`, and any mean."""
    unit = dequantize(_blocks(kind, *_SAMPLE, scale=1.0, seed=0), kind).std()
    scale = spread if kind.name == "MXFP4" else spread / float(unit)
    return _blocks(kind, rows, columns, scale=scale, seed=seed)


def _blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, *, scale: float, seed: int
) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    values, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // values, num_bytes), np.uint8)
    scales = random.normal(0, scale, blocks.shape[:2]).astype(np.float16)
    for at in _SCALES_AT.get(kind.name, (0,)):
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind.name == "IQ1_M":  # the float16 is in the top four bits of four words
        words = blocks[..., 48:].view(np.uint16)
        words &= 0x0FFF
        words |= scales[..., None].view(np.uint16) << np.array(
            [12, 8, 4, 0], np.uint16
        ) & np.uint16(0xF000)
    if kind.name == "MXFP4":
        middle = _E8M0_ONE + round(math.log2(scale / _MXFP4_SPREAD))
        blocks[..., 0] = random.integers(middle - 2, middle + 2, blocks.shape[:2])
    return blocks.reshape(rows, -1)
