"""What a packed weight takes once its kernel has repacked it, found on a few rows of ones.

Kernels arrange weights in tiles of rows, so that bytes grow by the same step for every further 128
rows: two small weights of the same form tell what a large one takes. What depends on the values,
such as minima that a kernel can do without, is taken to be there.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from windlass.kernels.linears import Linears, PackedGemm
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.plain_linear import ReferenceGemm

_ROWS = 128  # a multiple of every kernel's tile, and of the blocks that share a scale

_BY_ROW = ("codes", "scales", "mins", "sub_scales")


class Holder:
    """Holds samples with the kernels that are to be used, and remembers weights that are alike."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears
        self._known: dict[tuple[object, ...], int] = {}

    def num_bytes(self, product: PackedGemm) -> int:
        """Of a product without storage, as it would be with it."""
        prepared = product.prepared
        if not isinstance(prepared, ReferenceGemm) or product.kernel == "plain":
            return prepared.num_bytes
        form = prepared.form
        geometry = ((tuple(value.shape), value.dtype) for value in _tensors(form).values())
        key = (type(form), *geometry)
        if key not in self._known:
            self._known[key] = self._measured(form)
        return self._known[key]

    def _measured(self, form: Packed) -> int:
        rows = form.shape[0]
        small, large = (
            self._linears.hold(self._sample(form, count * _ROWS + rows % _ROWS)).prepared.num_bytes
            for count in (1, 2)
        )
        return small + (large - small) * (rows // _ROWS - 1)

    def _sample(self, form: Packed, rows: int) -> Packed:
        changed = {}
        for name, value in _tensors(form).items():
            shape = list(value.shape)
            if name in _BY_ROW and shape[0] == form.shape[0]:
                shape[0] = rows
            elif isinstance(form, Float8) and form.block is not None and name == "scales":
                shape[0] = -(-rows // form.block[0])
            device = self._linears.device
            if name == "order":
                changed[name] = torch.arange(shape[0], device=device).to(value.dtype)
            else:
                changed[name] = torch.ones(shape, device=device).to(value.dtype)
        return replace(form, **changed)  # type: ignore[arg-type]


def _tensors(form: Packed) -> dict[str, Tensor]:
    values = {item.name: getattr(form, item.name) for item in fields(form)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
