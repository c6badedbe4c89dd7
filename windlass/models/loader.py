"""Fills a network from a checkpoint, tensor by tensor, and accounts for every one of them.

Knows no model and no format: layers say which parts they are made of, methods say where outputs
and inputs lie in a stored tensor. Peak memory above the result is one slice of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.layers.linear import Linear
from windlass.models.checkpoint import Checkpoint
from windlass.models.network import Network
from windlass.quant.base import Axis, ParamSpec

# Tensors that some checkpoints carry and no network needs: they are computed from the config.
_DERIVED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "rope_freqs.weight")


@dataclass(frozen=True, slots=True)
class _Target:
    """One parameter to fill: its owner, and how a linear layer's parts lie in it."""

    owner: nn.Module
    prefix: str  # of checkpoint names: "model.layers.0.self_attn."
    name: str  # "weight"
    spec: ParamSpec | None  # None: no axes to cut along but the first


def load(
    network: Network,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read every parameter of `network`, which comes from the meta device. Told of bytes read."""
    used: set[str] = set()
    missing: list[str] = []
    known = checkpoint.names()
    filled: dict[int, nn.Parameter] = {}  # by the meta parameter, since layers may share one
    for target in list(_targets(network)):
        meta = getattr(target.owner, target.name)
        if id(meta) in filled:
            setattr(target.owner, target.name, filled[id(meta)])
            continue
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        for name, part in _sources(target, tensor):
            if known and name not in known:
                missing.append(name)
                continue
            part.copy_(checkpoint.read(name, tuple(part.shape)))
            used.add(name)
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(target.owner, target.name, parameter)
        filled[id(meta)] = parameter
        progress(tensor.nbytes)
    _account(network, missing, set(known) - used)
    for module in network.modules():
        if isinstance(module, Linear):
            module.method.finish(module)


def _targets(network: Network) -> Iterator[_Target]:
    for path, module in network.named_modules():
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            prefix = f"{parent}." if parent else ""
            specs = module.method.params(sum(module.parts.values()), module.num_in)
            for name, spec in specs.items():
                yield _Target(module, prefix, name, spec)
            if module.bias is not None:
                yield _Target(module, prefix, "bias", None)
        else:
            for name, _ in module.named_parameters(recurse=False):
                yield _Target(module, f"{path}.", name, None)


def _sources(target: _Target, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What to read into which part of a parameter: (checkpoint name, view to fill)."""
    layer = target.owner
    if not isinstance(layer, Linear):
        yield target.prefix + target.name, tensor
        return
    at = 0
    for part, num_out in layer.parts.items():
        axis = target.spec.out if target.spec is not None else Axis(0)  # a bias: one per output
        assert axis is not None
        span = axis.span(at, num_out)
        view = tensor.narrow(axis.dim, span.start, span.stop - span.start)
        yield f"{target.prefix}{part}.{target.name}", view
        at += num_out


def _account(network: Network, missing: list[str], unused: set[str]) -> None:
    """A parameter never filled and a tensor never used are both errors."""
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors that the network needs: "
            f"{_some(missing)}. The download may be incomplete, or the config is for another model."
        )
    ignored = [name for name in unused if name.endswith(_DERIVED)]
    if network.tied:
        ignored.append("lm_head.weight")
    left = sorted(unused - set(ignored))
    if left:
        raise CheckpointError(
            f"the checkpoint has {len(left)} tensors that the network does not know: "
            f"{_some(left)}. Its config.json may describe another architecture."
        )


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
