"""Finds tensors without their owners' help: the oracle for the memory that owners name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType

from torch import Tensor, nn

_CONTAINERS = (list, tuple, set, frozenset)


def walk(root: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached, also through closures and bound arguments, and its path."""
    seen: set[int] = set()
    left: list[tuple[str, object]] = [("", root)]
    while left:
        path, item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield path, item
        left += ((f"{path}.{name}", value) for name, value in _inside(item))


def _inside(item: object) -> Iterable[tuple[object, object]]:
    if isinstance(item, Tensor | type):
        return ()
    if isinstance(item, dict):
        return item.items()
    if isinstance(item, _CONTAINERS):
        return enumerate(item)
    if isinstance(item, MethodType):
        return [("self", item.__self__)]
    if isinstance(item, FunctionType):
        return enumerate(cell.cell_contents for cell in item.__closure__ or ())
    if isinstance(item, partial):
        return [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    if isinstance(item, nn.Module) or type(item).__module__.startswith("windlass."):
        names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        slots = {name: getattr(item, name, None) for name in names}
        return (slots | getattr(item, "__dict__", {})).items()
    return ()
