"""Maps the tensors of a checkpoint to those of the network, where names or shapes differ.

A family lists rules; `MappedCheckpoint` applies them while reading. Fused projections, stacked
experts and transposed weights become the tensors that the layers name. Nothing is copied that a
view of the memory-mapped file can give.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.checkpoint import Checkpoint, StoredTensor, missing
from windlass.quant.shard import Region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Outputs [start, stop) of a fused tensor of `whole` outputs.

    With `groups` the outputs repeat: each of the groups has `whole` outputs, of which [start, stop) are
    taken, as from the q, k and v of each head.
    """

    start: int
    stop: int
    whole: int
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Renames the tensors that match `pattern`, and takes a part of them.

    Every rule whose pattern matches a whole name gives one tensor, so a fused tensor matches several.
    A tensor that one rule does not use gives none.
    """

    pattern: str
    name: str  # in the network, with \\1, \\2, ... from the pattern; empty: the tensor is not used
    rows: Rows | None = None
    index: int | None = None  # of the first axis, for stacked tensors
    transposed: bool = False
    add: float = 0.0  # to every value
    log: bool = False  # the file has log(-x) of every value x
    scale: float = 1.0  # of every value
    stack: int | None = None  # the tensor becomes this index of the first axis of `name`

    @property
    def is_rename(self) -> bool:
        return self.rows is None and not self._changes

    @property
    def only_rows(self) -> bool:
        """Whether the part is some of the outputs, which formats of any kind allow."""
        return self.rows is not None and not self._changes

    @property
    def is_product(self) -> bool:
        """Whether the part is some of the outputs, times a factor."""
        return not self.is_reordered and not self.log and self.add == 0.0 and self.stack is None

    @property
    def is_reordered(self) -> bool:
        return self.index is not None or self.transposed

    @property
    def _changes(self) -> bool:
        return self.is_reordered or self.add != 0.0 or self.log or self.scale != 1.0


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor of the file, and what becomes of it."""

    name: str
    rule: Rule | None = None


class MappedCheckpoint:
    """A checkpoint under the names of the network."""

    def __init__(self, checkpoint: Checkpoint, rules: Sequence[Rule]) -> None:
        self._checkpoint = checkpoint
        self._sources: dict[str, _Source] = {}
        self._stacks: dict[str, dict[int, str]] = {}
        compiled = [(re.compile(rule.pattern), rule) for rule in rules]
        for name in checkpoint.names():
            for target, source in _targets(name, compiled):
                if source.rule is not None and source.rule.stack is not None:
                    self._stacks.setdefault(target, {})[source.rule.stack] = name
                elif target in self._sources:
                    raise CheckpointError(
                        f"tensors {self._sources[target].name} and {name} are both {target}. The "
                        "checkpoint mixes two layouts; convert or download it again."
                    )
                else:
                    self._sources[target] = source

    def names(self) -> Collection[str]:
        return self._sources.keys() | self._stacks.keys()

    def stored(self, name: str) -> StoredTensor:
        if name in self._stacks:
            parts = [self._checkpoint.stored(part) for part in self._stacks[name].values()]
            shape = (len(parts), *parts[0].shape)
            num_bytes = sum(part.num_bytes for part in parts)
            return replace(parts[0], shape=shape, num_bytes=num_bytes)
        source = self._source(name)
        found = self._checkpoint.stored(source.name)
        rule = source.rule
        if rule is None or rule.is_rename:
            return found
        shape, num_bytes = found.shape, found.num_bytes
        if rule.index is not None:
            shape, num_bytes = shape[1:], num_bytes // shape[0]
        if rule.transposed:
            shape = shape[::-1]
        if rule.rows is not None:
            taken, whole = rule.rows.stop - rule.rows.start, rule.rows.whole
            rows = math.prod(shape[:-1]) if len(shape) > 2 else shape[0]
            inner = shape[max(1, len(shape) - 1) :]
            shape, num_bytes = (rows * taken // whole, *inner), num_bytes * taken // whole
        return replace(found, shape=shape, num_bytes=num_bytes)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        """See `Checkpoint.read`."""
        if name in self._stacks:
            return self._stacked(name, shape)[region]
        source = self._source(name)
        rule = source.rule
        if rule is None or rule.is_rename:
            return self._checkpoint.read(source.name, shape, region, raw=raw)
        if rule.rows is not None and rule.only_rows:
            stored = self._checkpoint.stored(source.name).shape
            whole, axis = _fused(rule.rows, stored, shape)
            if axis is not None and rule.rows.groups > 1:
                tensor = self._checkpoint.read(source.name, whole, raw=raw)
                return _of_groups(tensor, rule.rows, axis, source.name)[region]
            inner = region if axis is None else _within(rule.rows, shape[axis], axis, region)
            return self._checkpoint.read(source.name, whole, inner, raw=raw)
        return self._transformed(source.name, rule, shape)[region]

    def _stacked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        parts = self._stacks[name]
        if sorted(parts) != list(range(shape[0])):
            raise CheckpointError(
                f"tensor {name} is stored in {len(parts)} parts, the network needs {shape[0]}: the "
                f"last one found is {parts[max(parts)]}."
            )
        return torch.stack(
            [self._checkpoint.read(parts[index], shape[1:]) for index in range(shape[0])]
        )

    def _transformed(self, name: str, rule: Rule, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._checkpoint.read(name, self._checkpoint.stored(name).shape)
        if rule.index is not None:
            tensor = tensor[rule.index]
        if rule.transposed:
            tensor = tensor.T
        if rule.rows is not None:
            rows = rule.rows
            if tensor.shape[0] == rows.groups * rows.whole:  # else the shape is reported below
                grouped = tensor.unflatten(0, (rows.groups, rows.whole))
                tensor = grouped[:, rows.start : rows.stop].flatten(0, 1)
        if rule.add:
            tensor = tensor.float() + rule.add
        if rule.log:
            tensor = -tensor.float().exp()
        if rule.scale != 1.0:
            tensor = tensor.float() * rule.scale
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} gives a part of shape {list(tensor.shape)}, the network needs "
                f"{list(shape)}. The weights and the config do not match."
            )
        return tensor

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            raise missing(name, self._sources)
        return self._sources[name]


def renames(names: Mapping[str, str], *, transposed: bool = False) -> list[Rule]:
    """Rules that rename modules; a * stands for the number of the layer.

    `transposed`: the weights are stored as [inputs, outputs].
    """
    kinds = {"weight": True, "bias": False} if transposed else {r"\w+": False}
    return [
        Rule(
            pattern=rf"{re.escape(old)}\.(?P<tensor>{kind})".replace(r"\*", r"(\d+)"),
            name=rf"{new}.\g<tensor>".replace("*", r"\1"),
            transposed=is_transposed,
        )
        for old, new in names.items()
        for kind, is_transposed in kinds.items()
    ]


def split(
    module: str,
    parts: Mapping[str, int],
    *,
    groups: int = 1,
    transposed: bool = False,
) -> list[Rule]:
    """Rules that split a fused projection; `parts` maps modules to their outputs, in their order.

    `groups`: the parts repeat, as for a projection that stores q, k and v of each head.
    """
    whole, start, rules = sum(parts.values()) // groups, 0, []
    for part, num_out in parts.items():
        rows = Rows(start, start + num_out // groups, whole, groups)
        start = rows.stop
        rules += [
            replace(rule, rows=rows) for rule in renames({module: part}, transposed=transposed)
        ]
    return rules


def mapped(checkpoint: Checkpoint, rules: Sequence[Rule]) -> Checkpoint:
    """The checkpoint under the network's names; itself if there are no rules."""
    return MappedCheckpoint(checkpoint, rules) if rules else checkpoint


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A module of the network, whose weight is that of a module of the file: some outputs, times a factor."""

    module: str
    rows: Rows | None = None
    factor: float = 1.0
    is_product: bool = True  # False: the weight becomes another one than that


class ModuleNames:
    """The modules of the network by those of the file; `stages` of rules apply in this order."""

    def __init__(self, *stages: Sequence[Rule]) -> None:
        self._stages = [[(re.compile(rule.pattern), rule) for rule in rules] for rules in stages]

    def parts(self, module: str) -> list[ModulePart]:
        """What becomes of the module's weight; empty if it is not used."""
        found = [ModulePart(f"{module}.weight")]
        for rules in self._stages:
            found = [
                _after(part, target, source.rule)
                for part in found
                for target, source in _targets(part.module, rules)
            ]
        return [replace(part, module=part.module.removesuffix(".weight")) for part in found]


def _after(part: ModulePart, name: str, rule: Rule | None) -> ModulePart:
    """What a rule makes of a part, under another name."""
    if rule is None:
        return replace(part, module=name)
    cut_twice = part.rows is not None and rule.rows is not None
    return ModulePart(
        module=name,
        rows=part.rows or rule.rows,
        factor=part.factor * rule.scale,
        is_product=part.is_product and rule.is_product and not cut_twice,
    )


def added_when_read(name: str, rules: Sequence[Rule]) -> float:
    """What the rules add to a tensor that a file has under the network's name."""
    return sum(rule.add for rule in rules if rule.add and re.fullmatch(rule.pattern, name))


def before_reading(name: str, tensor: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
    """What a file must have under the network's name, so that reading it with the rules gives `tensor`."""
    added = added_when_read(name, rules)
    return tensor.float() - added if added else tensor


class FileNames:
    """The names under which tensors of the network are written, so that the rules read them again.

    A tensor that the source has under another name keeps that name; a part of a fused one gets the
    network's.
    """

    def __init__(self, names: Collection[str], rules: Sequence[Rule]) -> None:
        """`names`: of the source's tensors."""
        self._rules = [(re.compile(rule.pattern), rule) for rule in rules]
        self._sources = {
            target: name
            for name in names
            for target, source in _targets(name, self._rules)
            if source.rule is not None and source.rule.is_rename and source.rule.stack is None
        }

    def of(self, name: str) -> str:
        """The file's name of a tensor of the network, which may be quantised: X.weight_packed."""
        for candidate in (*self._candidates(name), name):
            if [target for target, _ in _targets(candidate, self._rules)] == [name]:
                return candidate
        raise UnsupportedError(
            f"tensor {name} cannot be written: in files of this architecture the name means another "
            "tensor, and the source has no name for it."
        )

    def _candidates(self, name: str) -> Iterator[str]:
        if name in self._sources:
            yield self._sources[name]
        module = name
        while "." in module:
            module = module.rpartition(".")[0]
            weight = self._sources.get(f"{module}.weight")
            if weight is not None:
                yield weight.removesuffix(".weight") + name.removeprefix(module)


def _targets(
    name: str, rules: Sequence[tuple[re.Pattern[str], Rule]]
) -> Iterator[tuple[str, _Source]]:
    """The network's tensors that a tensor of the file gives; its own name if no rule matches."""
    matches = [(pattern.fullmatch(name), rule) for pattern, rule in rules]
    matched = [(found, rule) for found, rule in matches if found is not None]
    if not matched:
        yield name, _Source(name)
    elif all(rule.name for _, rule in matched):
        for found, rule in matched:
            yield found.expand(rule.name), _Source(name, rule)


def _fused(
    rows: Rows, stored: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int | None]:
    """The shape of the fused tensor whose part has `shape`, and the outputs' axis.

    It is the axis that is longer in the file. A quantised tensor may store several outputs per entry, or
    have them on its second axis; a tensor without that axis belongs to all parts.
    """
    taken = rows.stop - rows.start
    leading = math.prod(stored[: len(stored) - len(shape) + 1])  # stacked tensors are flattened
    sizes = (leading, *stored[len(stored) - len(shape) + 1 :])
    axis = next(
        (
            dim
            for dim, size in enumerate(shape)
            if size != sizes[dim] and size * rows.whole == sizes[dim] * taken
        ),
        None,
    )
    if axis is None:
        return shape, None
    return tuple(sizes[dim] if dim == axis else n for dim, n in enumerate(shape)), axis


def _within(rows: Rows, size: int, axis: int, region: Region) -> Region:
    """The region of the fused tensor that is `region` of the part, which has `size` entries on the axis."""
    first = rows.start * size // (rows.stop - rows.start)
    slices = [*region, *(slice(None),) * (axis + 1 - len(region))]
    start, stop, _ = slices[axis].indices(size)
    slices[axis] = slice(first + start, first + stop)
    return tuple(slices)


def _of_groups(tensor: torch.Tensor, rows: Rows, axis: int, name: str) -> torch.Tensor:
    """The part of a fused tensor whose outputs repeat in groups."""
    size = tensor.shape[axis]
    entries = [border * size / (rows.groups * rows.whole) for border in (rows.start, rows.stop)]
    if size % rows.groups or any(entry != int(entry) for entry in entries):
        raise UnsupportedError(
            f"tensor {name} stores outputs in units of {rows.groups * rows.whole // size}, which the parts "
            f"of its {rows.groups} groups cut: outputs {rows.start} to {rows.stop} of each "
            f"{rows.whole}. Use a version of the model whose weights have another format."
        )
    groups = tensor.unflatten(axis, (rows.groups, -1))
    start, stop = map(int, entries)
    return groups.narrow(axis + 1, start, stop - start).flatten(axis, axis + 1)
