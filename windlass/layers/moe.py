"""Mixture-of-experts MLP: a router, the experts that it chooses, and an expert that all tokens use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.moe import ExpertActivation, ExpertPlacement, Routing
from windlass.kernels.batch import AdapterRows
from windlass.kernels.experts import ExpertKernels, ExpertWeights, PreparedExperts
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.kernels.packed import Packed
from windlass.kernels.storages import Held
from windlass.kernels.token_split import TokenSplit
from windlass.layers.expert_combine import ExpertCombine, ExpertSpread
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.mlp import GatedMLP, PlainMLP
from windlass.layers.norm import RMSNorm
from windlass.layers.stored import StoredWeight
from windlass.parallel.mesh import Mesh
from windlass.quant.base import LinearMethod
from windlass.quant.shard import Shard


class ExpertStack(StoredWeight):
    """One projection of a rank's experts, stacked along the outputs in one packed form."""

    def __init__(
        self,
        outputs: dict[str, Shard],
        inputs: Shard,
        method: LinearMethod,
        *,
        finished: Callable[[], None],
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        super().__init__(outputs, inputs, method)
        self._dtype = dtype
        self.form: Packed | Tensor | None = None
        self.prepared: PreparedExperts | None = None  # of the stack that is finished last
        self._finished = finished
        if bias:
            num_out = sum(self.parts.values())
            self.bias = nn.Parameter(torch.empty(num_out, dtype=dtype), requires_grad=False)

    def finish(self) -> None:
        """Keep the packed form; experts of different formats have none, and are dequantised."""
        forms = self.method.forms(self)
        if len(forms) == 1:
            (self.form,) = forms
        else:
            dense = [form if isinstance(form, Tensor) else form.dequantise() for form in forms]
            self.form = torch.cat([form.to(self._dtype) for form in dense])
        self._finished()

    def storages(self) -> Iterator[Held]:
        if self.prepared is not None:
            yield from self.prepared.mlp.storages()

    @property
    def gemm_bytes(self) -> int:
        return 0 if self.prepared is None else self.prepared.mlp.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Sizes and options of one mixture-of-experts layer."""

    hidden_size: int
    intermediate_size: int
    routing: Routing
    activation: ExpertActivation
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    jitter: float | None = None
    expert_scales: bool = False  # a stored weight of each expert's results
    scales_inputs: bool = False  # by the sigmoid of a token's largest logit; top_k is 1


class Experts(nn.Module):
    """The weights of a rank's experts. They are prepared for a kernel when the last of them is loaded.

    A rank holds whole experts, those of the placement, or a part of each if mesh.ep has one rank.
    """

    def __init__(
        self,
        shape: MoEShape,
        method_for: MethodFor,
        kernels: ExpertKernels,
        mesh: Mesh,
        placement: ExpertPlacement,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._shape = shape
        self._kernels = kernels
        self.routing = shape.routing
        self._local = placement.ranks[mesh.ep.rank]
        hidden, group = Shard(shape.hidden_size), mesh.expert_tp
        self._rank = group.rank
        inner = Shard.even(shape.intermediate_size, group)
        first = {"gate_proj": inner, "up_proj": inner}
        if not shape.activation.has_gate:
            first = {"up_proj": inner}
        if shape.activation.interleaved:
            first = {"gate_up_proj": Shard.even(2 * shape.intermediate_size, group, unit=2)}
        gate_up = {f"{i}.{part}": shard for i in self._local for part, shard in first.items()}
        down = {f"{i}.down_proj": hidden for i in self._local}
        stack = partial(ExpertStack, finished=self._prepare, dtype=dtype, bias=shape.expert_bias)
        # Parameters of this module, so that they are loaded before the stacks.
        self.e_score_correction_bias: nn.Parameter | None = None
        if shape.correction_bias:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(shape.routing.num_experts, dtype=torch.float32), requires_grad=False
            )
        self.per_expert_scale: nn.Parameter | None = None
        if shape.expert_scales:
            self.per_expert_scale = nn.Parameter(
                torch.empty(shape.routing.num_experts, dtype=torch.float32), requires_grad=False
            )
        self.gate_up = stack(gate_up, hidden, method_for(gate_up))
        self.down = stack(down, inner, method_for(down))
        others = [i for i in range(placement.num_experts) if i not in self._local]
        self.gate_up.elsewhere = {f"{i}.{part}" for i in others for part in first}
        self.down.elsewhere = {f"{i}.down_proj" for i in others}

    def _prepare(self) -> None:
        gate_up, down = self.gate_up, self.down
        if gate_up.form is None or down.form is None:
            return
        shape, count = self._shape, len(self._local)
        all_local = self._local == tuple(range(shape.routing.num_experts))
        weights = ExpertWeights(
            gate_up=gate_up.form,
            down=down.form,
            routing=shape.routing,
            experts=None if all_local else self._local,
            activation=shape.activation,
            correction_bias=self.e_score_correction_bias,
            expert_scales=self.per_expert_scale,
            gate_up_bias=None if gate_up.bias is None else gate_up.bias.view(count, -1),
            # The ranks' results are summed, so one of them adds the bias.
            down_bias=None if down.bias is None or self._rank > 0 else down.bias.view(count, -1),
        )
        gate_up.form = down.form = None
        down.prepared = self._kernels.prepare(weights)

    @property
    def num_bytes(self) -> int:
        return self.down.gemm_bytes

    @property
    def load(self) -> Tensor | None:
        """Tokens per expert since the start, int64 [E]; None: they are not counted."""
        return None if self.down.prepared is None else self.down.prepared.load

    @property
    def num_active_weights(self) -> int:
        """Weights of this rank that a token is multiplied with, on average."""
        stacks = (self.gate_up, self.down)
        total = sum(sum(stack.parts.values()) * stack.num_in for stack in stacks)
        return total * self.routing.top_k // self.routing.num_experts

    def forward(self, x: Tensor, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        """This rank's part of the result; see ExpertMLP.apply."""
        assert self.down.prepared is not None
        return self.down.prepared.mlp.apply(x, logits, chosen)


class MoE(nn.Module):
    """The weighted sum of the chosen experts, added to the residual stream and normalised.

    LoRA adapters do not change experts; lora/ refuses adapters that contain them.
    """

    def __init__(
        self,
        shape: MoEShape,
        method_for: MethodFor,
        kernels: ExpertKernels,
        ops: Ops,
        mesh: Mesh,
        spread: ExpertSpread,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.ops = ops
        assert not shape.scales_inputs or shape.routing.top_k == 1
        self._jitter = shape.jitter
        self._scales_inputs = shape.scales_inputs
        group = mesh.tp
        self.gate = Linear(
            outputs={"gate": Shard(shape.routing.num_experts)},
            inputs=Shard(shape.hidden_size),
            method=method_for(["gate"]),
            group=group,
            bias=dtype if shape.router_bias else None,
        )
        self.experts = Experts(
            shape,
            lambda parts: method_for([f"experts.{part}" for part in parts]),
            kernels=kernels,
            mesh=mesh,
            placement=spread.placement,
            dtype=dtype,
        )
        self.combine = ExpertCombine(
            mesh, spread, shape.routing, row_bytes=shape.hidden_size * dtype.itemsize
        )
        self.shared_expert: GatedMLP | PlainMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if shape.shared_intermediate_size:
            kind = shape.activation.kind
            mlp = partial(GatedMLP) if kind != "relu2" else partial(PlainMLP, activation=kind)
            self.shared_expert = mlp(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.shared_intermediate_size,
                method_for=lambda parts: method_for([f"shared_expert.{part}" for part in parts]),
                ops=ops,
                group=group,
            )
        if shape.shared_gate:
            self.shared_expert_gate = Linear(
                outputs={"shared_expert_gate": Shard(1)},
                inputs=Shard(shape.hidden_size),
                method=method_for(["shared_expert_gate"]),
                group=group,
            )

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        norm: Norm,
        adapters: AdapterRows | None = None,
        split: TokenSplit | None = None,
    ) -> tuple[Inputs, Tensor]:
        """x has all tokens; with `split`, the residual stream and the results have this rank's."""
        unquantised = adapters is not None or (split is not None and split.is_unquantised(norm))
        return norm.add(self.output(x, adapters, split), residual, unquantised)

    def output(
        self, x: Inputs, adapters: AdapterRows | None = None, split: TokenSplit | None = None
    ) -> Tensor:
        """The result, without residual addition and norm."""
        assert isinstance(x, Tensor)  # the norm before a router does not quantise
        return self.routed(x, self.gate(x, adapters), adapters, split)

    def routed(
        self,
        x: Tensor,
        logits: Tensor,
        adapters: AdapterRows | None = None,
        split: TokenSplit | None = None,
    ) -> Tensor:
        """The result for the router's logits."""
        if self._jitter is not None:
            logits = self.ops.sparse_mixer(logits, self._jitter)
        inputs = self.ops.scale_by_top_score(x, logits) if self._scales_inputs else x
        y = self.combine(self.experts, inputs, logits, split)
        if self.shared_expert is None:
            return y
        shared = self.shared_expert.output(x, adapters, split)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(x, adapters)
            shared = self.ops.sigmoid_gate(shared, gate if split is None else split.own(gate))
        return y + shared


class MoEBesideMLP(MoE):
    """A mixture of experts that reads the residual stream beside a dense MLP (Gemma 4).

    The router, the experts' inputs and both outputs have norms of their own.
    """

    def __init__(self, *, norms: Callable[[], RMSNorm], shape: MoEShape, **options: Any) -> None:
        super().__init__(shape=shape, **options)
        self.router_norm, self.input_norm = norms(), norms()
        self.dense_norm, self.output_norm = norms(), norms()
        self._router_scale = shape.hidden_size**-0.5

    def beside(
        self,
        dense: Tensor,
        residual: Tensor,
        adapters: AdapterRows | None,
        split: TokenSplit | None,
    ) -> Tensor:
        """The sum of both outputs, normalised; with `split`, of this rank's tokens, as are the inputs."""
        x, to_route = self.input_norm(residual), self.router_norm(residual) * self._router_scale
        if split is not None:
            x, to_route = (split.gather_rows(each) for each in (x, to_route))
        y = self.routed(x, self.gate(to_route, adapters), adapters, split)
        return self.dense_norm(dense) + self.output_norm(y)
