"""Multi-head latent attention (MLA): keys and values are projections of one latent vector per token.

The KV cache holds the latent vectors, which all heads read (kernels/latent.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.kernels.batch import StepBatch
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.latent import LatentWeights
from windlass.kernels.ops import Ops
from windlass.layers.attention import AttentionLayer
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import RMSNorm
from windlass.layers.stored import StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.dequantised import Dequantised
from windlass.quant.packed_method import PackedMethod
from windlass.quant.shard import Shard

# Of the norms of latents, in every DeepSeek model whatever its rms_norm_eps.
_LATENT_EPS = 1e-6
_LATENT = "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Sizes and options of one MLA layer."""

    hidden_size: int
    heads: LatentHeads
    scale: float  # of the scores
    q_rank: int | None  # features between the two projections of queries; None: one projection
    split_up: bool = False  # kv_b_proj is stored as k_b_proj, transposed per head, and v_b_proj


class AbsorbedWeight(StoredWeight):
    """A weight [heads, outputs of a head, inputs] that attention absorbs, dequantised at load."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        num_heads: int,
        method_for: MethodFor,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        method = method_for([name])
        if isinstance(method, PackedMethod):
            method = Dequantised(method, dtype, "absorbed into queries and outputs of attention")
        shard = Shard.even(num_heads * outputs, group, unit=outputs)
        super().__init__({name: shard}, Shard(inputs), method)
        self._outputs = outputs

    def by_head(self) -> Tensor:
        assert self.weight is not None
        return self.weight.unflatten(0, (-1, self._outputs))


class MLA(AttentionLayer):
    """Projections, RoPE, KV cache write, attention over latents and output projection.

    The output is added to the residual stream and normalised by the next norm. Ranks split the heads;
    every rank has all latents.
    """

    def __init__(
        self,
        index: int,
        shape: MLAShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.index, self.scale, self.ops = index, shape.scale, ops
        total, hidden, q_rank = shape.heads, Shard(shape.hidden_size), shape.q_rank
        q = Shard.even(total.num_q * total.query_dim, group, unit=total.query_dim)
        self.heads = replace(total, num_q=q.count // total.query_dim)

        def linear(outputs: dict[str, Shard], inputs: Shard) -> Linear:
            return Linear(outputs, inputs, method_for(outputs), group)

        first = {"q_proj": q} if q_rank is None else {"q_a_proj": Shard(q_rank)}
        self.qkv_proj = linear({**first, _LATENT: Shard(total.dim)}, hidden)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if q_rank is not None:
            self.q_a_layernorm = RMSNorm(size=q_rank, eps=_LATENT_EPS, dtype=dtype, ops=ops)
            self.q_b_proj = linear({"q_b_proj": q}, Shard(q_rank))
            self.q_a_layernorm.input_quant = self.q_b_proj.input_quant
        self.kv_a_layernorm = RMSNorm(size=total.rank, eps=_LATENT_EPS, dtype=dtype, ops=ops)
        absorbed = partial(
            AbsorbedWeight,
            num_heads=total.num_q,
            method_for=method_for,
            group=group,
            dtype=dtype,
        )
        self.kv_b_proj: AbsorbedWeight | None = None
        self.k_b_proj: AbsorbedWeight | None = None
        self.v_b_proj: AbsorbedWeight | None = None
        if shape.split_up:
            self.k_b_proj = absorbed("k_b_proj", total.rank, total.nope_dim)
            self.v_b_proj = absorbed("v_b_proj", total.value_dim, total.rank)
        else:
            self.kv_b_proj = absorbed("kv_b_proj", total.nope_dim + total.value_dim, total.rank)
        values = Shard.even(total.num_q * total.value_dim, group, unit=total.value_dim)
        self.o_proj = linear({"o_proj": hidden}, values)

    def _attended(self, x: Inputs, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """The heads' outputs of all tokens; writes their latents."""
        assert cos_sin is not None
        q = projected = self._projected(x, batch)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            low = projected[:, : self.q_b_proj.num_in]
            normed, _ = self.q_a_layernorm.add(low, None, batch.adapters is not None)
            q = self.q_b_proj(normed, batch.adapters)
        return self.ops.attend_latent(
            projected,
            q,
            self.heads,
            self._weights,
            cos_sin=cos_sin,
            kv=batch.kv_of(self.index),
            batch=batch,
            scale=self.scale,
        )

    def _projected(self, x: Inputs, batch: StepBatch) -> Tensor:
        """Latents, and queries or what `q_b_proj` makes them from, of all tokens.

        A layer of latents alone is the same on all ranks: if tokens are split, each computes its own.
        """
        if batch.split is None or batch.adapters is not None or self.q_b_proj is None:
            return self.qkv_proj(batch.all_tokens(x), batch.adapters)
        return batch.split.project(self.qkv_proj, x)

    @property
    def _weights(self) -> LatentWeights:
        joint: Tensor | None = None
        if self.k_b_proj is not None and self.v_b_proj is not None:
            keys, values = self.k_b_proj.by_head().mT, self.v_b_proj.by_head()
        else:
            assert self.kv_b_proj is not None
            joint = self.kv_b_proj.by_head()
            keys, values = joint.split([self.heads.nope_dim, self.heads.value_dim], dim=1)
        norm = self.kv_a_layernorm
        return LatentWeights(norm=norm.weight, eps=norm.eps, keys=keys, values=values, joint=joint)
