"""Checkpoint layouts, written from their definitions and independent of the package's readers.

Each packer quantises a weight [N, K] and returns the tensors of one module and the dequantised
float32 weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    tensors: dict[str, Tensor]
    weight: Tensor  # the dequantised weight


def _groups_of(num_in: int, group: int, shuffled: int | None) -> np.ndarray:
    """The group of each input; shuffled for act-order."""
    groups = np.arange(num_in) // group
    return groups if shuffled is None else np.random.default_rng(shuffled).permutation(groups)


def _quantise(
    weight: Tensor, bits: int, groups: np.ndarray, lowest_zero: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Codes [N, K], zero points and scales [N, groups], and the dequantised weight."""
    values, most = weight.double().numpy(), 2**bits - 1
    codes = np.zeros(values.shape, np.int64)
    count = groups.max() + 1
    zeros = np.zeros((len(values), count), np.int64)
    scales = np.zeros((len(values), count), np.float16)
    back = np.zeros(values.shape)
    for group in range(count):
        mine = groups == group
        low = np.minimum(values[:, mine].min(1), 0)
        high = np.maximum(values[:, mine].max(1), 0)
        scale = ((high - low) / most).astype(np.float16)
        zero = np.clip(np.round(-low / scale), lowest_zero, most).astype(np.int64)
        code = np.clip(np.round(values[:, mine] / scale[:, None]) + zero[:, None], 0, most)
        codes[:, mine], zeros[:, group], scales[:, group] = code, zero, scale
        back[:, mine] = (code - zero[:, None]) * scale[:, None].astype(np.float64)
    return codes, zeros, scales, torch.from_numpy(back).float()


def _words(numbers: np.ndarray, bits: int) -> Tensor:
    """[count, columns] to int32 [count * bits / 32, columns]: a contiguous bit string, lowest bit first."""
    string = (numbers[:, None, :] >> np.arange(bits)[None, :, None]) & 1
    string = string.reshape(-1, 32, numbers.shape[1]).astype(np.uint64)
    words = (string << np.arange(32, dtype=np.uint64)[None, :, None]).sum(1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def awq(weight: Tensor, group: int) -> Packed:
    codes, zeros, scales, back = _quantise(weight, 4, _groups_of(weight.shape[1], group, None))

    def words(numbers: np.ndarray) -> Tensor:  # [rows, N]
        packed = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return torch.from_numpy(packed.view(np.int32))

    tensors = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return Packed(tensors, back)


def gptq(
    weight: Tensor, bits: int, group: int, *, v2: bool = False, act_order: int | None = None
) -> Packed:
    groups = _groups_of(weight.shape[1], group, act_order)
    codes, zeros, scales, back = _quantise(weight, bits, groups, lowest_zero=0 if v2 else 1)
    tensors = {
        "qweight": _words(codes.T, bits),
        "qzeros": _words(zeros - (0 if v2 else 1), bits).T.contiguous(),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Packed(tensors, back)


def nf4(weight: Tensor, nested: bool) -> Packed:
    table = np.sort(np.concatenate([np.linspace(-1, 1, 15), [0.03]])).astype(np.float32)
    blocks = weight.numpy().reshape(-1, 64)
    absmax = np.abs(blocks).max(1).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    tensors: dict[str, Tensor] = {}
    if nested:
        offset = float(absmax.mean())
        levels = np.linspace(-1, 1, 256).astype(np.float32)
        pad = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = np.abs(pad).max(1).astype(np.float32)
        inner = np.abs((pad / outer[:, None])[..., None] - levels).argmin(-1)
        absmax = ((levels[inner] * outer[:, None]).reshape(-1) + offset)[: len(absmax)]
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        codes = torch.from_numpy(inner.reshape(-1)[: len(absmax)].astype(np.uint8))
        tensors |= {
            "weight.absmax": codes,
            "weight.nested_absmax": torch.from_numpy(outer),
            "weight.nested_quant_map": torch.from_numpy(levels),
        }
    else:
        tensors["weight.absmax"] = torch.from_numpy(absmax)
    codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(-1)
    flat = codes.reshape(-1).astype(np.uint8)
    tensors |= {
        "weight": torch.from_numpy((flat[0::2] << 4 | flat[1::2]).reshape(-1, 1)),
        "weight.quant_map": torch.from_numpy(table),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    back = (table[codes] * absmax[:, None]).reshape(weight.shape)
    return Packed(tensors, torch.from_numpy(back))


def bnb_int8(weight: Tensor) -> Packed:
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return Packed(tensors, codes.float() * most[:, None] / 127)


def fp8(weight: Tensor, block: int | None = None, input_scale: float | None = None) -> Packed:
    num_out, num_in = weight.shape
    if block is None:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale}
        if input_scale is not None:
            tensors["input_scale"] = torch.tensor(input_scale)
        return Packed(tensors, codes.float() * scale)
    scales = torch.zeros(-(-num_out // block), -(-num_in // block))
    codes = torch.zeros(num_out, num_in, dtype=torch.float8_e4m3fn)
    back = torch.zeros(num_out, num_in)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            back[at] = codes[at].float() * scales[i, j]
    return Packed({"weight": codes, "weight_scale_inv": scales}, back)


def int4_with_order(weight: Tensor, group: int, act_order: int) -> Packed:
    """compressed-tensors' pack-quantized with a g_idx: symmetric, inputs along the words."""
    groups = _groups_of(weight.shape[1], group, act_order)
    count = groups.max() + 1
    values = weight.double().numpy()
    scales = np.stack([np.abs(values[:, groups == g]).max(1) / 7 for g in range(count)], 1)
    scales = scales.astype(np.float16)
    spread = scales.astype(np.float64)[:, groups]
    codes = np.clip(np.round(values / spread), -8, 7).astype(np.int64)
    tensors = {
        "weight_packed": _words((codes + 8).T, 4).T.contiguous(),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Packed(tensors, torch.from_numpy(codes * spread).float())
