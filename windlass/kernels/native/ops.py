"""CPU operations other than GEMMs by the native library, in float32.

Each has the contract of its namesake in reference.py. A row's result is bit-identical in any batch and
with any prefill chunking.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, LayerState, StepBatch
from windlass.kernels.delta import DeltaWeights
from windlass.kernels.latent import LatentWeights
from windlass.kernels.mamba import ScanWeights
from windlass.kernels.native.commands import TYPE_OF, Call, MapFunction, Op, RopeFlag, Step, Type
from windlass.kernels.native.pool import Pool
from windlass.kernels.reference import MIXER_LIMIT, ActivationKind

_NO_WINDOW = 0
_NO_SOFT_CAP = 0.0


class NativeOps:
    """The operations on one engine's pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def embedding(self, ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
        """Return rows of a float32 or 16-bit table, in float32."""
        out = torch.empty(len(ids), table.shape[1])
        ids32 = ids.to(torch.int32).contiguous()
        shard = () if first is None else (first, len(table))
        sizes = (table.shape[1], TYPE_OF[table.dtype], *shard)
        step = Step(num_tokens=len(ids), ids=ids32.data_ptr())
        call = Call(
            Op.EMBED, len(ids), step_tensors=(out,), model_tensors=(table, None), sizes=sizes
        )
        self.pool.run(call, step)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, groups: int = 1) -> Tensor:
        out = torch.empty_like(x)
        size = x.shape[-1]
        call = Call(
            Op.NORM,
            x.numel() // size,
            step_tensors=(x.contiguous(), out),
            model_tensors=(weight,),
            sizes=(size,) if groups == 1 else (size // groups, size, 0, groups),
            scalars=(eps,),
        )
        self.pool.run(call)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Update the residual in place."""
        out = torch.empty_like(x)
        rows, width = x.shape
        call = Call(
            Op.ADD_NORM,
            rows,
            step_tensors=(x.contiguous(), residual, out),
            model_tensors=(weight,),
            sizes=(width,),
            scalars=(eps,),
        )
        self.pool.run(call)
        return out, residual

    def qk_norm(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
        """Update qkv in place."""
        qkv = qkv.contiguous()
        rows, stride = qkv.shape
        for weight, column in ((q_weight, 0), (k_weight, len(q_weight))):
            call = Call(
                Op.NORM,
                rows,
                step_tensors=(qkv, qkv),
                model_tensors=(weight,),
                sizes=(len(weight), stride, column),
                scalars=(eps,),
            )
            self.pool.run(call)
        return qkv

    def value_norm(self, qkv: Tensor, heads: Heads, weight: Tensor, eps: float) -> Tensor:
        """Update qkv in place."""
        first = (heads.num_q + heads.num_kv) * heads.dim
        return self._norm_columns(qkv.contiguous(), weight, eps, first)

    def group_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Update x in place."""
        return self._norm_columns(x.contiguous(), weight, eps)

    def _norm_columns(self, x: Tensor, weight: Tensor, eps: float, first: int = 0) -> Tensor:
        """Normalise each group of columns from the first on, as many as the weight has."""
        rows, stride = x.shape
        for column in range(first, stride, len(weight)):
            call = Call(
                Op.NORM,
                rows,
                step_tensors=(x, x),
                model_tensors=(weight,),
                sizes=(len(weight), stride, column),
                scalars=(eps,),
            )
            self.pool.run(call)
        return x

    def mul_columns(self, x: Tensor, y: Tensor, first: int) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        call = Call(
            Op.MUL_COLUMNS,
            rows,
            step_tensors=(x.contiguous(), y.contiguous(), out),
            sizes=(width, y.shape[1], first),
        )
        self.pool.run(call)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        call = Call(Op.SILU_MUL, rows, step_tensors=(gate_up.contiguous(), out), sizes=(width,))
        self.pool.run(call)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        call = Call(
            Op.LAYER_NORM,
            x.numel() // width,
            step_tensors=(x.contiguous(), out),
            model_tensors=(weight, bias),
            sizes=(width,),
            scalars=(eps,),
        )
        self.pool.run(call)
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Update the residual in place."""
        out = torch.empty_like(x)
        rows, width = x.shape
        call = Call(
            Op.ADD_LAYER_NORM,
            rows,
            step_tensors=(x.contiguous(), residual, out),
            model_tensors=(weight, bias),
            sizes=(width,),
            scalars=(eps,),
        )
        self.pool.run(call)
        return out, residual

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        call = Call(Op.GELU_MUL, rows, step_tensors=(gate_up.contiguous(), out), sizes=(width,))
        self.pool.run(call)
        return out

    def activate(self, x: Tensor, kind: ActivationKind) -> Tensor:
        return self._map(x, MapFunction[kind.upper()])

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return self._map(x, MapFunction.SOFT_CAP, cap)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._sigmoid_gate(x, gate)

    def scale_by_top_score(self, x: Tensor, logits: Tensor) -> Tensor:
        return self._sigmoid_gate(x, logits, largest=True)

    def _sigmoid_gate(self, x: Tensor, gate: Tensor, largest: bool = False) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width)
        call = Call(
            Op.SIGMOID_GATE,
            rows,
            step_tensors=(x.contiguous(), gate.contiguous(), out),
            sizes=(width, gate.shape[1], int(largest)),
        )
        self.pool.run(call)
        return out

    def split_gates(self, qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        inner = heads.num_q * heads.dim
        rows, width = qkv.shape
        out, gates = torch.empty(rows, width - inner), torch.empty(rows, inner)
        call = Call(
            Op.SPLIT_GATES,
            rows,
            step_tensors=(qkv.contiguous(), out, gates),
            sizes=(heads.num_q, heads.dim, width - 2 * inner),
        )
        self.pool.run(call)
        return out, gates

    def sparse_mixer(self, logits: Tensor, jitter: float) -> Tensor:
        rows, width = logits.shape
        out = torch.empty(rows, width)
        call = Call(
            Op.SPARSE_MIXER,
            rows,
            step_tensors=(logits.contiguous(), out),
            sizes=(width,),
            scalars=(jitter, MIXER_LIMIT),
        )
        self.pool.run(call)
        return out

    def _map(self, x: Tensor, function: MapFunction, constant: float = 0.0) -> Tensor:
        out = torch.empty_like(x)
        call = Call(
            Op.MAP,
            x.shape[0],
            step_tensors=(x.contiguous(), out),
            sizes=(x.shape[1], function),
            scalars=(constant,),
        )
        self.pool.run(call)
        return out

    def rope_write(
        self,
        qkv: Tensor,
        heads: Heads,
        options: RopeOptions,
        kv: LayerKV,
        batch: StepBatch,
    ) -> Tensor:
        norms, flags = options.norms, _rope_flags(options)
        tokens = qkv.shape[0]
        out = torch.empty(tokens, heads.num_q, heads.dim)
        q_weight, k_weight, eps = (norms.q, norms.k, norms.eps) if norms else (None, None, 0.0)
        call = Call(
            Op.ROPE,
            tokens,
            step_tensors=(qkv.contiguous(), out),
            model_tensors=(options.cos_sin, q_weight, k_weight, *_pages(kv)),
            sizes=(*_heads(heads, kv, batch), options.rotated, flags),
            scalars=(eps,),
        )
        self._run(call, batch)
        return out

    def rotate_queries(
        self, q: Tensor, heads: Heads, options: RopeOptions, batch: StepBatch
    ) -> Tensor:
        tokens, norms = q.shape[0], options.norms
        out = torch.empty(tokens, heads.num_q, heads.dim)
        no_pages = (1, Type.F32, 0, 0)
        call = Call(
            Op.ROPE,
            tokens,
            step_tensors=(q.contiguous(), out),
            model_tensors=(options.cos_sin, None if norms is None else norms.q),
            sizes=(heads.num_q, 0, heads.dim, *no_pages, options.rotated, _rope_flags(options)),
            scalars=(0.0 if norms is None else norms.eps,),
        )
        self._run(call, batch)
        return out

    def attention(
        self, queries: Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        out = torch.empty_like(queries)
        tokens, num_q, dim = queries.shape
        heads = Heads(num_q, kv.keys.shape[1], dim)
        call = Call(
            Op.ATTENTION,
            tokens,
            step_tensors=(queries.contiguous(), out),
            model_tensors=(*_pages(kv), options.sinks),
            sizes=(
                *_heads(heads, kv, batch),
                options.window or _NO_WINDOW,
                int(options.chunked),
            ),
            scalars=(options.scale, options.soft_cap or _NO_SOFT_CAP),
        )
        self._run(call, batch)
        return out

    def latent_queries(
        self,
        projected: Tensor,
        q: Tensor,
        heads: LatentHeads,
        weights: LatentWeights,
        cos_sin: Tensor,
        kv: LayerKV,
        batch: StepBatch,
    ) -> Tensor:
        tokens = q.shape[0]
        out = torch.empty(tokens, heads.num_q, heads.dim)
        paged = _heads(Heads(heads.num_q, 1, heads.dim), kv, batch)
        widths = (projected.shape[1], q.shape[1])
        call = Call(
            Op.LATENT,
            tokens,
            step_tensors=(projected.contiguous(), q.contiguous(), out),
            model_tensors=(cos_sin, weights.norm, *_pages(kv)),
            sizes=(*paged, heads.rope_dim, heads.nope_dim, *widths, int(heads.interleaved)),
            scalars=(weights.eps,),
        )
        self._run(call, batch)
        self._per_head(q, heads.query_dim, weights.keys, out)
        return out

    def latent_attention(
        self, queries: Tensor, kv: LayerKV, batch: StepBatch, scale: float, rank: int
    ) -> Tensor:
        """Return as many numbers as latents have: all of them are mixed."""
        del rank
        return self.attention(queries, kv, batch, AttentionOptions(scale))

    def latent_outputs(self, mixed: Tensor, weights: LatentWeights, batch: StepBatch) -> Tensor:
        del batch
        tokens, num_heads, dim = mixed.shape
        out = torch.empty(tokens, num_heads, weights.values.shape[1])
        self._per_head(mixed, dim, weights.values.mT, out)
        return out.view(tokens, -1)

    def _per_head(self, x: Tensor, x_head: int, weight: Tensor, out: Tensor) -> None:
        """Write x @ weight [heads, in, out] of each head to the first columns of `out`.

        `x_head`: columns of x between the first inputs of two heads.
        """
        tokens, _, out_head = out.shape
        num_heads, num_in, num_out = weight.shape
        w_head, w_in, w_out = weight.stride()
        rows_are_outputs = w_out != 1
        assert (w_in, w_out) == ((1, num_in) if rows_are_outputs else (num_out, 1))
        x_row = x.numel() // tokens
        strides = (x_row, x_head, num_heads * out_head, out_head, w_head)
        call = Call(
            Op.PER_HEAD,
            tokens,
            step_tensors=(x.contiguous(), out),
            model_tensors=(weight.data_ptr(),),
            sizes=(num_heads, num_in, num_out, *strides, int(rows_are_outputs)),
        )
        self.pool.run(call)

    def causal_conv(
        self,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        heads: RecurrentHeads,
        state: LayerState,
        batch: StepBatch,
    ) -> Tensor:
        tokens, width = projected.shape
        out = torch.empty(tokens, heads.channels)
        sizes = (heads.inner, heads.channels, heads.conv_size, width)
        call = Call(
            Op.CAUSAL_CONV,
            tokens,
            step_tensors=(projected.contiguous(), out),
            model_tensors=(weight, bias, state.pages.data_ptr()),
            sizes=(*sizes, *_state(state, batch), heads.num_recurrent),
        )
        self._run(call, batch)
        return out

    def short_conv(
        self,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        heads: RecurrentHeads,
        state: LayerState,
        batch: StepBatch,
    ) -> Tensor:
        tokens = projected.shape[0]
        out = torch.empty(tokens, heads.channels)
        call = Call(
            Op.SHORT_CONV,
            tokens,
            step_tensors=(projected.contiguous(), out),
            model_tensors=(weight, bias, state.pages.data_ptr()),
            sizes=(heads.channels, heads.conv_size, *_state(state, batch)),
        )
        self._run(call, batch)
        return out

    def selective_scan(
        self,
        projected: Tensor,
        mixed: Tensor,
        weights: ScanWeights,
        heads: RecurrentHeads,
        state: LayerState,
        batch: StepBatch,
    ) -> Tensor:
        tokens, width = projected.shape
        out = torch.empty(tokens, heads.inner)
        sizes = (heads.num_heads, heads.dim, heads.num_groups, heads.state_size, width)
        call = Call(
            Op.SELECTIVE_SCAN,
            tokens,
            step_tensors=(projected.contiguous(), mixed.contiguous(), out),
            model_tensors=(
                weights.decay,
                weights.skip,
                weights.dt_bias,
                state.pages.data_ptr(),
            ),
            sizes=(*sizes, *_state(state, batch)),
        )
        self._run(call, batch)
        return out

    def delta_rule(
        self,
        projected: Tensor,
        mixed: Tensor,
        weights: DeltaWeights,
        heads: RecurrentHeads,
        state: LayerState,
        batch: StepBatch,
    ) -> Tensor:
        tokens, width = projected.shape
        out = torch.empty(tokens, heads.inner)
        sizes = (heads.num_heads, heads.dim, heads.num_groups, heads.state_size, width)
        call = Call(
            Op.DELTA_RULE,
            tokens,
            step_tensors=(projected.contiguous(), mixed.contiguous(), out),
            model_tensors=(
                weights.decay,
                weights.dt_bias,
                weights.norm,
                state.pages.data_ptr(),
            ),
            sizes=(*sizes, *_state(state, batch), int(heads.tiled)),
            scalars=(weights.eps,),
        )
        self._run(call, batch)
        return out

    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows], for rows of float32."""
        out = torch.empty(len(rows), x.shape[1])
        indices = rows.to(torch.int32).contiguous()
        step = Step(num_sampled=len(rows), sampled=indices.data_ptr())
        call = Call(Op.GATHER, len(rows), step_tensors=(x, out), sizes=(x.shape[1],))
        self.pool.run(call, step)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of each row's maximum, the first of equals, as int32."""
        out = torch.empty(x.shape[0], dtype=torch.int32)
        call = Call(Op.ARGMAX, x.shape[0], step_tensors=(x.contiguous(), out), sizes=(x.shape[1],))
        self.pool.run(call)
        return out

    def sample(self, logits: Tensor, params: Tensor, keys: Tensor) -> Tensor:
        """Sample like draw in runner/filters.py; return int32."""
        rows, width = logits.shape
        out = torch.empty(rows, dtype=torch.int32)
        call = Call(
            Op.SAMPLE,
            rows,
            step_tensors=(logits.contiguous(), out),
            model_tensors=(params, keys),
            sizes=(width,),
        )
        self.pool.run(call)
        return out

    def _run(self, call: Call, batch: StepBatch) -> None:
        if self.pool.is_recording:
            self.pool.run(call)
            return
        batch_step = BatchStep.of(batch)
        self.pool.run(call, batch_step.step)


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A batch as the library reads it, with the tensors that it points into."""

    step: Step
    tensors: tuple[Tensor, ...]

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
            table_stride=tables.shape[2],
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            tables=tables.data_ptr(),
            rows=rows.data_ptr(),
        )
        return cls(step, (positions, slots, tables, rows))


@contextmanager
def prompt_spans(pool: Pool, batch: StepBatch, tokens: range | None = None) -> Iterator[None]:
    """Give GEMMs on the pool the prompt tokens of the batch, which they may quantise apart.

    `tokens`: the rows of these GEMMs; None: all tokens of the batch, or its sampled ones.
    """
    logits_indices = batch.positions[:0]
    if tokens is None:
        tokens = range(len(batch.positions))
        if batch.logits_indices is not None:
            logits_indices = batch.logits_indices.tokens
    start, stop = tokens.start, tokens.stop
    cut = [(max(first, start) - start, min(last, stop) - start) for first, last in batch.prompts]
    found = [(first, last) for first, last in cut if first < last]
    prompts = torch.tensor(found, dtype=torch.int32)
    step = Step(
        num_tokens=len(tokens),
        num_sampled=len(logits_indices),
        num_prompts=len(found),
        sampled=logits_indices.data_ptr(),
        prompts=prompts.data_ptr(),
    )
    with pool.use_step(step):
        yield


def _heads(heads: Heads, kv: LayerKV, batch: StepBatch) -> tuple[int, ...]:
    tables = kv.group * batch.tables[0].numel()
    shape = (heads.num_q, heads.num_kv, heads.dim, kv.block_size)
    return *shape, TYPE_OF[kv.keys.dtype], tables, kv.stride


def _state(state: LayerState, batch: StepBatch) -> tuple[int, ...]:
    tables = state.group * batch.tables[0].numel()
    return state.block_size, tables, state.pages.stride(0)


def _rope_flags(options: RopeOptions) -> RopeFlag:
    flags, norms = RopeFlag.INTERLEAVED if options.interleaved else RopeFlag(0), options.norms
    if norms is not None and norms.kind == "layer":
        flags |= RopeFlag.LAYER_NORM
    if norms is not None and norms.per_head:
        flags |= RopeFlag.NORM_PER_HEAD
    return flags


def _pages(kv: LayerKV) -> tuple[Tensor | int | None, ...]:
    """The addresses of the pages, which need not be adjacent, and their scales."""
    assert kv.keys[0].is_contiguous()
    return kv.keys.data_ptr(), kv.values.data_ptr(), kv.key_scales, kv.value_scales
