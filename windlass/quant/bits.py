"""Unpacking of codes from int32 words, and their packed forms in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import CheckpointError, ShardError
from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles
from windlass.quant.base import Part
from windlass.quant.packed_method import Groups

_WORD = 32


def num_words(count: int, bits: int) -> int:
    """Number of int32 words for `count` codes."""
    return -(-count * bits // _WORD)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] to uint8 [rows, count]: code i starts at bit i * bits, lowest first."""
    values = torch.empty((words.shape[0], count), dtype=torch.uint8, device=words.device)
    mask = 2**bits - 1
    period = _WORD if _WORD % bits else _WORD // bits  # codes until a code starts a word again
    stride = period * bits // _WORD
    for i in range(min(period, count)):
        word, shift = divmod(i * bits, _WORD)
        low = words[:, word::stride] >> shift
        if shift + bits > _WORD:
            # The code continues in the next word.
            start = low[:, : words[:, word + 1 :: stride].shape[1]] & (2 ** (_WORD - shift) - 1)
            low = start | (words[:, word + 1 :: stride] << (_WORD - shift))
        columns = values[:, i::period]
        columns.copy_((low & mask)[:, : columns.shape[1]])
    return values


def affine(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, bits: int, perm: Tensor | None = None
) -> Packed:
    """The packed form of weights (code - zero) * scale.

    codes [N, K] unsigned, scales and zeros [N, groups]; `perm` as in kernels/packed.py.
    """
    scales = lossless_half(scales)
    if bits <= 4:
        offsets = lossless_half(-zeros * scales.float())
        return Int4Group(codes=pack_nibbles(codes), scales=scales, offsets=offsets, perm=perm)
    signed = (codes ^ 128).view(torch.int8)  # unsigned minus 128
    if isinstance(zeros, int) and zeros == 128:
        return Int8Group(signed, scales, perm=perm)
    offsets = lossless_half((128 - zeros) * scales.float())
    return Int8Group(codes=signed, scales=scales, offsets=offsets, perm=perm)


def lossless_half(values: Tensor) -> Tensor:
    """float16 if the conversion is lossless, else float32."""
    half = values.half()
    if values.is_meta or torch.equal(half.float(), values.float()):
        return half
    return values.float()


def perm_of(part: Part, name: str, grouping: Groups, *, method: str) -> Tensor | None:
    """The permutation that sorts inputs by group (act-order); None if they are sorted already.

    `name` is a tensor [K] (g_idx) of the part: the group of each input. All groups must have the
    same number of inputs. `method` is the format's name, for errors.
    """
    groups = part[name]
    if groups.is_meta:
        return torch.empty_like(groups, dtype=torch.int32)
    size = grouping.of(part.name, part.inputs.count)
    if grouping.size is not None:
        groups = groups - part.inputs.start // size
    num_groups = groups.numel() // size
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        _refuse_shards(part, name, size, method)
        raise CheckpointError(
            f"tensor {part.name}.{name}: contains groups {int(groups.min())} to "
            f"{int(groups.max())}, but there are {num_groups} groups of {size} inputs."
        )
    counts = torch.bincount(groups, minlength=num_groups)
    if not torch.all(counts == size):
        _refuse_shards(part, name, size, method)
        uneven = int((counts != size).nonzero()[0])
        raise CheckpointError(
            f"tensor {part.name}.{name}: group {uneven} has {int(counts[uneven])} inputs, not "
            f"{size} as in the quantization_config."
        )
    perm = torch.argsort(groups, stable=True)
    if torch.equal(perm, torch.arange(len(perm), device=perm.device)):
        return None
    return perm.to(torch.int32)


def _refuse_shards(part: Part, name: str, size: int, method: str) -> None:
    """Raise if the inputs are cut: with act-order, a group's inputs can be on any rank."""
    if part.inputs.is_whole:
        return
    raise ShardError(
        f"{part.name}: {method} weights cannot be cut into {part.inputs.size} shards along their "
        f"{part.inputs.whole} inputs: {name} (act-order) spreads groups of {size} inputs over "
        f"several shards, so the unit is all {part.inputs.whole} inputs. Numbers of shards that "
        "work: 1. Use a version of the model without act-order (desc_act false)."
    )
