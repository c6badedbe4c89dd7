"""A weight as a checkpoint has it: parts that a method reads, repacks and holds.

The loader fills `stored` and lets the method finish it. What the weight is used for is up to
subclasses: Linear multiplies with it, PackedEmbedding reads its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from windlass.kernels.linears import PackedGemm
from windlass.kernels.storages import Held
from windlass.quant.base import LinearMethod, Part


class StoredWeight(nn.Module):
    """`parts` maps names of checkpoint modules to their outputs: {"q_proj": 576, "k_proj": 192}.

    There is no weight before the loader filled `stored` and the method finished it.
    """

    def __init__(self, parts: Mapping[str, int], num_in: int, method: LinearMethod) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.num_in = num_in
        self.method = method
        self.stored: dict[str, Part] = {}
        self.gemms: list[PackedGemm] = []
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None

    def storages(self) -> Iterator[Held]:
        """The quantised weight."""
        for gemm in self.gemms:
            yield from gemm.prepared.storages()

    @property
    def gemm_bytes(self) -> int:
        """Bytes of the quantised weight; an unquantised weight is a parameter of the module."""
        return sum(gemm.prepared.num_bytes for gemm in self.gemms)
