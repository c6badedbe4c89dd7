"""Gives a network the weights of another engine's network of the same model."""

from __future__ import annotations

from torch import nn

from windlass.errors import ConfigError
from windlass.kernels.experts import ExpertKernels
from windlass.kernels.linears import Linears
from windlass.layers.moe import ExpertStack
from windlass.layers.stored import StoredWeight
from windlass.models.network import Network


def share_weights(
    network: Network, owner: Network, linears: Linears, experts: ExpertKernels | None
) -> None:
    """Fill a network on the meta device with the tensors of `owner`; nothing is copied.

    The packed weights are multiplied by the kernels of `linears` and `experts`.
    """
    own, others = dict(network.named_modules()), dict(owner.named_modules())
    if own.keys() != others.keys():
        raise ConfigError("weights can be shared only by engines of the same model.")
    for name, module in own.items():
        other = others[name]
        if isinstance(module, StoredWeight) and isinstance(other, StoredWeight):
            module.gemms = [linears.share(gemm) for gemm in other.gemms]
        if isinstance(module, ExpertStack) and isinstance(other, ExpertStack) and other.prepared:
            module.prepared = other.prepared if experts is None else experts.share(other.prepared)
        for key, parameter in other.named_parameters(recurse=False):
            setattr(module, key, parameter)
        _share_tables(module, other)


def _share_tables(module: nn.Module, other: nn.Module) -> None:
    """Share the RoPE table, unless the context lengths differ."""
    own = dict(module.named_buffers(recurse=False))
    for key, table in other.named_buffers(recurse=False):
        if own[key].shape == table.shape:
            setattr(module, key, table)
