"""Concatenates the packed forms of a layer's parts along the outputs, where this is lossless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from windlass.kernels.packed import Float8, Int4Group, Int8Group, Packed, Table4

Form = Packed | Tensor


def join(forms: Sequence[Form]) -> list[Form]:
    """Merge adjacent forms into as few as possible; keeps the order of the outputs."""
    runs: list[list[Form]] = []
    for form in forms:
        if runs and _mergeable(runs[-1][0], form) and _ends_on_block(runs[-1][-1]):
            runs[-1].append(form)
        else:
            runs.append([form])
    return [run[0] if len(run) == 1 else _concatenate(run) for run in runs]


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first axis, as torch.cat, which imports torch._dynamo for meta tensors."""
    first = tensors[0]
    if first.is_meta:
        return first.new_empty((sum(map(len, tensors)), *first.shape[1:]))
    return torch.cat([*tensors])


def _mergeable(a: Form, b: Form) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    match a, b:
        case Int4Group(), Int4Group():
            return a.group == b.group and _equal(a.perm, b.perm)
        case Int8Group(), Int8Group():
            return (
                (a.group, a.activation, a.bits) == (b.group, b.activation, b.bits)
                and (a.offsets is None) == (b.offsets is None)
                and _equal(a.perm, b.perm)
                and _equal(a.input_scale, b.input_scale)
            )
        case Float8(), Float8():
            return (a.block, a.activation) == (b.block, b.activation) and _equal(
                a.input_scale, b.input_scale
            )
        case Table4(), Table4():
            return (
                (a.group, a.super_group, a.unit) == (b.group, b.super_group, b.unit)
                and (a.sub_scales is None) == (b.sub_scales is None)
                and _equal(a.table, b.table)
            )
    return False


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def _ends_on_block(form: Form) -> bool:
    """Whether another form can follow: a block of fp8 scales must not span two forms."""
    if isinstance(form, Float8) and form.block is not None:
        return form.shape[0] % form.block[0] == 0
    return True


def _concatenate(run: Sequence[Form]) -> Form:
    first = run[0]
    if isinstance(first, Tensor):
        return join_rows([form for form in run if isinstance(form, Tensor)])
    packed = [form for form in run if not isinstance(form, Tensor)]
    codes = join_rows([form.codes.view(torch.uint8) for form in packed]).view(first.codes.dtype)
    scales = join_rows([_row_scales(form) for form in packed])
    if isinstance(first, Int4Group | Int8Group) and first.offsets is not None:
        offsets = [form.offsets for form in packed if isinstance(form, Int4Group | Int8Group)]
        stacked = join_rows([tensor for tensor in offsets if tensor is not None])
        return replace(first, codes=codes, scales=scales, offsets=stacked)
    if isinstance(first, Table4) and first.sub_scales is not None:
        subs = [form.sub_scales for form in packed if isinstance(form, Table4)]
        stacked = join_rows([one for one in subs if one is not None])
        return replace(first, codes=codes, scales=scales, sub_scales=stacked)
    return replace(first, codes=codes, scales=scales)


def _row_scales(form: Packed) -> Tensor:
    """Scales that can be concatenated: a scale per tensor becomes one per row."""
    if isinstance(form, Float8) and form.block is None:
        return form.scales.expand(form.shape[0], 1)
    return form.scales
