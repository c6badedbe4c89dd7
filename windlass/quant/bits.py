"""Whole numbers of a few bits inside int32 words, and the forms that such numbers become."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles

_WORD = 32


def num_words(count: int, bits: int) -> int:
    """The int32 words that so many numbers take."""
    return -(-count * bits // _WORD)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] to uint8 [rows, count]: number i starts at bit i * bits, lowest first."""
    values = torch.empty((words.shape[0], count), dtype=torch.uint8, device=words.device)
    mask = 2**bits - 1
    period = _WORD if _WORD % bits else _WORD // bits  # after so many numbers a word begins anew
    stride = period * bits // _WORD
    for i in range(min(period, count)):
        word, shift = divmod(i * bits, _WORD)
        low = words[:, word::stride] >> shift
        if shift + bits > _WORD:
            kept = low[:, : words[:, word + 1 :: stride].shape[1]] & (2 ** (_WORD - shift) - 1)
            low = kept | (words[:, word + 1 :: stride] << (_WORD - shift))
        places = values[:, i::period]
        places.copy_((low & mask)[:, : places.shape[1]])
    return values


def affine(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, bits: int, perm: Tensor | None = None
) -> Packed:
    """(code - zero) * scale in a form that holds codes of so many bits.

    codes [N, K] unsigned, scales and zeros [N, groups]; `perm` as the forms have it.
    """
    scales = exactly(scales)
    if bits <= 4:
        offsets = exactly(-zeros * scales.float())
        return Int4Group(pack_nibbles(codes), scales, offsets, perm)
    signed = (codes ^ 128).view(torch.int8)  # unsigned less 128
    if isinstance(zeros, int) and zeros == 128:
        return Int8Group(signed, scales, perm=perm)
    offsets = exactly((128 - zeros) * scales.float())
    return Int8Group(signed, scales, offsets, perm)


def exactly(values: Tensor) -> Tensor:
    """In float16 where that loses nothing, else in float32."""
    half = values.half()
    if values.is_meta or torch.equal(half.float(), values.float()):
        return half
    return values.float()


def perm_of(groups: Tensor, size: int, name: str) -> Tensor | None:
    """The inputs sorted by their group (act-order); None where they are already.

    `groups` [K] says which group each input belongs to; each group must have `size` of them.
    """
    if groups.is_meta:
        return torch.empty_like(groups, dtype=torch.int32)
    num_groups = groups.numel() // size
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise CheckpointError(
            f"tensor {name}: names groups {int(groups.min())} to {int(groups.max())}, there are "
            f"{num_groups} of {size} inputs."
        )
    counts = torch.bincount(groups, minlength=num_groups)
    if not torch.all(counts == size):
        uneven = int((counts != size).nonzero()[0])
        raise CheckpointError(
            f"tensor {name}: group {uneven} has {int(counts[uneven])} inputs, not {size} as the "
            "quantization_config says."
        )
    perm = torch.argsort(groups, stable=True)
    if torch.equal(perm, torch.arange(len(perm), device=perm.device)):
        return None
    return perm.to(torch.int32)
