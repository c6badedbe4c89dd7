"""bitsandbytes checkpoints: 4-bit (NF4, FP4, with or without double quantisation) and int8."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from windlass.errors import CheckpointError, UnsupportedError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Int8Group, Packed, Table4
from windlass.quant.base import Axis, ParamSpec, Part, check_scales
from windlass.quant.bits import lossless_half
from windlass.quant.packed_method import FileMethod, Shape
from windlass.quant.rounding import Scheme
from windlass.quant.settings import Settings

_BLOCK = 64  # weights per scale
_NESTED_BLOCK = 256  # scales per scale of scales


def read(settings: Settings, linears: Linears) -> FileMethod:
    """The method for a bitsandbytes quantization_config."""
    in_4bit = settings.flag("load_in_4bit", False)
    in_8bit = settings.flag("load_in_8bit", False)
    if in_4bit == in_8bit:
        raise CheckpointError(
            f"{settings.where}: load_in_4bit and load_in_8bit are both {str(in_4bit).lower()}; "
            "exactly one must be set."
        )
    if in_8bit:
        return BnbInt8(linears)
    kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    settings.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Bnb4(kind, settings.flag("bnb_4bit_use_double_quant", False), linears)


class Bnb4(FileMethod):
    """weight [N, K / 2], the codebook in weight.quant_map, a scale per block in weight.absmax.

    The file stores weight and absmax flat. With double quantisation absmax holds codes of a second
    codebook. The blob weight.quant_state is JSON with the block sizes.
    """

    def __init__(self, kind: str, nested: bool, linears: Linears) -> None:
        super().__init__(f"bitsandbytes {kind}", linears)
        self._kind = kind
        self._nested = nested

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.name, "table4", (_BLOCK,))

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self._kind}"

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        if num_in % _BLOCK:
            raise UnsupportedError(
                f"{part}: the block size of {_BLOCK} weights does not divide {num_in} inputs, so "
                "some blocks span two rows, which is not supported."
            )
        num_blocks = num_in // _BLOCK
        scale_type = torch.uint8 if self._nested else torch.float32
        params = {
            "weight": ParamSpec(
                shape=(num_out, num_in // 2),
                dtype=torch.uint8,
                out=Axis(0),
                into=Axis(1, _BLOCK, _BLOCK // 2),
            ),
            "weight.absmax": ParamSpec(
                shape=(num_out, num_blocks), dtype=scale_type, out=Axis(0), into=Axis(1, _BLOCK)
            ),
            "weight.quant_map": ParamSpec((16,), torch.float32),
            self._state: ParamSpec((-1,), torch.uint8),
        }
        if self._nested:
            # A block of scales can span rows, so that ranks read all of them: they are few.
            outer = -(-num_out * num_blocks // _NESTED_BLOCK)
            params["weight.nested_absmax"] = ParamSpec((outer,), torch.float32)
            params["weight.nested_quant_map"] = ParamSpec((256,), torch.float32)
        return params

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        state, packed = self._read_state(part), part["weight"]
        swapped = (packed >> 4) | (
            packed << 4
        )  # bitsandbytes stores the first weight in the high nibble
        table = part.scales("weight.quant_map", allow_zero=True)
        return Table4(swapped, table, lossless_half(self._absmax(part, state)))

    def _absmax(self, part: Part, state: dict[str, Any]) -> Tensor:
        # A block of zeros has scale zero, so zero is valid.
        if not self._nested:
            return part.scales("weight.absmax", allow_zero=True)
        outer = part.scales("weight.nested_absmax", allow_zero=True)
        inner = part.scales("weight.nested_quant_map", allow_zero=True)
        codes, outputs, inputs = part["weight.absmax"], part.outputs, part.inputs
        rows = torch.arange(outputs.start, outputs.stop, device=codes.device)
        columns = torch.arange(inputs.start // _BLOCK, inputs.stop // _BLOCK, device=codes.device)
        index = rows[:, None] * (inputs.whole // _BLOCK) + columns  # in the file's flat order
        absmax = inner[codes.long()] * outer[index // _NESTED_BLOCK] + float(state["nested_offset"])
        check_scales(absmax, f"{part.name}.weight.absmax", allow_zero=True)
        return absmax

    def _read_state(self, part: Part) -> dict[str, Any]:
        """The blob's JSON. Raises unless it matches the config and the layer."""
        blob, name = part[self._state], f"{part.name}.{self._state}"
        if blob.is_meta:
            return {"nested_offset": 0.0}
        try:
            state = json.loads(bytes(blob.tolist()))
            found = (state["quant_type"], state["blocksize"], tuple(state["shape"]))
            nested = (state.get("nested_blocksize"), "nested_offset" in state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"tensor {name}: is not the expected JSON: {error!r}.") from error
        expected = (self._kind, _BLOCK, part.whole_shape)
        if found != expected or (self._nested and nested != (_NESTED_BLOCK, True)):
            raise UnsupportedError(
                f"tensor {name}: has type, block and shape {found}, nested {nested}; expected "
                f"{expected}{', nested in blocks of 256' if self._nested else ''}."
            )
        return dict(state)


class BnbInt8(FileMethod):
    """weight int8 [N, K], SCB [N]: the absolute maximum of each row. Activations stay unquantised."""

    def __init__(self, linears: Linears) -> None:
        super().__init__("bitsandbytes int8", linears)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.name, "int8", (), per_row=True)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        return {
            "weight": ParamSpec(
                shape=(num_out, num_in), dtype=torch.int8, out=Axis(0), into=Axis(1)
            ),
            "SCB": ParamSpec((num_out,), torch.float32, Axis(0)),
            # Row permutation of older versions; 0: none.
            "weight_format": ParamSpec((1,), torch.uint8, optional=True),
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        layout = part.tensors.get("weight_format")
        if layout is not None and not layout.is_meta and int(layout) != 0:
            raise UnsupportedError(
                f"tensor {part.name}.weight_format: is {int(layout)}; only row-major weights "
                "(0) are supported. Save the model with a current bitsandbytes."
            )
        scales = part.scales("SCB", allow_zero=True) / 127
        return Int8Group(part["weight"], scales.unsqueeze(1))
