"""Fills a network from a checkpoint, layer by layer, and accounts for every tensor.

Knows no model and no format: layers say which parts they are made of, methods which tensors those
are stored in. A layer is finished before the next one is read, so that peak memory above the
result is one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.layers.stored import StoredWeight
from windlass.models.checkpoint import Checkpoint
from windlass.models.network import Network, Weights
from windlass.quant.base import ParamSpec, Part

# Tensors that some checkpoints carry and no network needs: they are computed from the config.
_DERIVED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "rope_freqs.weight")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One tensor to read, and whose it is."""

    name: str  # in the checkpoint: "model.layers.0.self_attn.q_proj.weight"
    spec: ParamSpec
    owner: nn.Module
    part: str | None  # of a stored weight; None: the tensor becomes a parameter
    local: str  # "weight"


def load(
    network: Weights,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read every tensor of `network`, which comes from the meta device. Told of bytes read."""
    known = checkpoint.names()
    if known:
        _account(network, known)
    reader = _Reader(checkpoint, device, progress)
    _fill(network, reader.read, known)


def outline(network: Network) -> None:
    """Finish a network without reading anything: sizes, forms and kernels, but no numbers."""

    def nothing(wanted: _Wanted) -> Tensor:
        shape = tuple(max(size, 0) for size in wanted.spec.shape)
        return torch.empty(shape, dtype=wanted.spec.dtype, device="meta")

    _fill(network, nothing, ())


def _fill(network: Weights, read: Callable[[_Wanted], Tensor], optional: Collection[str]) -> None:
    """Fill and finish module by module. `optional`: which of the optional tensors there are."""
    resident: dict[str, nn.Parameter] = {}  # read already, and kept: a tied head may share it
    for path, module in list(network.named_modules()):
        for wanted in list(_wanted(path, module)):
            if wanted.spec.optional and wanted.name not in optional:
                continue
            shared = resident.get(wanted.name)
            if shared is not None and _is(shared, wanted.spec):
                _keep(wanted, shared, resident)
            else:
                _keep(wanted, read(wanted), resident)
        if isinstance(module, StoredWeight):
            _finish(module)


def _is(parameter: nn.Parameter, spec: ParamSpec) -> bool:
    return tuple(parameter.shape) == spec.shape and parameter.dtype == spec.dtype


def _keep(wanted: _Wanted, tensor: Tensor, resident: dict[str, nn.Parameter]) -> None:
    layer = wanted.owner
    if isinstance(layer, StoredWeight) and wanted.part is not None:
        if wanted.part not in layer.stored:
            layer.stored[wanted.part] = Part(wanted.name.removesuffix(f".{wanted.local}"), {})
        layer.stored[wanted.part].tensors[wanted.local] = tensor
        return
    parameter = nn.Parameter(tensor, requires_grad=False)
    setattr(layer, wanted.local, parameter)
    resident[wanted.name] = parameter


def _finish(layer: StoredWeight) -> None:
    biases = [part.tensors.pop("bias") for part in layer.stored.values() if layer.bias is not None]
    if biases:
        layer.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    layer.method.finish(layer)


def _wanted(path: str, module: nn.Module) -> Iterator[_Wanted]:
    """The tensors of one module, not of those inside it."""
    if not isinstance(module, StoredWeight):
        own = f"{path}." if path else ""
        for name, meta in module.named_parameters(recurse=False):
            spec = ParamSpec(tuple(meta.shape), meta.dtype)
            yield _Wanted(f"{own}{name}", spec, module, None, name)
        return
    parent = path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    for part, num_out in module.parts.items():
        specs = module.method.params(f"{prefix}{part}", num_out, module.num_in)
        if module.bias is not None:
            specs = specs | {"bias": ParamSpec((num_out,), module.bias.dtype)}
        for name, spec in specs.items():
            yield _Wanted(f"{prefix}{part}.{name}", spec, module, part, name)


class _Reader:
    """Reads tensors onto the device, checked against what is wanted."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._progress = progress
        self._made = not checkpoint.names()

    def read(self, wanted: _Wanted) -> Tensor:
        spec = wanted.spec
        found = self._checkpoint.read(wanted.name, self._shape(wanted), raw=spec.raw)
        if not _fits(found.dtype, spec.dtype):
            raise CheckpointError(
                f"tensor {wanted.name} is stored as {_word(found.dtype)}, expected "
                f"{_word(spec.dtype)}. The weights and the config do not belong together."
            )
        shape = found.shape if -1 in spec.shape else spec.shape
        if spec.raw and self._device.type == "cpu":  # its form replaces it at once
            self._progress(found.nbytes)
            return found
        tensor = torch.empty(shape, dtype=spec.dtype, device=self._device)
        tensor.copy_(found.view(shape))
        self._progress(tensor.nbytes)
        return tensor

    def _shape(self, wanted: _Wanted) -> tuple[int, ...]:
        """The shape in the file: as wanted, but for axes of length one and open lengths."""
        spec = wanted.spec
        if self._made or spec.raw:
            return spec.shape
        stored = self._checkpoint.stored(wanted.name).shape
        if -1 in spec.shape or _squeezed(stored) == _squeezed(spec.shape):
            return stored
        return spec.shape


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Floats of 16 bits and more may differ; codes must be exactly what they are taken for."""
    if wanted == torch.int64:
        return not stored.is_floating_point
    if stored == wanted:
        return True
    return all(kind.is_floating_point and kind.itemsize > 1 for kind in (stored, wanted))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _account(network: Weights, known: Collection[str]) -> None:
    """A parameter that nothing fills and a tensor that nobody uses are both errors."""
    names = set(known)
    wanted = [w for path, module in network.named_modules() for w in _wanted(path, module)]
    missing = [w.name for w in wanted if w.name not in names and not w.spec.optional]
    left = sorted(
        name
        for name in names - {w.name for w in wanted}
        if not name.endswith(_DERIVED) and not (network.tied and name == "lm_head.weight")
    )
    also = f" It has {len(left)} that the network does not know: {_some(left)}." if left else ""
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors that the network needs: "
            f"{_some(missing)}.{also} The download may be incomplete, or the config is for another "
            "model or another quantisation."
        )
    if left:
        raise CheckpointError(
            f"the checkpoint has {len(left)} tensors that the network does not know: "
            f"{_some(left)}. Its config.json may describe another architecture or quantisation."
        )


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
