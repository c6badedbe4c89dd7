"""AWQ checkpoints in the GEMM layout: 4-bit codes, eight outputs per int32, inputs as rows."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.bits import affine, unpack
from windlass.quant.packed_method import FileMethod, Groups, Shape
from windlass.quant.rounding import Scheme
from windlass.quant.settings import Settings

_PER_WORD = 8
# Nibble of output j in its word: the words hold outputs 0 2 4 6 1 3 5 7.
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(FileMethod):
    """qweight [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]."""

    def __init__(self, groups: Groups, linears: Linears) -> None:
        super().__init__("awq", linears)
        self._groups = groups

    @classmethod
    def read(cls, settings: Settings, linears: Linears) -> Awq:
        settings.one_of("bits", (4,))
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        settings.one_of("zero_point", (True,), True)
        return cls(Groups(settings.group_size()), linears)

    @property
    def scheme(self) -> Scheme:
        groups = (self._groups.size,) if self._groups.size else ()
        return Scheme(self.name, "int4", groups, per_row=not groups)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        group = self._groups.of(part, num_in)
        words = num_out // _PER_WORD
        out, scale_in = Axis(1, _PER_WORD), self._groups.axis(0, part, num_in)
        return {
            "qweight": ParamSpec(shape=(num_in, words), dtype=torch.int32, out=out, into=Axis(0)),
            "qzeros": ParamSpec(
                shape=(num_in // group, words), dtype=torch.int32, out=out, into=scale_in
            ),
            "scales": ParamSpec(
                shape=(num_in // group, num_out), dtype=torch.float32, out=Axis(1), into=scale_in
            ),
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        num_out, _ = shape
        codes = _reorder(unpack(part["qweight"], 4, num_out)).T
        zeros = _reorder(unpack(part["qzeros"], 4, num_out)).T
        return affine(codes, part.scales("scales").T.contiguous(), zeros.float(), 4)


def _reorder(nibbles: Tensor) -> Tensor:
    words = nibbles.view(nibbles.shape[0], -1, _PER_WORD)
    return words[:, :, list(_NIBBLES)].flatten(1)
