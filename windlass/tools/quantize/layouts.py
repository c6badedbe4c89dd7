"""Packs quantised weights into the layouts of compressed-tensors, GPTQ, AWQ and bitsandbytes.

checkpoint_files.py writes the matching config.json.
"""

from __future__ import annotations

import json
from math import gcd

import torch
from torch import Tensor

from windlass.tools.quantize.weights import Float8Weight, IntWeight, TableWeight

# Order of the eight outputs in a word of AWQ's layout.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers [rows, C] densely into int32 [rows, C * bits / 32], the first in the lowest bits."""
    unit = 32 // gcd(32, bits)
    split = codes.long().unflatten(1, (-1, unit))
    starts = torch.arange(unit, device=codes.device) * bits
    words = []
    for word in range(bits * unit // 32):
        shift = starts - 32 * word
        here = (shift > -bits) & (shift < 32)
        parts, shift = split[..., here], shift[here]
        moved = (parts << shift.clamp(min=0)) >> (-shift).clamp(min=0)
        words.append((moved & 0xFFFFFFFF).sum(-1))
    whole = torch.stack(words, dim=-1).flatten(1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def compressed_packed(weight: IntWeight, symmetric: bool, stored: torch.dtype) -> dict[str, Tensor]:
    """compressed-tensors, pack-quantized: weight-only."""
    tensors = {
        "weight_packed": pack(weight.codes, weight.bits),
        "weight_scale": weight.scales.to(stored),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(weight.zeros.T, weight.bits).T
    return tensors


def compressed_int8(weight: IntWeight, stored: torch.dtype) -> dict[str, Tensor]:
    """compressed-tensors, int-quantized: signed integers."""
    signed = (weight.codes.to(torch.int16) - 128).to(torch.int8)
    return {"weight": signed, "weight_scale": weight.scales.to(stored)}


def compressed_float8(weight: Float8Weight, stored: torch.dtype) -> dict[str, Tensor]:
    """compressed-tensors, float-quantized."""
    return {"weight": weight.codes, "weight_scale": weight.scales.to(stored)}


def gptq_layout(weight: IntWeight) -> dict[str, Tensor]:
    """GPTQ's first version, which every reader knows: zero points are stored minus one."""
    return {
        "qweight": pack(weight.codes, weight.bits).T,
        "qzeros": pack(weight.zeros.T.long() - 1, weight.bits),
        "scales": weight.scales.T.to(torch.float16),
        "g_idx": weight.groups,
    }


def awq_layout(weight: IntWeight) -> dict[str, Tensor]:
    """AWQ's gemm version: 4 bits, packed along outputs."""
    return {
        "qweight": pack(_interleaved(weight.codes.T), 4),
        "qzeros": pack(_interleaved(weight.zeros.T), 4),
        "scales": weight.scales.T.to(torch.float16),
    }


def _interleaved(values: Tensor) -> Tensor:
    return values.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)


def bitsandbytes_layout(weight: TableWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """bitsandbytes' NF4: the first of two weights is in the upper half of a byte."""
    codes = weight.codes.flatten()
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.codes.shape),
    }
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "weight": ((codes[0::2] << 4) | codes[1::2])[:, None],
        "weight.absmax": weight.scales.flatten(),
        "weight.quant_map": weight.table,
        "weight.quant_state.bitsandbytes__nf4": text,
    }
