"""Cuts the layers of a network into the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from windlass.errors import ConfigError, ShardError, UnsupportedError
from windlass.models.hparams import HParams
from windlass.quant.shard import Shard

LAYER = re.compile(r"model\.layers\.(\d+)\.")  # of a tensor's name


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers [start, stop) of a network, which one rank computes.

    The first stage has the embedding, the last one the final norm and the head.
    """

    start: int
    stop: int
    num_layers: int  # of the whole network

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers


def check_ranks(hparams: HParams, *, tp: int, pp: int) -> None:
    """Refuse numbers of ranks that the model does not allow, before any process is started."""
    check_stages(hparams, pp)
    heads = Shard(hparams.num_heads)
    if not heads.allows(tp, unit=1):
        known = ", ".join(map(str, heads.allowed(unit=1)))
        raise ShardError(
            f"--tensor-parallel-size {tp}: the model has {hparams.num_heads} query heads, which "
            f"so many ranks cannot share equally. Numbers that work: {known}."
        )


def check_stages(hparams: HParams, num_stages: int) -> None:
    """Refuse a number of stages that the model does not allow."""
    if num_stages == 1:
        return
    if hparams.transformers is not None:
        raise UnsupportedError(
            f"--pipeline-parallel-size {num_stages}: {hparams.architecture} runs through transformers' "
            "code, which computes all layers. Use one stage."
        )
    if hparams.per_layer_inputs is not None or hparams.num_kv_shared_layers:
        raise UnsupportedError(
            f"--pipeline-parallel-size {num_stages}: layers of {hparams.architecture} read the token ids or "
            "the KV cache of earlier layers, which other stages do not have. Use one stage."
        )
    if num_stages > hparams.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: the model has {hparams.num_layers} layers, and "
            f"every stage needs one. Use 1 to {hparams.num_layers}."
        )


def cut_stages(costs: Sequence[int], num_stages: int) -> list[Stage]:
    """Cut layers into stages so that the most expensive one costs as little as possible.

    `costs` are those of each layer, with the head's in the last one.
    """
    num_layers = len(costs)
    before = [0, *accumulate(costs)]

    @cache
    def best(start: int, count: int) -> tuple[int, int, tuple[int, ...]]:
        """The highest cost, the sum of squares and the ends of the stages from layer `start` on."""
        if count == 1:
            own = before[-1] - before[start]
            return own, own**2, (num_layers,)
        found = []
        for stop in range(start + 1, num_layers - count + 2):
            own = before[stop] - before[start]
            highest, squares, ends = best(stop, count - 1)
            found.append((max(own, highest), own**2 + squares, (stop, *ends)))
        return min(found)

    _, _, ends = best(0, num_stages)
    return [Stage(start, stop, num_layers) for start, stop in pairwise((0, *ends))]
