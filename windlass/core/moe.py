"""Hyper-parameters of mixtures of experts that kernels and config readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses the experts of a token, and their weights.

    Scores are the softmax or the sigmoid of the logits. Experts are chosen by score plus the
    correction bias, if there is one; weights are the scores of the chosen, without the bias.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = False  # divide the weights of a token by their sum
    scale: float = 1.0  # of the weights, after normalising
    num_groups: int = 1  # experts are chosen from the best `top_groups` groups
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # top2: the sum of a group's best two

    def share_read(self, num_tokens: int) -> float:
        """The expected share of experts that some of the tokens choose, if all are equally likely."""
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """The function between the GEMMs, of an expert's gate and up outputs, or of up alone.

    silu and gelu_tanh: f(gate) * up. clamped: gate * sigmoid(alpha * gate) * (up + 1), with gate
    limited to `limit` from above and up to [-limit, limit] (gpt-oss). relu2: the square of max(up, 0);
    there is no gate.
    """

    kind: Literal["silu", "gelu_tanh", "clamped", "relu2"] = "silu"
    interleaved: bool = False  # rows of gate_up alternate: gate 0, up 0, gate 1, ...
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def has_gate(self) -> bool:
        return self.kind != "relu2"


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of one layer that each rank holds; the ranks' numbers of experts differ by at most one."""

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = [expert for rank in self.ranks for expert in rank]
        sizes = [len(rank) for rank in self.ranks]
        if sorted(held) != list(range(len(held))):
            raise ConfigError(
                f"an expert placement must have each of its {len(held)} experts once, numbered from "
                f"0; it has {sorted(held)}."
            )
        if min(sizes) == 0 or max(sizes) - min(sizes) > 1:
            raise ConfigError(
                f"the ranks of an expert placement hold {sizes} experts. Each needs at least one, and "
                "the numbers may differ by at most one."
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Neighbouring experts on one rank."""
        if num_ranks > num_experts:
            raise ConfigError(
                f"{num_experts} experts cannot be spread over {num_ranks} ranks: each needs at least "
                "one. Choose fewer ranks, or omit --enable-expert-parallel."
            )
        ends = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
        return cls(tuple(tuple(range(*ends[rank : rank + 2])) for rank in range(num_ranks)))

    @property
    def num_experts(self) -> int:
        return sum(len(rank) for rank in self.ranks)
