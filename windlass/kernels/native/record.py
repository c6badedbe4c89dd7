"""Writes down the native calls of a network's forward, with nothing computed.

Torch's operators on tensors of the step are seen too. Few can become part of a call; any other makes
the step unrecordable, and the reason says which it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.kernels.native.commands import SAMPLED, TOKENS, WRITTEN, Call, LinearFlag, Op

_aten = torch.ops.aten
_WITHOUT_CONTENTS = (_aten.empty_like.default, _aten.new_empty.default)


class Unrecordable(Exception):
    """A step has to be computed operator by operator; says why."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Rows of a step that calls read and write."""

    rows: int  # TOKENS or SAMPLED
    row_bytes: int
    dtype: torch.dtype


@dataclass(slots=True)
class Recorded:
    """A call whose moving tensors are buffers."""

    call: Call
    rows: int
    buffers: list[Buffer | None]

    @property
    def op(self) -> Op:
        return self.call.op

    def uses(self, buffer: Buffer | None) -> bool:
        return any(one is buffer for one in self.buffers if one is not None)

    def writes(self, buffer: Buffer | None) -> bool:
        written = WRITTEN[self.op]
        return any(self.buffers[i] is buffer for i in written if i < len(self.buffers))

    def change(self, index: int, size: int) -> None:
        sizes = list(self.call.sizes)
        sizes[index] = size
        self.call = replace(self.call, sizes=sizes)


class Recording(TorchDispatchMode):
    """Owns the calls so far, and the tensors that stand for buffers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; to leave it alone torch would load its whole compiler first."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Recorded] = []
        self._buffers: dict[int, Buffer] = {}  # by place
        self._kept: list[Tensor] = []  # so that no place is given away again

    def buffer_of(self, tensor: Tensor) -> Buffer:
        found = self._buffers.get(tensor.data_ptr())
        if found is None:
            raise Unrecordable("a tensor that no native operation computed is read by one")
        return found

    # ---- native calls ------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Note a call: what it writes becomes a buffer, what it reads has to be one."""
        written = WRITTEN[call.op]
        read = [t for i, t in enumerate(call.moving) if i not in written and t is not None]
        rows = TOKENS if call.op == Op.EMBED else SAMPLED
        if read and call.op != Op.GATHER:
            rows = self.buffer_of(read[0]).rows
        buffers: list[Buffer | None] = []
        for i, tensor in enumerate(call.moving):
            if tensor is not None and i in written and tensor.data_ptr() not in self._buffers:
                self._track(tensor, call.rows, rows)
            buffers.append(None if tensor is None else self.buffer_of(tensor))
        self.calls.append(Recorded(call, rows, buffers))

    def _track(self, tensor: Tensor, num_rows: int, rows: int) -> Buffer:
        made = Buffer(rows, tensor.nbytes // num_rows, tensor.dtype)
        self._buffers[tensor.data_ptr()] = made
        self._kept.append(tensor)
        return made

    # ---- torch's operators ---------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        tracked = [t for t in _tensors(args) if t.data_ptr() in self._buffers]
        if not tracked or func in _WITHOUT_CONTENTS or _is_view(func, tracked[0], result):
            return result
        if func == _aten.cat.default:
            self._join(args[0], result)
        elif func == _aten.add.Tensor and not kwargs:
            self._add_bias(args[0], args[1], result)
        else:
            raise Unrecordable(f"{func} is not native")
        return result

    def _producers(self, tensor: Tensor) -> list[Recorded]:
        """The products that made a tensor, and adapters, if nothing else has seen it."""
        buffer = self._buffers.get(tensor.data_ptr())
        users = _users(self.calls, buffer)
        if not users or not _all_make(users, buffer):
            raise Unrecordable("torch changes what is not the result of native products")
        return users

    def _join(self, parts: Sequence[Tensor], result: Tensor) -> None:
        """Products side by side write into one buffer."""
        rows, stride = result.shape
        whole = self._track(result, rows, self.buffer_of(parts[0]).rows)
        column = 0
        for part in parts:
            for made in self._producers(part):
                made.buffers[1] = whole
                made.change(0, stride)
                made.change(1, column + made.call.sizes[1])
            column += part.shape[1]

    def _add_bias(self, x: Tensor, bias: Tensor, result: Tensor) -> None:
        if bias.data_ptr() in self._buffers or bias.shape != x.shape[1:]:
            raise Unrecordable("aten.add of two tensors of the step is not native")
        bias = bias.detach().float().contiguous()
        self._kept.append(bias)
        makers = self._producers(x)
        sum_buffer = self._track(result, len(x), makers[0].rows)
        for made in makers:
            made.buffers[1] = sum_buffer
            if made.op != Op.LINEAR:
                continue
            first, y = made.call.sizes[1], made.call.moving[1]
            assert y is not None
            part = bias[first : first + y.shape[1]]
            made.call = replace(made.call, fixed=[made.call.fixed[0], part])


def _is_view(func: Any, tensor: Tensor, result: Any) -> bool:
    """Whether an operator gave the same numbers at the same place."""
    return (
        not func._schema.is_mutable
        and isinstance(result, Tensor)
        and (result.data_ptr(), result.dtype) == (tensor.data_ptr(), tensor.dtype)
        and result.numel() == tensor.numel()
        and result.is_contiguous()
    )


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def fuse(calls: list[Recorded]) -> list[Recorded]:
    """The same results in fewer passes over memory: to the bit, since sums stay as they are."""
    calls = _add_in_place(calls)
    calls = _gate_in_product(calls)
    return _norm_in_product(calls)


def _users(calls: list[Recorded], buffer: Buffer | None) -> list[Recorded]:
    return [one for one in calls if one.uses(buffer)]


def _all_make(calls: list[Recorded], buffer: Buffer | None) -> bool:
    """Whether calls are products and adapters that write a buffer and do not read it."""
    return all(
        one.op in (Op.LINEAR, Op.LORA) and one.buffers[1] is buffer and one.buffers[0] is not buffer
        for one in calls
    )


def _add_in_place(calls: list[Recorded]) -> list[Recorded]:
    """A product whose result goes into the residual adds to it; what remains is a norm."""
    for one in calls:
        if one.op != Op.ADD_NORM:
            continue
        x, residual, out = one.buffers
        makers = [other for other in _users(calls, x) if other is not one]
        if not makers or not _all_make(makers, x):
            continue
        for maker in makers:
            maker.buffers[1] = residual
            if maker.op == Op.LINEAR:
                maker.change(2, maker.call.sizes[2] | LinearFlag.ADD_TO_Y)
        one.call = replace(one.call, op=Op.NORM)
        one.buffers = [residual, out]
    return calls


def _gate_in_product(calls: list[Recorded]) -> list[Recorded]:
    out: list[Recorded] = []
    for one in calls:
        before = out[-1] if out else None
        if (
            one.op == Op.SILU_MUL
            and before is not None
            and before.op == Op.LINEAR
            and before.buffers[1] is one.buffers[0]
            and len(before.call.fixed) == 1
            and len(_users(calls, one.buffers[0])) == 2
            and before.call.sizes[0] == 2 * one.call.sizes[0]
            and one.call.sizes[0] % 16 == 0  # a tile of the widest CPUs
        ):
            before.buffers[3] = one.buffers[1]
            before.change(2, before.call.sizes[2] | LinearFlag.GATED)
        else:
            out.append(one)
    return out


def _norm_in_product(calls: list[Recorded]) -> list[Recorded]:
    """The first product that reads a norm's result computes it on the way."""
    out: list[Recorded] = []
    for one in calls:
        before = out[-1] if out else None
        if (
            one.op == Op.LINEAR
            and before is not None
            and before.op == Op.NORM
            and before.buffers[1] is one.buffers[0]
        ):
            x, normed = before.buffers
            fixed = [*one.call.fixed, None][:2]
            one.call = replace(
                one.call, fixed=[*fixed, before.call.fixed[0]], numbers=before.call.numbers
            )
            one.buffers[0], one.buffers[2] = x, normed
            one.change(2, one.call.sizes[2] | LinearFlag.NORM_FIRST)
            out[-1] = one
        else:
            out.append(one)
    return out
