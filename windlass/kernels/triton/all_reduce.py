"""Sums of all ranks in one kernel, over memory that every GPU can read, with the norm behind it.

A rank copies each row to its own buffer and sets a flag for the others. One-shot: every rank adds the
row of all. Two-shot: one rank adds it, and the others copy the sum, so that each reads fewer bytes. Sums
go in the order of the ranks, in float32: all ranks get the same bits, which do not depend on the batch.

Each row has two slots that take turns. A rank writes a slot again only after it got the flags of the
call between, which the others set after they had read the slot. Flags and slots follow counters in
device memory, so captured graphs may contain the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.triton import pdl
from windlass.kernels.triton.norm import normed
from windlass.kernels.triton.quantise import Stored, allocate, store_quantised

MAX_RANKS = 8
MAX_ROWS = 256  # few enough that all programs run at the same time
SLOT_BYTES = 32 * 1024  # of one row
_FLAG_BYTES = 2 * MAX_ROWS * MAX_RANKS * 4  # a flag of each rank for both parts of the two-shot sum
BUFFER_BYTES = _FLAG_BYTES + 4 * MAX_ROWS * SLOT_BYTES  # two slots for rows, two for sums
# All ranks read at most so many bytes of the others in a one-shot sum, else two shots are faster.
_ONE_SHOT_BYTES = 2**20


@triton.jit
def _set_flags(bases, lanes, mask, first, rank, epoch):
    """Set this rank's flag in the buffers of some ranks."""
    tl.debug_barrier()  # all threads have stored their values
    flags = (bases + 4 * (first + rank)).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, epoch + 0 * lanes, mask=mask, sem="release", scope="sys")


@triton.jit
def _wait_for_flags(own, lanes, mask, first, epoch):
    """Wait until some ranks have set their flag in this rank's buffer."""
    flags = (own + 4 * (first + lanes)).to(tl.pointer_type(tl.int32))
    missing = 1
    while missing > 0:
        # A rank may be one call ahead, and numbers wrap around.
        found = tl.atomic_add(flags, 0 * lanes, mask=mask, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(mask & (found - epoch < 0), 1, 0), 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank"])
def all_reduce_kernel(
    x,
    out,
    out_scales,
    out_sums,
    residual,
    weight,
    eps,
    buffers,
    counters,
    rank,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = the sum of all ranks' x; with a residual: residual += sum, out = norm(residual) * weight"""
    pdl.begin(PDL)  # the kernels after this one prefetch weights while it waits for the other ranks
    row = tl.program_id(0)
    at, lanes = tl.arange(0, WIDTH), tl.arange(0, LANES)
    mask, ranks = at < SIZE, lanes < RANKS
    kind: tl.constexpr = x.dtype.element_ty
    bases = tl.load(buffers + lanes, mask=ranks, other=0)
    own = tl.load(buffers + rank)
    epoch = tl.load(counters + row) + 1
    first = row * LANES
    slot = 8 * ROWS * LANES + ((epoch & 1) * ROWS + row).to(tl.int64) * SLOT
    value = tl.load(x + row.to(tl.int64) * SIZE + at, mask=mask, other=0.0)
    tl.store((own + slot).to(tl.pointer_type(kind)) + at, value, mask=mask)
    owner = row % RANKS
    receivers = ranks & (lanes == owner) if TWO_SHOT else ranks
    _set_flags(bases, lanes, receivers, first, rank, epoch)
    if not TWO_SHOT or rank == owner:
        _wait_for_flags(own, lanes, ranks, first, epoch)
        total = tl.zeros((WIDTH,), tl.float32)
        for peer in tl.static_range(RANKS):
            values = (tl.load(buffers + peer) + slot).to(tl.pointer_type(kind))
            total += tl.load(values + at, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
        value = total.to(kind)
    if TWO_SHOT:
        slot += 2 * ROWS * SLOT
        first += ROWS * LANES
        if rank == owner:
            tl.store((own + slot).to(tl.pointer_type(kind)) + at, value, mask=mask)
            _set_flags(bases, lanes, ranks, first, rank, epoch)
        else:
            _wait_for_flags(own, lanes, lanes == owner, first, epoch)
            values = (tl.load(buffers + owner) + slot).to(tl.pointer_type(kind))
            value = tl.load(values + at, mask=mask, other=0.0, cache_modifier=".cv")
    if residual is not None:
        at_row = row.to(tl.int64) * SIZE + at
        before = tl.load(residual + at_row, mask=mask, other=0.0).to(tl.float32)
        sum_ = (value.to(tl.float32) + before).to(residual.dtype.element_ty)
        tl.store(residual + at_row, sum_, mask=mask)
        gain = tl.load(weight + at, mask=mask, other=0.0)
        value = normed(sum_.to(tl.float32), gain, eps, SIZE)
    wide_row = row.to(tl.int64)
    store_quantised(value, out, out_scales, out_sums, wide_row, 0, kind, SIZE, BLOCK, GROUP)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counters + row, epoch)


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """The buffers of all ranks, as one rank sees them, and its counters."""

    rank: int
    addresses: Tensor  # int64 [ranks], of buffers of BUFFER_BYTES that were zero at first
    counters: Tensor  # int32 [MAX_ROWS], zero at first

    @classmethod
    def of(cls, rank: int, addresses: Sequence[int], device: torch.device) -> SharedBuffers:
        return cls(
            rank=rank,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
            counters=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
        )

    def why_not(self, x: Tensor) -> str | None:
        """Why the kernel cannot sum such a tensor; None: it can."""
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{x.dtype} is not summed"
        if x.numel() // x.shape[-1] > MAX_ROWS:
            return f"more than {MAX_ROWS} rows"
        return None if x.shape[-1] * x.element_size() <= SLOT_BYTES else "a row exceeds its slot"

    def all_reduce_in_parts(self, x: Tensor) -> Tensor:
        """`all_reduce` for any number of rows."""
        parts = x.reshape(-1, x.shape[-1]).split(MAX_ROWS)
        return torch.cat([self.all_reduce(part) for part in parts]).view(x.shape)

    def all_reduce(self, x: Tensor, *, two_shot: bool | None = None) -> Tensor:
        """The sum of all ranks' tensors. `two_shot`: None chooses by size."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(flat)
        self._launch(flat, Stored(out, out), two_shot=two_shot)
        return out.view(x.shape)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: Norm, *, two_shot: bool | None = None
    ) -> tuple[Inputs, Tensor]:
        """Add the sum of all ranks' x to the residual stream, in place, and normalise it."""
        x, (rows, size) = x.contiguous(), x.shape
        stored = allocate(rows, size, x, norm.input_quant(rows))
        self._launch(x, stored, (residual, norm.weight, norm.eps), two_shot)
        return stored.result, residual

    def release(self, buffer: Tensor) -> None:
        """Set all flags of this rank's buffer: kernels that wait for lost ranks end, without their values."""
        flags = buffer[:_FLAG_BYTES].view(torch.int32)
        flags.copy_((self.counters.max() + 2**30).expand_as(flags))

    def _launch(
        self,
        x: Tensor,
        stored: Stored,
        added: tuple[Tensor, Tensor, float] | None = None,
        two_shot: bool | None = None,
    ) -> None:
        (rows, size), ranks = x.shape, len(self.addresses)
        if two_shot is None:
            two_shot = ranks > 2 and (ranks - 1) * x.nbytes > _ONE_SHOT_BYTES
        residual, weight, eps = added or (None, None, 0.0)
        width = stored.width(size)
        all_reduce_kernel[(rows,)](
            x,
            stored.out,
            stored.scales,
            stored.sums,
            residual,
            weight,
            eps,
            self.addresses,
            self.counters,
            self.rank,
            RANKS=ranks,
            LANES=MAX_RANKS,
            SIZE=size,
            WIDTH=width,
            BLOCK=stored.block,
            GROUP=stored.group,
            ROWS=MAX_ROWS,
            SLOT=SLOT_BYTES,
            TWO_SHOT=two_shot,
            num_warps=min(16, max(4, width // 512)),
            **pdl.options(),
        )
