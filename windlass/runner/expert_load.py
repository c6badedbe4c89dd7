"""Reads the numbers of tokens that the kernels counted for each expert of a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from windlass.core.expert_load import ExpertLoad
from windlass.layers.moe import Experts

if TYPE_CHECKING:
    from windlass.runner.worker import Followers

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class NetworkLoad:
    """The load of a rank's layers; every rank counts all tokens, whichever ranks have their experts.

    `followers`: ranks with other layers.
    """

    def __init__(self, network: nn.Module, followers: Followers | None = None) -> None:
        self._counts = dict(_counts(network))
        self._followers = followers

    def read(self) -> ExpertLoad:
        layers = self._own()
        if self._followers is not None:
            for reply in self._followers.call("expert_load"):
                layers |= {int(layer): tuple(n) for layer, n in json.loads(reply).items()}
        return ExpertLoad(dict(sorted(layers.items())))

    def reset(self) -> None:
        """Reset all counters, so that warm-up steps do not count."""
        for counts in self._counts.values():
            counts.zero_()

    def encode(self) -> bytes:
        """The load of this rank's layers, for the rank that asks with `read`."""
        return json.dumps(self._own()).encode()

    def _own(self) -> dict[int, tuple[int, ...]]:
        return {layer: tuple(counts.tolist()) for layer, counts in self._counts.items()}


def _counts(network: nn.Module) -> Iterator[tuple[int, Tensor]]:
    for path, module in network.named_modules():
        if isinstance(module, Experts) and module.load is not None:
            found = _LAYER.search(path)
            assert found is not None, path
            yield int(found[1]), module.load
