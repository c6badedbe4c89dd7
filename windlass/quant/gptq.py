"""GPTQ checkpoints: codes of 2, 3, 4 or 8 bits packed along the inputs, with or without act-order."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.bits import affine, num_words, perm_of, unpack
from windlass.quant.packed_method import FileMethod, Groups, Shape
from windlass.quant.rounding import Kind, Scheme
from windlass.quant.settings import Settings


class Gptq(FileMethod):
    """qweight [K bits / 32, N], qzeros [groups, N bits / 32], scales [groups, N], g_idx [K].

    The first version of the format stores zero points minus one.
    """

    def __init__(self, bits: int, groups: Groups, zeros_minus_one: bool, linears: Linears) -> None:
        super().__init__(f"gptq {bits}-bit", linears)
        self._bits = bits
        self._groups = groups
        self._zeros_minus_one = zeros_minus_one

    @classmethod
    def read(cls, settings: Settings, linears: Linears) -> Gptq:
        bits = settings.one_of("bits", (2, 3, 4, 8))
        version = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        settings.refuse("dynamic")
        method = cls(bits, Groups(settings.group_size()), version == "gptq", linears)
        method.cuts_inputs = settings.raw("desc_act") is not True
        return method

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def scheme(self) -> Scheme:
        groups = (self._groups.size,) if self._groups.size else ()
        kind: Kind = "int8" if self._bits == 8 else "int4"
        return Scheme(self.name, kind, groups, per_row=not groups)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        group, bits = self._groups.of(part, num_in), self._bits
        # The smallest number of codes that fills whole words: 32 codes of 3 bits take 3 words.
        unit = 32 if bits == 3 else 32 // bits
        if num_in % unit or num_out % unit:
            raise CheckpointError(
                f"{part}: {num_out} x {num_in} weights of {bits} bits do not fill whole int32 words."
            )
        width = unit * bits // 32
        words_in, words_out = num_words(num_in, bits), num_words(num_out, bits)
        out, into = Axis(1, unit, width), Axis(0, unit, width)
        per_group = self._groups.axis(0, part, num_in)
        return {
            "qweight": ParamSpec(
                shape=(words_in, num_out), dtype=torch.int32, out=Axis(1), into=into
            ),
            "qzeros": ParamSpec(
                shape=(num_in // group, words_out), dtype=torch.int32, out=out, into=per_group
            ),
            "scales": ParamSpec(
                shape=(num_in // group, num_out), dtype=torch.float32, out=Axis(1), into=per_group
            ),
            "g_idx": ParamSpec(shape=(num_in,), dtype=torch.int64, out=None, into=Axis(0)),
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        num_out, num_in = shape
        perm = perm_of(part, "g_idx", self._groups, method=self.name)
        codes = unpack(part["qweight"].T.contiguous(), self._bits, num_in)
        if perm is not None:
            codes = codes[:, perm.long()]
        zeros = unpack(part["qzeros"], self._bits, num_out).T.float() + self._zeros_minus_one
        if not zeros.is_meta and bool((zeros == 2 ** (self._bits - 1)).all()):
            centre: Tensor | int = 2 ** (self._bits - 1)
        else:
            centre = zeros
        return affine(codes, part.scales("scales").T.contiguous(), centre, self._bits, perm)
