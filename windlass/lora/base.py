"""A LoRA adapter in host memory, independent of its file format and of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from windlass.kernels.storages import Held, held


class LoraWeights(NamedTuple):
    """LoRA matrices of one module, scaling folded in.

    The weight's delta is up @ down; for int8 codes it is up @ diag(scales) @ down.
    """

    down: Tensor  # [rank, in]; lora_A
    up: Tensor  # [out, rank]; lora_B
    scales: Tensor | None = None  # [rank] float32, of int8 codes


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights by module name in the checkpoint: `model.layers.0.self_attn.q_proj`."""

    name: str
    modules: Mapping[str, LoraWeights]
    packed: Tensor | None = None  # all matrices in one buffer, written by Bank.pack

    def storages(self) -> Iterator[Held]:
        yield from held("adapters", self.packed)
        for weights in self.modules.values():
            yield from held("adapters", *weights)

    @property
    def rank(self) -> int:
        """The largest rank of a module; 0: the adapter changes no layer of this stage."""
        return max((weights.down.shape[0] for weights in self.modules.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        return sum(weights.down.nbytes + weights.up.nbytes for weights in self.modules.values())
