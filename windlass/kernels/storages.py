"""How the parts of an engine report their memory.

An object that holds tensors for longer than a step names them itself. An object made of such parts
passes on what they name, so the runner names all memory of an engine. runner/memory.py adds it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from torch import Tensor

MemoryKind = Literal["weights", "KV cache", "adapters", "recorded steps", "tables", "KV offload"]
Held = tuple[MemoryKind, Tensor]


class Owner(Protocol):
    """An object that holds tensors."""

    def storages(self) -> Iterator[Held]:
        """All tensors that it holds, and what they are for. Several may share their memory."""
        ...


def held(kind: MemoryKind, *tensors: Tensor | None) -> Iterator[Held]:
    """The tensors that are not None, all of one kind."""
    return ((kind, tensor) for tensor in tensors if tensor is not None)
