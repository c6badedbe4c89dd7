"""The recurrences of layers with states, by their definition, and steps of random rows."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels import delta, mamba, recurrent
from windlass.kernels.batch import (
    AttentionWork,
    KVCache,
    Span,
    StepBatch,
    attention_layout,
)

CPU = torch.device("cpu")
SIZE = 4
PLAIN = SimpleNamespace(
    causal_conv=recurrent.causal_conv,
    selective_scan=mamba.selective_scan,
    delta_rule=delta.delta_rule,
    short_conv=recurrent.short_conv,
)


class Recurrence:
    """One kind of recurrent layer with its weights."""

    numbers = 1  # of a head, in the last columns of the projection

    def __init__(self, heads: RecurrentHeads, conv_bias: bool = True) -> None:
        torch.manual_seed(1)
        self.heads = heads
        self.conv = torch.randn(heads.channels, heads.conv_size)
        self.bias = torch.randn(heads.channels) if conv_bias else None
        self.decay = -torch.rand(heads.num_heads) - 0.1
        self.decay[0] = 0.05  # a state may also grow
        self.dt_bias = torch.randn(heads.num_heads)

    def outputs(self, kernels: Any, projected: torch.Tensor, *given: Any) -> torch.Tensor:
        """The kernels' result of a step."""
        mixed = kernels.causal_conv(projected, self.conv, self.bias, *given)
        return self.apply(kernels, projected, mixed, *given)

    def apply(self, kernels: Any, *given: Any) -> torch.Tensor:
        """The result of the recurrence, after the convolution."""
        raise NotImplementedError

    def token(
        self, state: torch.Tensor, gate: torch.Tensor, x: list[torch.Tensor], own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after a token, and its output; x: inputs, keys and queries of the heads."""
        raise NotImplementedError

    def by_definition(self, projected: torch.Tensor) -> torch.Tensor:
        """One row from its first token on, token by token."""
        heads = self.heads
        gate, inputs, own = projected.split([heads.inner, heads.channels, self._width], dim=-1)
        padded = functional.pad(inputs, (0, 0, heads.conv_size - 1, 0))
        state = torch.zeros(heads.num_heads, heads.dim, heads.state_size)
        out = []
        for t in range(len(projected)):
            mixed = (padded[t : t + heads.conv_size] * self.conv.T).sum(0)
            mixed = functional.silu(mixed if self.bias is None else mixed + self.bias)
            parts = [heads.inner, heads.group_features, heads.group_features]
            v, *shared = mixed.split(parts)
            k, q = (each.view(heads.num_groups, -1)[self._groups] for each in shared)
            x = [v.view(heads.num_heads, heads.dim), k, q]
            state, y = self.token(state, gate[t].view(heads.num_heads, -1), x, own[t])
            out.append(y.flatten())
        return torch.stack(out)

    @property
    def _groups(self) -> list[int]:
        """The group of each head."""
        heads = self.heads
        shared = heads.num_heads // heads.num_groups
        return [
            head % heads.num_groups if heads.tiled else head // shared
            for head in range(heads.num_heads)
        ]

    @property
    def _width(self) -> int:
        return self.numbers * self.heads.num_heads

    def rows(self, *counts: int) -> list[torch.Tensor]:
        torch.manual_seed(2)
        return [torch.randn(count, self.num_projected) for count in counts]

    @property
    def num_projected(self) -> int:
        return self.heads.inner + self.heads.channels + self._width

    def step(
        self,
        rows: list[tuple[int, int, torch.Tensor]],
        cache: KVCache,
        layer: int,
        kernels: Any = PLAIN,
        **options: Any,
    ) -> tuple[torch.Tensor, StepBatch]:
        """Compute rows of (slot, first position, projected tokens) in one batch."""
        spans, positions, slots = [], [], []
        for slot, start, projected in rows:
            spans.append(Span(len(positions), len(projected), start))
            positions += range(start, start + len(projected))
            slots += [slot] * len(projected)
        if kernels is not PLAIN and "work" not in options:
            options["work"] = _work_of(rows, spans, options.get("batch_invariant", False))
        tables = torch.arange(2 * 3 * 8, dtype=torch.int32).view(3, 2, 8)
        batch = StepBatch(
            positions=torch.tensor(positions, dtype=torch.int32),
            token_slots=torch.tensor(slots, dtype=torch.int32),
            tables=tables.transpose(0, 1).contiguous(),
            spans=spans,
            kv=cache.layers,
            **options,
        )
        projected = torch.cat([each for _, _, each in rows])
        given = self.heads, batch.state_of(layer), batch
        return self.outputs(kernels, projected, *given), batch

    def in_steps(self, cuts: list[int], *counts: int, **options: Any) -> list[torch.Tensor]:
        """The results of rows that start together, cut into steps."""
        rows, cache = self.rows(*counts), self.cache(48)
        got: list[list[torch.Tensor]] = [[] for _ in rows]
        for start, stop in pairwise(cuts):
            parts = [
                (slot, start, row[start:stop]) for slot, row in enumerate(rows) if len(row) > start
            ]
            out, batch = self.step(parts, cache, layer=2, **options)
            for span, (slot, _, _) in zip(batch.spans, parts, strict=True):
                got[slot].append(out[span.first : span.first + span.count])
        return [torch.cat(own) for own in got]

    def cache(self, num_blocks: int) -> KVCache:
        """Two layers with states around one with attention."""
        layout = attention_layout(
            (None, None, None),
            num_kv_heads=2,
            dim=8,
            block_size=SIZE,
            dtype=torch.float16,
            states=dict.fromkeys((0, 2), self.heads.num_values),
        )
        cache = KVCache(layout, num_blocks, torch.float16, CPU)
        cache._owned[0].fill_(0x7F)  # NaN: no kernel reads a state that was not written
        return cache


class MambaScan(Recurrence):
    """Mamba-2."""

    def __init__(self, heads: RecurrentHeads) -> None:
        super().__init__(heads)
        self.skip = torch.randn(heads.num_heads)

    def apply(self, kernels: Any, *given: Any) -> torch.Tensor:
        projected, mixed, *others = given
        weights = mamba.ScanWeights(decay=self.decay, skip=self.skip, dt_bias=self.dt_bias)
        return kernels.selective_scan(projected, mixed, weights, *others)

    def token(
        self, state: torch.Tensor, gate: torch.Tensor, x: list[torch.Tensor], own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        v, b, c = x
        dt = functional.softplus(own + self.dt_bias)
        state = state * torch.exp(dt * self.decay)[:, None, None]
        state = state + (dt[:, None] * v)[..., None] * b[:, None]
        y = (state * c[:, None]).sum(-1) + self.skip[:, None] * v
        return state, y * functional.silu(gate)


class DeltaRule(Recurrence):
    """The gated delta rule."""

    numbers = 2

    def __init__(self, heads: RecurrentHeads) -> None:
        super().__init__(heads, conv_bias=False)
        self.norm = torch.rand(heads.dim) + 0.5

    def apply(self, kernels: Any, *given: Any) -> torch.Tensor:
        projected, mixed, *others = given
        weights = delta.DeltaWeights(
            decay=self.decay, dt_bias=self.dt_bias, norm=self.norm, eps=1e-5
        )
        return kernels.delta_rule(projected, mixed, weights, *others)

    def token(
        self, state: torch.Tensor, gate: torch.Tensor, x: list[torch.Tensor], own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        v, k, q = x
        k, q = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (k, q))
        beta, dt = own.chunk(2)
        state = (
            state * torch.exp(functional.softplus(dt + self.dt_bias) * self.decay)[:, None, None]
        )
        added = beta.sigmoid()[:, None] * (v - (state * k[:, None]).sum(-1))
        state = state + added[..., None] * k[:, None]
        y = (state * q[:, None]).sum(-1) * self.heads.state_size**-0.5
        y = functional.rms_norm(y, y.shape[-1:], self.norm, 1e-5)
        return state, y * functional.silu(gate)


class ShortConv(Recurrence):
    """The gated short convolution."""

    def __init__(self, channels: int, conv_size: int = 3, conv_bias: bool = True) -> None:
        super().__init__(RecurrentHeads.of_conv(channels, conv_size), conv_bias)

    @property
    def num_projected(self) -> int:
        return 3 * self.heads.channels

    def outputs(self, kernels: Any, projected: torch.Tensor, *given: Any) -> torch.Tensor:
        return kernels.short_conv(projected, self.conv, self.bias, *given)

    def by_definition(self, projected: torch.Tensor) -> torch.Tensor:
        b, c, x = projected.chunk(3, dim=-1)
        size = self.heads.conv_size
        padded = functional.pad(b * x, (0, 0, size - 1, 0))
        mixed = (padded.unfold(0, size, 1) * self.conv).sum(-1)
        return c * (mixed if self.bias is None else mixed + self.bias)


def _work_of(
    rows: list[tuple[int, int, torch.Tensor]], spans: list[Span], batch_invariant: bool
) -> AttentionWork:
    """Tiles of 3 tokens, in any order, and one of padding."""
    singles = [span.first for span in spans if span.count == 1 and not batch_invariant]
    tiles = [
        (span.first + at, min(3, span.count - at), slot, span.start + at, span.start)
        for span, (slot, _, _) in zip(spans, rows, strict=True)
        if span.count > 1 or batch_invariant
        for at in range(0, span.count, 3)
    ]
    return AttentionWork(
        singles=torch.tensor(singles, dtype=torch.int32),
        tiles=torch.tensor([*tiles[::-1], (0, 0, 0, 0, 0)], dtype=torch.int32),
        splits=1,
        counters=torch.zeros(1, dtype=torch.int32),
    )


def heads_of(
    num_heads: int, dim: int, num_groups: int, conv_size: int = 4, tiled: bool = False
) -> RecurrentHeads:
    """Heads with keys of 16 numbers."""
    return RecurrentHeads(
        num_heads=num_heads,
        dim=dim,
        num_groups=num_groups,
        state_size=16,
        conv_size=conv_size,
        tiled=tiled,
    )


MAMBA = MambaScan(heads_of(4, 8, 2))
DELTA = DeltaRule(heads_of(4, 8, 2))
KINDS = {
    "mamba": MAMBA,
    "delta": DELTA,
    "tiled": DeltaRule(heads_of(6, 8, 2, tiled=True)),
    "short conv": ShortConv(72),
    "short conv without bias": ShortConv(16, conv_size=4, conv_bias=False),
}
