"""A weight as a checkpoint has it: parts that a method reads, repacks and holds.

The loader fills `stored` and lets the method finish it. What the weight is used for is up to
subclasses: Linear multiplies with it, PackedEmbedding reads its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from windlass.kernels.linears import PackedGemm
from windlass.kernels.storages import Held
from windlass.quant.base import LinearMethod, Part
from windlass.quant.shard import Shard


class ShardedRows(nn.Module):
    """A module whose own parameters hold a rank's rows; the loader reads no others."""

    rows: Shard


class StoredWeight(nn.Module):
    """A rank's shard of a weight. `outputs` has the shard of each part, by its checkpoint module.

    There is no weight before the loader filled `stored` and the method finished it.
    """

    multiplied = True  # by GEMMs; else only single rows are read

    def __init__(self, outputs: Mapping[str, Shard], inputs: Shard, method: LinearMethod) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        self.inputs = inputs
        self.parts = {name: shard.count for name, shard in outputs.items()}
        self.num_in = inputs.count
        self.elsewhere: Collection[str] = ()  # parts that other ranks hold whole
        self.method = method
        self.stored: dict[str, Part] = {}
        self.gemms: list[PackedGemm] = []
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None

    def finish(self) -> None:
        """Repack `stored`. Called once, after the loader filled it."""
        self.method.finish(self)

    def storages(self) -> Iterator[Held]:
        """The quantised weight."""
        for gemm in self.gemms:
            yield from gemm.prepared.storages()

    @property
    def gemm_bytes(self) -> int:
        """Bytes of the quantised weight; an unquantised weight is a parameter of the module."""
        return sum(gemm.prepared.num_bytes for gemm in self.gemms)
