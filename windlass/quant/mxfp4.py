"""MXFP4 checkpoints (gpt-oss): experts of e2m1 codes with a power of two per 32 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import UnsupportedError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed, Table4
from windlass.quant.base import Axis, ParamSpec, Part, check_scales
from windlass.quant.bits import lossless_half
from windlass.quant.packed_method import FileMethod, Shape
from windlass.quant.rounding import DOUBLED_E2M1, Scheme

_GROUP = 32
_NAN = 255  # of the exponents


class Mxfp4(FileMethod):
    """blocks [N, K / 32, 16] with two codes per byte, scales [N, K / 32]: exponents plus 127."""

    def __init__(self, linears: Linears) -> None:
        super().__init__("mxfp4", linears)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.name, "mxfp4", (_GROUP,))

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        if num_in % _GROUP:
            raise UnsupportedError(
                f"{part}: MXFP4 has groups of {_GROUP} inputs, which do not divide {num_in}."
            )
        groups, into = num_in // _GROUP, Axis(1, _GROUP)
        return {
            "blocks": ParamSpec((num_out, groups, 16), torch.uint8, out=Axis(0), into=into),
            "scales": ParamSpec((num_out, groups), torch.uint8, out=Axis(0), into=into),
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        blocks, device = part["blocks"], part["blocks"].device
        powers = [2.0 ** (exponent - 127) for exponent in range(_NAN)] + [torch.nan]
        scales = torch.tensor(powers, device=device)[part["scales"].long()]
        check_scales(scales, f"{part.name}.scales")
        # A block of zeros may have an exponent that float16 lacks; any scale is right for it.
        scales = torch.where((blocks & 0x77).amax(dim=-1) == 0, 0.0, scales)
        table = torch.tensor(
            [*DOUBLED_E2M1, *(-value for value in DOUBLED_E2M1)], dtype=torch.int8, device=device
        )
        return Table4(codes=blocks.flatten(1), table=table, scales=lossless_half(scales), unit=0.5)
