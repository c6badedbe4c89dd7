"""An adapter as it lies in host memory, whoever read it and wherever it will be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Low(NamedTuple):
    """The change of one weight: up @ down, scaled already."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Changes by the names of modules in the checkpoint: `model.layers.0.self_attn.q_proj`."""

    name: str
    modules: Mapping[str, Low]
    # All of them in one piece, as a bank packs them: each module's down, then its up turned.
    packed: Tensor | None = None

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(low.down.shape[0] for low in self.modules.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for low in self.modules.values() for tensor in low)
