"""Hyper-parameters of mixtures of experts that kernels and config readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    """The function between the GEMMs, of an expert's gate and up outputs.

    silu and gelu_tanh: f(gate) * up. clamped: gate * sigmoid(alpha * gate) * (up + 1), with gate
    limited to `limit` from above and up to [-limit, limit] (gpt-oss).
    """

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    interleaved: bool = False  # rows of gate_up alternate: gate 0, up 0, gate 1, ...
    alpha: float = 1.702
    limit: float = 7.0
