"""Operations beside the products on the CPU, by the native library, in float32.

Each has the contract of its namesake in reference.py. A row's result is the same to the bit whatever
rows are beside it, and however a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.native.commands import STORED_AS, Call, Op, Step
from windlass.kernels.native.pool import Pool, shared_pool

_NO_WINDOW = 0


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a float32 or 16-bit table, in float32."""
    out = torch.empty(len(ids), table.shape[1])
    given = ids.to(torch.int32).contiguous()
    sizes = (table.shape[1], STORED_AS[table.dtype])
    step = Step(num_tokens=len(ids), ids=given.data_ptr())
    shared_pool().run(Call(Op.EMBED, len(ids), (out,), (table, None), sizes), step)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1]
    shared_pool().run(
        Call(Op.NORM, x.numel() // width, (x.contiguous(), out), (weight,), (width,), (eps,))
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Changes the residual in place."""
    out = torch.empty_like(x)
    rows, width = x.shape
    shared_pool().run(
        Call(Op.ADD_NORM, rows, (x.contiguous(), residual, out), (weight,), (width,), (eps,))
    )
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    shared_pool().run(Call(Op.SILU_MUL, rows, (gate_up.contiguous(), out), (), (width,)))
    return out


def rope_write(
    qkv: Tensor,
    heads: Heads,
    cos_sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    kv: LayerKV,
    batch: StepBatch,
) -> Tensor:
    tokens = qkv.shape[0]
    out = torch.empty(tokens, heads.num_q, heads.dim)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    fixed = (cos_sin, q_weight, k_weight, *_pages(kv))
    sizes = (*_heads(heads, kv), cos_sin.shape[1])
    call = Call(Op.ROPE, tokens, (qkv.contiguous(), out), fixed, sizes, (eps,))
    _run(shared_pool(), call, batch)
    return out


def attention(
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """`soft_cap` must be None."""
    assert soft_cap is None
    out = torch.empty_like(queries)
    tokens, num_q, dim = queries.shape
    heads = Heads(num_q, kv.keys.shape[1], dim)
    sizes = (*_heads(heads, kv), window or _NO_WINDOW)
    moving = (queries.contiguous(), out)
    _run(shared_pool(), Call(Op.ATTEND, tokens, moving, _pages(kv), sizes, (scale,)), batch)
    return out


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], for rows of floats."""
    out = torch.empty(len(rows), x.shape[1])
    places = rows.to(torch.int32).contiguous()
    step = Step(num_sampled=len(rows), sampled=places.data_ptr())
    shared_pool().run(Call(Op.GATHER, len(rows), (x, out), (), (x.shape[1],)), step)
    return out


def argmax(x: Tensor) -> Tensor:
    """The place of each row's largest number, the first of equals: int32."""
    out = torch.empty(x.shape[0], dtype=torch.int32)
    shared_pool().run(Call(Op.ARGMAX, x.shape[0], (x.contiguous(), out), (), (x.shape[1],)))
    return out


def sample(logits: Tensor, params: Tensor, keys: Tensor) -> Tensor:
    """As runner/filters.py's draw: int32."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int32)
    shared_pool().run(Call(Op.SAMPLE, rows, (logits.contiguous(), out), (params, keys), (width,)))
    return out


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A batch as the library reads it, and the tensors that it points into."""

    step: Step
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, batch: StepBatch) -> BatchStep:
        positions = batch.positions.to(torch.int32).contiguous()
        slots = batch.token_slots.to(torch.int32).contiguous()
        tables = batch.tables.to(torch.int32).contiguous()
        spans = [
            (span.first, span.count, span.start, int(slots[span.first])) for span in batch.spans
        ]
        rows = torch.tensor(spans, dtype=torch.int32)
        step = Step(
            num_tokens=len(positions),
            num_rows=len(spans),
            table_stride=tables.shape[1],
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            tables=tables.data_ptr(),
            rows=rows.data_ptr(),
        )
        return cls(step, (positions, slots, tables, rows))


@contextmanager
def prompts_apart(batch: StepBatch) -> Iterator[None]:
    """While it lasts, the products of a network know which tokens of the batch are of prompts."""
    prompts = torch.tensor(batch.prompts, dtype=torch.int32)
    logits_indices = (
        batch.positions[:0] if batch.logits_indices is None else batch.logits_indices.tokens
    )
    step = Step(
        num_tokens=len(batch.positions),
        num_sampled=len(logits_indices),
        num_prompts=len(batch.prompts),
        sampled=logits_indices.data_ptr(),
        prompts=prompts.data_ptr(),
    )
    with shared_pool().in_network(step):
        yield


def _run(pool: Pool, call: Call, batch: StepBatch) -> None:
    if pool.is_recording:
        pool.run(call)
        return
    given = BatchStep.of(batch)
    pool.run(call, given.step)


def _heads(heads: Heads, kv: LayerKV) -> tuple[int, ...]:
    return heads.num_q, heads.num_kv, heads.dim, kv.block_size, STORED_AS[kv.keys.dtype]


def _pages(kv: LayerKV) -> tuple[Tensor | None, ...]:
    return kv.keys, kv.values, kv.key_scales, kv.value_scales
