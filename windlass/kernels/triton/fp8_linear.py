"""fp8 weights and activations on CUDA: few rows in one kernel of ours, many in torch's own.

Both multiply e4m3 by e4m3 and scale the sums once, by the token's scale and the output's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.packed import Float8, Packed
from windlass.kernels.triton import chain
from windlass.kernels.triton.reduce import add_parts, splits_for
from windlass.kernels.triton.rounding import round_rows

_FEW_ROWS, _MOST_ROWS = 16, 64
_BLOCK_K = 128
_FETCHED = 8 * 2**20  # bytes of weights that a product fetches before it waits for its inputs
_CAPABILITY = (8, 9)  # the first devices that multiply fp8


@triton.jit(do_not_specialize=["M", "splits", "fetched"])
def fp8_linear_kernel(
    x,
    x_scales,
    codes,
    scales,
    out,
    parts,
    counters,
    M,
    N,
    K,
    splits,
    fetched,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[M, N] = (x @ codes.T) * x_scales * scales; `fetched` bytes of a row before the wait."""
    chain.release(CHAINED)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    begin = split * span
    end = tl.minimum(begin + span, K)
    at_first = tl.minimum(outputs, N - 1).to(tl.int64) * K + begin
    ahead = tl.maximum(tl.minimum(fetched, end - begin), 0)
    chain.fetch(codes + at_first, (at_first * 0 + ahead).to(tl.int32), CHAINED)
    chain.wait(CHAINED)
    k = tl.arange(0, BLOCK_K)
    w_at = codes + outputs.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + rows[None, :] * K + k[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = start + k < K
        w_tile = tl.load(w_at + start, mask=(outputs < N)[:, None] & inside[None, :], other=0.0)
        x_tile = tl.load(x_at + start, mask=(rows < M)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc)
    at = rows[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    whole = True
    if SPLIT:
        acc, whole = add_parts(acc, parts, ROWS * N, counters + tile, split, splits, at, mask)
    if whole:
        x_scale = tl.load(x_scales + rows, mask=rows < M, other=0.0)
        scale = tl.load(scales + outputs, mask=outputs < N, other=0.0)
        acc *= scale[:, None] * x_scale[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


class Fp8Linear:
    """Takes e4m3 weights with one scale, or one for each output, and activations rounded per token."""

    name = "triton"
    fixed = False

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Float8):
            return "written for fp8"
        if form.block is not None or form.activation not in ("token", "tensor"):
            return "written for scales per tensor or output, and activations per token"
        if dtype not in (torch.bfloat16, torch.float16):
            return "written for 16-bit arithmetic"
        if form.shape[0] % 16 or form.shape[1] % 16:
            return f"a weight of {form.shape[0]} x {form.shape[1]} is not made of sixteens"
        if torch.cuda.get_device_capability(device) < _CAPABILITY:
            return "this GPU does not multiply fp8"
        return None

    def prepare(self, form: Packed) -> Fp8Product:
        assert isinstance(form, Float8)
        return Fp8Product(form)


class Fp8Product:
    """Owns the codes as they came, and one scale for each output."""

    def __init__(self, form: Float8) -> None:
        self._codes = form.codes.contiguous()
        self._num_out, self._num_in = form.shape
        self._scales = form.scales.float().flatten().expand(self._num_out).contiguous()
        self._input_scale = form.input_scale

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def apply(self, x: Tensor) -> Tensor:
        codes, scales = self._round(x)
        if x.shape[0] <= _MOST_ROWS:
            return self._few(codes, scales, x.dtype)
        return torch._scaled_mm(
            codes,
            self._codes.T,
            scale_a=scales,
            scale_b=self._scales[None, :],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._input_scale is None:
            return round_rows(x)
        scale = self._input_scale.float()
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, scale.reshape(1, 1).expand(x.shape[0], 1).contiguous()

    def _few(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        rows = codes.shape[0]
        at_once = _FEW_ROWS if rows <= _FEW_ROWS else _MOST_ROWS
        width = 128 if self._num_out >= 16384 else 64
        tiles = triton.cdiv(self._num_out, width)
        splits = splits_for(tiles, self._num_in // _BLOCK_K)
        out = torch.empty((rows, self._num_out), dtype=dtype, device=codes.device)
        parts = counters = out
        if splits > 1:
            shape = (splits, at_once, self._num_out)
            parts = torch.empty(shape, dtype=torch.float32, device=codes.device)
            counters = torch.zeros(tiles, dtype=torch.int32, device=codes.device)
        fp8_linear_kernel[(tiles, splits)](
            codes,
            scales,
            self._codes,
            self._scales,
            out,
            parts,
            counters,
            rows,
            self._num_out,
            self._num_in,
            splits,
            max(64, _FETCHED // (self._num_out * splits) // 64 * 64),
            SPLIT=splits > 1,
            ROWS=at_once,
            OUTPUTS=width,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            num_stages=4,
            **chain.options(),
        )
        return out
