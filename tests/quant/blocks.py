"""Random blocks of every storage type of GGUF: for most types no tool here can quantise to them."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from windlass.quant.gguf import KINDS

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
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
}


def weights_of(name: str, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Blocks whose weights have a standard deviation of about 0.05, as those of models have."""
    sample = dequantize(blocks_of(name, 16, 1024), GGMLQuantizationType[name])
    return blocks_of(name, rows, columns, 0.02 * 0.05 / float(sample.std()), seed)


def blocks_of(name: str, rows: int, columns: int, scale: float = 0.02, seed: int = 3) -> np.ndarray:
    """uint8 [rows, bytes]: any bytes are a block, but for the scales."""
    kind, random = KINDS[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // kind.values, kind.num_bytes), np.uint8)
    scales = random.normal(0, scale, blocks.shape[:2]).astype(np.float16)
    for at in SCALES_AT.get(name, (0,)):
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "IQ1_M":  # the float16 lies in the highest four bits of four words
        words = blocks[..., 48:].view(np.uint16)
        words &= 0x0FFF
        words |= scales[..., None].view(np.uint16) << np.array([12, 8, 4, 0], np.uint16) & 0xF000
    if name == "MXFP4":  # an exponent
        blocks[..., 0] = random.integers(119, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)
