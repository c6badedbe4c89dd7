"""An adapter as it lies in host memory, whoever read it and wherever it will be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Low(NamedTuple):
    """The change of one weight: up @ down, scaled already, or up @ diag(scales) @ down of codes."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scales: Tensor | None = None  # [rank] float32, where the matrices are int8 codes


@dataclass(frozen=True, slots=True)
class Adapter:
    """Changes by the names of modules in the checkpoint: `model.layers.0.self_attn.q_proj`."""

    name: str
    modules: Mapping[str, Low]
    # All of them in one piece, as a bank packs them.
    packed: Tensor | None = None

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(low.down.shape[0] for low in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """Of the matrices."""
        return sum(low.down.nbytes + low.up.nbytes for low in self.modules.values())
