"""The experts of a layer as linear layers, so that each can be calibrated and quantised by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.reference_experts import activate, route
from windlass.layers.linear import Linear
from windlass.models.hparams import HParams
from windlass.parallel.mesh import SingleRank
from windlass.quant.base import LinearMethod
from windlass.quant.shard import Shard


class Experts(nn.Module):
    """Takes the place of `layers/moe.py:Experts`; its linear layers have the same parts."""

    def __init__(self, hparams: HParams, method: LinearMethod) -> None:
        super().__init__()
        assert hparams.moe is not None
        self._moe = moe = hparams.moe
        hidden, inner = hparams.hidden_size, moe.intermediate_size
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.correction_bias:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(moe.routing.num_experts), requires_grad=False
            )
        bias = torch.float32 if moe.expert_bias else None
        for i in range(moe.routing.num_experts):
            first = {f"{i}.{part}": Shard(inner) for part in ("gate_proj", "up_proj")}
            if moe.activation.interleaved:
                first = {f"{i}.gate_up_proj": Shard(2 * inner)}
            gate_up = Linear(first, Shard(hidden), method=method, group=SingleRank(), bias=bias)
            second = {f"{i}.down_proj": Shard(hidden)}
            down = Linear(second, Shard(inner), method=method, group=SingleRank(), bias=bias)
            self.add_module(f"gate_up_{i}", gate_up)
            self.add_module(f"down_{i}", down)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The names of both projections of each expert."""
        return [(f"gate_up_{i}", f"down_{i}") for i in range(self._moe.routing.num_experts)]

    @property
    def can_fold(self) -> bool:
        """Whether the input of an expert's second projection is linear in one half of the first's output."""
        return self._moe.activation.kind != "clamped"

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        scales, chosen = route(logits, self.e_score_correction_bias, self._moe.routing)
        out = torch.zeros_like(x)
        for expert, (first, second) in enumerate(self.pairs):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                gate_up, down = self.get_submodule(first), self.get_submodule(second)
                y = down(activate(gate_up(x[tokens]), self._moe.activation))
                out.index_add_(0, tokens, y * scales[tokens, places, None])
        return out
