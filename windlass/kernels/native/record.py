"""Records the native calls of a model's forward without computing.

Torch operators on tensors of the step are intercepted too. Concatenation, bias and the addition to a residual become
part of a call; any other operator makes the step unrecordable, and the error names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.kernels.native.commands import (
    SAMPLED,
    TOKENS,
    WRITTEN,
    Call,
    LinearFlag,
    MapFunction,
    Op,
)
from windlass.kernels.storages import Held, held

_aten = torch.ops.aten
_NORMS = {Op.ADD_NORM: Op.NORM, Op.ADD_LAYER_NORM: Op.LAYER_NORM}
_UNINITIALISED = (_aten.empty_like.default, _aten.new_empty.default)


class Unrecordable(Exception):
    """A step cannot be recorded; the message gives the reason."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Rows of a step that calls read or write."""

    rows: int  # TOKENS or SAMPLED
    row_bytes: int
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Recorded:
    """A call with buffers in place of its step tensors."""

    call: Call
    rows: int
    buffers: list[Buffer | None]

    @property
    def op(self) -> Op:
        return self.call.op

    def uses(self, buffer: Buffer | None) -> bool:
        return any(other is buffer for other in self.buffers if other is not None)

    def writes(self, buffer: Buffer | None) -> bool:
        written = WRITTEN[self.op]
        return any(self.buffers[i] is buffer for i in written if i < len(self.buffers))

    def set_size(self, index: int, size: int) -> None:
        sizes = list(self.call.sizes)
        sizes[index] = size
        self.call = replace(self.call, sizes=sizes)


class Recording(TorchDispatchMode):
    """Owns the recorded calls, and the tensors that represent buffers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch would import its compiler to skip this mode."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Recorded] = []
        self._buffers: dict[int, Buffer] = {}  # by address
        self._tensors: list[Tensor] = []  # kept alive, so that no address is reused
        self._biases: list[Tensor] = []  # in float32; commands point into them

    def storages(self) -> Iterator[Held]:
        yield from held("recorded steps", *self._tensors)
        yield from held("weights", *self._biases)

    def buffer_of(self, tensor: Tensor) -> Buffer:
        found = self._buffers.get(tensor.data_ptr())
        if found is None:
            raise Unrecordable("a native operation reads a tensor that none computed")
        return found

    def read_by_step(self, tensor: Tensor) -> None:
        """Make a tensor with a row per token an input of the step, which nothing computes."""
        self._track(tensor, len(tensor), TOKENS)

    # ---- native calls ------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Record a call: its outputs become buffers, its inputs must be buffers."""
        written = WRITTEN[call.op]
        read = [t for i, t in enumerate(call.step_tensors) if i not in written and t is not None]
        rows = TOKENS if call.op == Op.EMBED else SAMPLED
        if read and call.op != Op.GATHER:
            rows = self.buffer_of(read[0]).rows
        buffers: list[Buffer | None] = []
        for i, tensor in enumerate(call.step_tensors):
            if tensor is not None and i in written and tensor.data_ptr() not in self._buffers:
                self._track(tensor, call.rows, rows)
            buffers.append(None if tensor is None else self.buffer_of(tensor))
        self.calls.append(Recorded(call, rows, buffers))

    def _track(self, tensor: Tensor, num_rows: int, rows: int) -> Buffer:
        buffer = Buffer(rows, tensor.nbytes // num_rows, tensor.dtype)
        self._buffers[tensor.data_ptr()] = buffer
        self._tensors.append(tensor)
        return buffer

    # ---- torch operators -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        tracked = [t for t in _tensors(args) if t.data_ptr() in self._buffers]
        if not tracked or func in _UNINITIALISED or _is_view(func, tracked[0], result):
            return result
        if func == _aten.cat.default:
            self._concatenate(args[0], result)
        elif func == _aten.add.Tensor and not kwargs and len(tracked) == 2:
            self._add_elementwise(Op.ADD, tracked, result)
        elif func == _aten.add.Tensor and not kwargs:
            self._add_bias(args[0], args[1], result)
        elif func == _aten.mul.Tensor and len(tracked) == 1 and _is_number(args[1]):
            scale = (float(args[1]),)
            self._add_elementwise(Op.MAP, tracked, result, (MapFunction.SCALE,), scale)
        elif func == _aten.add_.Tensor and not kwargs and len(tracked) == 2:
            self._add_to_residual(args[0], args[1])
        else:
            raise Unrecordable(f"{func} is not native")
        return result

    def _add_elementwise(
        self,
        op: Op,
        read: Sequence[Tensor],
        result: Tensor,
        function: Sequence[int] = (),
        scalars: Sequence[float] = (),
    ) -> None:
        """Record the native call for an operator on all values of tensors of equal shapes."""
        for tensor in (*read, result):
            if tensor.shape != result.shape or not tensor.is_contiguous():
                raise Unrecordable(f"{op.name} of different shapes or strides is not native")
        self.add(
            Call(
                op,
                len(result),
                step_tensors=(*read, result),
                sizes=(result.numel() // len(result), *function),
                scalars=scalars,
            )
        )

    def _producers(self, tensor: Tensor) -> list[Recorded]:
        """Return the GEMMs that wrote a tensor, if no other call uses it."""
        buffer = self._buffers.get(tensor.data_ptr())
        users = _users(self.calls, buffer)
        if not users or not _all_produce(users, buffer):
            raise Unrecordable("torch changes a tensor that is not the result of native GEMMs")
        return users

    def _concatenate(self, parts: Sequence[Tensor], result: Tensor) -> None:
        """Make the GEMMs of all parts write into one buffer."""
        rows, stride = result.shape
        whole = self._track(result, rows, self.buffer_of(parts[0]).rows)
        column = 0
        for part in parts:
            for producer in self._producers(part):
                producer.buffers[1] = whole
                producer.set_size(0, stride)
                producer.set_size(1, column + producer.call.sizes[1])
            column += part.shape[1]

    def _add_bias(self, x: Tensor, bias: Tensor, result: Tensor) -> None:
        if bias.shape != x.shape[1:]:
            raise Unrecordable(f"aten.add of shapes {[*x.shape]} and {[*bias.shape]} is not native")
        bias = bias.detach().float().contiguous()
        self._biases.append(bias)
        producers = self._producers(x)
        sum_buffer = self._track(result, len(x), producers[0].rows)
        for producer in producers:
            producer.buffers[1] = sum_buffer
            call = producer.call
            first, y = call.sizes[1], call.step_tensors[1]
            assert y is not None
            part = bias[first : first + y.shape[1]]
            producer.call = replace(call, model_tensors=[call.model_tensors[0], part])

    def _add_to_residual(self, residual: Tensor, y: Tensor) -> None:
        producers = self._producers(y)
        if any(_has_bias(producer) for producer in producers):
            raise Unrecordable("aten.add_ of GEMMs with a bias is not native")
        _add_to(self.buffer_of(residual), producers)


def _is_number(value: Any) -> bool:
    """Whether a factor is the same in every step: a number, or a weight of one."""
    return isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_view(func: Any, tensor: Tensor, result: Any) -> bool:
    """Whether an operator returned the same values at the same address."""
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
    """Fuse calls to reduce memory traffic. Results are bit-identical: the order of sums is kept."""
    calls = _fuse_residual_add(calls)
    calls = _fuse_silu_mul(calls)
    return _fuse_norm(calls)


def _users(calls: list[Recorded], buffer: Buffer | None) -> list[Recorded]:
    return [current for current in calls if current.uses(buffer)]


def _all_produce(calls: list[Recorded], buffer: Buffer | None) -> bool:
    """Whether all calls are GEMMs that write the buffer and do not read it.

    Not LoRA calls: what is added after one cannot move into the GEMM, in another order of sums.
    """
    return all(
        current.op == Op.LINEAR
        and current.buffers[1] is buffer
        and current.buffers[0] is not buffer
        for current in calls
    )


def _has_bias(gemm: Recorded) -> bool:
    """Whether a GEMM adds a bias, which it would add after the residual."""
    return len(gemm.call.model_tensors) > 1


def _add_to(buffer: Buffer, gemms: list[Recorded]) -> None:
    """Make GEMMs add to a buffer instead of writing their own."""
    for gemm in gemms:
        gemm.buffers[1] = buffer
        gemm.set_size(2, gemm.call.sizes[2] | LinearFlag.ADD_TO_Y)


def _fuse_residual_add(calls: list[Recorded]) -> list[Recorded]:
    """Make a GEMM before a residual addition add to the residual; a norm remains."""
    for current in calls:
        if current.op not in _NORMS:
            continue
        x, residual, out = current.buffers
        producers = [other for other in _users(calls, x) if other is not current]
        if not producers or not _all_produce(producers, x):
            continue
        if any(_has_bias(producer) for producer in producers):
            continue
        assert residual is not None
        between = calls[calls.index(producers[0]) : calls.index(current)]
        if any(other.uses(residual) for other in between if other not in producers):
            continue
        _add_to(residual, producers)
        current.call = replace(current.call, op=_NORMS[current.op])
        current.buffers = [residual, out]
    return calls


def _fuse_silu_mul(calls: list[Recorded]) -> list[Recorded]:
    """Make the gate-up GEMM before a silu_mul write its result."""
    out: list[Recorded] = []
    for current in calls:
        previous = out[-1] if out else None
        if (
            current.op == Op.SILU_MUL
            and previous is not None
            and previous.op == Op.LINEAR
            and previous.buffers[1] is current.buffers[0]
            and len(previous.call.model_tensors) == 1
            and len(_users(calls, current.buffers[0])) == 2
            and previous.call.sizes[0] == 2 * current.call.sizes[0]
            and current.call.sizes[0] % 16 == 0  # the largest tile: AVX-512
        ):
            previous.buffers[3] = current.buffers[1]
            previous.set_size(2, previous.call.sizes[2] | LinearFlag.GATED)
        else:
            out.append(current)
    return out


def _fuse_norm(calls: list[Recorded]) -> list[Recorded]:
    """Make the first GEMM that reads a norm's result compute the norm."""
    out: list[Recorded] = []
    for current in calls:
        previous = out[-1] if out else None
        if (
            current.op == Op.LINEAR
            and previous is not None
            and previous.op == Op.NORM
            and len(previous.call.sizes) == 1  # all columns together
            and previous.buffers[1] is current.buffers[0]
        ):
            x, normed = previous.buffers
            weight_and_bias = [*current.call.model_tensors, None][:2]
            current.call = replace(
                current.call,
                model_tensors=[*weight_and_bias, previous.call.model_tensors[0]],
                scalars=previous.call.scalars,
            )
            current.buffers[0], current.buffers[2] = x, normed
            current.set_size(2, current.call.sizes[2] | LinearFlag.NORM_FIRST)
            out[-1] = current
        else:
            out.append(current)
    return out
