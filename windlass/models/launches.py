"""Which layers launch the same kernels: steps that only compile kernels run one layer of each kind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass

from torch import nn

from windlass.layers.stored import StoredWeight


def launches(block: nn.Module) -> Hashable:
    """What decides which kernels a layer launches: its modules, with their weights and options."""
    found = []
    for name, module in block.named_modules():
        options = [(key, _plain(each)) for key, each in vars(module).items() if key != "index"]
        tensors = [
            (key, each.shape, each.dtype) for key, each in module.named_parameters(recurse=False)
        ]
        packed: list[Hashable] = []
        if isinstance(module, StoredWeight):
            packed = [*module.parts.values(), *((gemm.form, gemm.kernel) for gemm in module.gemms)]
        found.append((name, type(module), tuple(options), tuple(tensors), tuple(packed)))
    return tuple(found)


def _plain(value: object) -> Hashable:
    """A number or string, or those of a dataclass; None for other objects, which layers share."""
    if isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value):
        return type(value), tuple(_plain(getattr(value, each.name)) for each in fields(value))
    return None
