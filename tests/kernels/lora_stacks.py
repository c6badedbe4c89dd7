"""Adapters' matrices of one layer, of odd sizes and ranks, for the tests of their kernels."""

from __future__ import annotations

import torch

from windlass.kernels.lora import LoraDelta, Stacks

NUM_IN, MOST = 600, 40  # inputs that no block divides, and ranks of three blocks
SIZES = {"q, k, v": (300, 20, 70), "gate, up": (130, 130), "one": (257,)}
# By slot and part; slot 0 is nobody's.
RANKS = [[0, 0, 0], [16, 4, 40], [0, 17, 1], [8, 0, 0]]


def make_stacks(
    sizes: tuple[int, ...],
    coded: bool = False,
    num_in: int = NUM_IN,
    most: int = MOST,
    by_output: bool = False,
) -> Stacks:
    """With the ranks of other layers beside this one's, and nonsense beyond each rank."""
    count, parts = len(RANKS), len(sizes)
    beside = torch.full((count, parts + 4), 99, dtype=torch.int32)
    ranks = beside[:, 2 : 2 + parts]
    ranks.copy_(torch.tensor(RANKS)[:, :parts])
    down = torch.full((count, parts, most, num_in), float("nan"))
    up = torch.full((count, most * sum(sizes)), 1e9)
    scales = None
    if coded:
        down, up = (torch.full(half.shape, -128, dtype=torch.int8) for half in (down, up))
        scales = torch.full((*beside.shape, most), float("nan"))[:, 2 : 2 + parts]
    deltas: dict[int, list[LoraDelta]] = {slot: [] for slot in range(count)}
    stacks = Stacks(down, up, ranks, sizes, deltas, scales, by_output)
    for slot in range(count):
        for part in range(parts):
            rank = RANKS[slot][part]
            own, pieces = stacks.destinations(slot, part, rank)
            for half in (own, *pieces):
                half.copy_(torch.randn(half.shape) * (40 if coded else 1))
            if scales is not None:
                scales[slot, part, :rank] = torch.rand(rank) / 1600
    return stacks
