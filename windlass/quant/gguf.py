"""GGUF weights kept packed: the file's blocks are taken apart once, at load time."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part, check_scales
from windlass.quant.gguf_blocks import BLOCK_KINDS, pack
from windlass.quant.gguf_codebooks import CODEBOOK_KINDS
from windlass.quant.packed_method import PackedMethod, Shape

KINDS = BLOCK_KINDS | CODEBOOK_KINDS  # all storage types of GGUF but plain numbers


class Gguf(PackedMethod):
    """One storage type; a merged layer may have several, one per part."""

    def __init__(self, kind: str, linears: Linears) -> None:
        super().__init__(kind, linears)
        self._kind = KINDS[kind]

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        kind = self._kind
        row_bytes = num_in // kind.values * kind.num_bytes
        into = Axis(1, kind.values, kind.num_bytes)
        return {
            "weight": ParamSpec(
                shape=(num_out, row_bytes), dtype=torch.uint8, out=Axis(0), into=into, raw=True
            )
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        form = pack(part["weight"], self._kind)
        # A block of zeros has the scale zero, so zero is no damage here.
        check_scales(form.scales, f"{part.name}.weight", allow_zero=True)
        return form

    def gives_rows(self, num_out: int, num_in: int) -> bool:
        decision = self._linears.decide(self.outline(num_out, num_in))
        return decision.unpacked is None and decision.kernel.reads_rows

    def outline(self, num_out: int, num_in: int) -> Packed:
        """The form without contents, to ask kernels about.

        One row is packed for it: to pack nothing on the meta device would load half of torch.
        """
        spec = self.params("", num_out, num_in)["weight"]
        blocks = torch.zeros((1, spec.shape[1]), dtype=spec.dtype, device="cpu")
        row = pack(blocks, self._kind)
        tensors = {
            item.name: torch.empty((num_out, value.shape[1]), dtype=value.dtype, device="meta")
            for item in fields(row)
            if isinstance(value := getattr(row, item.name), Tensor) and value.ndim == 2
        }
        return replace(row, **tensors)  # type: ignore[arg-type]
