"""Loads a network from a checkpoint, layer by layer, and checks that every tensor is used.

It is independent of models and formats: layers name their parts and this rank's shard of each, methods
name the stored tensors of a part and their axes. Only the shard's region of each tensor is read. Each
layer is finished before the next is read, so that peak memory exceeds the result by one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.layers.stored import ShardedRows, StoredWeight
from windlass.models.checkpoint import Checkpoint, region_shape
from windlass.models.network import Network, Weights
from windlass.quant.base import Axis, ParamSpec, Part, check_shards
from windlass.quant.join import join_rows
from windlass.quant.shard import Region, Shard

# Tensors in some checkpoints that no network needs: they are computed from the config.
_DERIVED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "rope_freqs.weight")

# Regions and parameters by tensor name; a tied head may share the embedding's.
_Resident = dict[str, tuple[Region, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class _TensorTarget:
    """A tensor to read and the module that gets it."""

    name: str  # in the checkpoint: "model.layers.0.self_attn.q_proj.weight"
    spec: ParamSpec  # of the whole tensor
    region: Region  # this rank's
    owner: nn.Module
    part: str | None  # of a stored weight; None: the tensor becomes a parameter
    local: str  # "weight"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's region."""
        return region_shape(self.spec.shape, self.region)


def load(
    network: Weights,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read this rank's region of every tensor of a network on the meta device.

    `progress` gets the bytes of each read. A format or size that does not allow this number of ranks
    raises ShardError before anything is read; act-order, which only the tensors show, when it is read.
    """
    known = checkpoint.names()
    targets = [
        target for path, module in network.named_modules() for target in _targets(path, module)
    ]
    if known:
        _check_names(targets, known, network)
    reader = _Reader(checkpoint, device, progress)
    _fill(network, reader.read, known)


def outline(network: Network) -> None:
    """Finish a network with meta tensors: shapes, packed forms and kernels, without data."""

    def empty(target: _TensorTarget) -> Tensor:
        shape = tuple(max(size, 0) for size in target.shape)
        return torch.empty(shape, dtype=target.spec.dtype, device="meta")

    _fill(network, empty, ())


def _fill(
    network: Weights, read: Callable[[_TensorTarget], Tensor], optional: Collection[str]
) -> None:
    """Fill and finish each module. `optional`: names of the optional tensors that exist."""
    resident: _Resident = {}
    for path, module in list(network.named_modules()):
        for target in list(_targets(path, module)):
            if target.spec.optional and target.name not in optional:
                continue
            region, shared = resident.get(target.name, ((), None))
            if shared is not None and region == target.region and _matches(shared, target):
                _assign(target, shared, resident)
            else:
                _assign(target, read(target), resident)
        if isinstance(module, StoredWeight):
            _finish(module)


def _matches(parameter: nn.Parameter, target: _TensorTarget) -> bool:
    return tuple(parameter.shape) == target.shape and parameter.dtype == target.spec.dtype


def _assign(target: _TensorTarget, tensor: Tensor, resident: _Resident) -> None:
    layer = target.owner
    if isinstance(layer, StoredWeight) and target.part is not None:
        if target.part not in layer.stored:
            layer.stored[target.part] = Part(
                name=target.name.removesuffix(f".{target.local}"),
                tensors={},
                outputs=layer.outputs[target.part],
                inputs=layer.inputs,
            )
        layer.stored[target.part].tensors[target.local] = tensor
        return
    parameter = nn.Parameter(tensor, requires_grad=False)
    setattr(layer, target.local, parameter)
    resident[target.name] = (target.region, parameter)


def _finish(layer: StoredWeight) -> None:
    biases = [part.tensors.pop("bias") for part in layer.stored.values() if layer.bias is not None]
    if biases:
        layer.bias = nn.Parameter(join_rows(biases), requires_grad=False)
    layer.finish()


def _targets(path: str, module: nn.Module) -> Iterator[_TensorTarget]:
    """The tensors of one module, without its submodules."""
    if not isinstance(module, StoredWeight):
        own = f"{path}." if path else ""
        for name, meta in module.named_parameters(recurse=False):
            spec, rows, whole = ParamSpec(tuple(meta.shape), meta.dtype), Shard(1), Shard(1)
            if isinstance(module, ShardedRows):
                rows = module.rows
                spec = replace(spec, shape=(rows.whole, *meta.shape[1:]), out=Axis(0))
                check_shards(f"{own}{name}", "unquantised", [spec], outputs=rows, inputs=whole)
            yield _TensorTarget(
                name=f"{own}{name}",
                spec=spec,
                region=spec.region(rows, whole),
                owner=module,
                part=None,
                local=name,
            )
        return
    parent = path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    for part, outputs in module.outputs.items():
        specs = module.method.params(f"{prefix}{part}", outputs.whole, module.inputs.whole)
        if module.bias is not None:
            specs = specs | {"bias": ParamSpec((outputs.whole,), module.bias.dtype, out=Axis(0))}
        check_shards(
            f"{prefix}{part}",
            module.method.name,
            specs.values(),
            outputs=outputs,
            inputs=module.inputs,
        )
        for name, spec in specs.items():
            yield _TensorTarget(
                name=f"{prefix}{part}.{name}",
                spec=spec,
                region=spec.region(outputs, module.inputs),
                owner=module,
                part=part,
                local=name,
            )


class _Reader:
    """Reads tensors onto the device and checks shape and dtype."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._progress = progress

    def read(self, target: _TensorTarget) -> Tensor:
        spec = target.spec
        stored = self._shape(target)
        found = self._checkpoint.read(target.name, stored, target.region, raw=spec.raw)
        if not _fits(found.dtype, spec.dtype):
            raise CheckpointError(
                f"tensor {target.name} is stored as {_dtype_name(found.dtype)}, expected "
                f"{_dtype_name(spec.dtype)}. The weights and the config do not match."
            )
        if (
            spec.raw and self._device.type == "cpu"
        ):  # the packed form replaces it at once, so no copy is needed
            self._progress(found.nbytes)
            return found
        tensor = torch.empty(found.shape, dtype=spec.dtype, device=self._device)
        tensor.copy_(found)
        self._progress(tensor.nbytes)
        return tensor

    def _shape(self, target: _TensorTarget) -> tuple[int, ...]:
        """The expected shape of the whole tensor; a length of -1 follows the file."""
        shape = target.spec.shape
        return self._checkpoint.stored(target.name).shape if -1 in shape else shape


def _fits(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Whether a stored dtype can be converted: floats of 16 bits or more can, codes must match."""
    if expected == torch.int64:
        return not stored.is_floating_point
    if stored == expected:
        return True
    return all(kind.is_floating_point and kind.itemsize > 1 for kind in (stored, expected))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elsewhere(network: Weights) -> set[str]:
    """The modules that other ranks read whole."""
    return {
        f"{path.rpartition('.')[0]}.{part}"
        for path, module in network.named_modules()
        if isinstance(module, StoredWeight)
        for part in module.elsewhere
    }


def _parents(name: str) -> Iterator[str]:
    """The modules that a tensor's name lies in."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _check_names(
    targets: Collection[_TensorTarget], known: Collection[str], network: Weights
) -> None:
    """Raise for a parameter without a tensor, and for a tensor without a parameter on any rank."""
    elsewhere = _elsewhere(network)
    names = set(known)
    missing = [
        target.name for target in targets if target.name not in names and not target.spec.optional
    ]
    unused = sorted(
        name
        for name in names - {target.name for target in targets}
        if not name.endswith(_DERIVED)
        and not (network.tied and name == "lm_head.weight")
        and not network.is_elsewhere(name)
        and elsewhere.isdisjoint(_parents(name))
    )
    also = f" It has {len(unused)} unknown tensors: {_summary(unused)}." if unused else ""
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors that the network needs: "
            f"{_summary(missing)}.{also} The download may be incomplete, or the config is for another "
            "model or quantisation."
        )
    if unused:
        raise CheckpointError(
            f"the checkpoint has {len(unused)} tensors that are unknown to the network: "
            f"{_summary(unused)}. Its config.json may describe another architecture or quantisation."
        )


def _summary(names: list[str], max_names: int = 5) -> str:
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
