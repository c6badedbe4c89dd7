"""Adapters' matrices of one layer, of odd sizes and ranks, for the tests of their kernels."""

from __future__ import annotations

import torch

from windlass.kernels.lora import Stacks

NUM_IN, MOST = 600, 40  # inputs that no block divides, and ranks of three blocks
SIZES = {"q, k, v": (300, 20, 70), "gate, up": (130, 130), "one": (257,)}
# By slot and part; slot 0 is nobody's.
RANKS = [[0, 0, 0], [16, 4, 40], [0, 17, 1], [8, 0, 0]]


def make_stacks(sizes: tuple[int, ...]) -> Stacks:
    """With the ranks of other layers beside this one's, and nonsense beyond each rank."""
    count, parts = len(RANKS), len(sizes)
    beside = torch.full((count, parts + 4), 99, dtype=torch.int32)
    ranks = beside[:, 2 : 2 + parts]
    ranks.copy_(torch.tensor(RANKS)[:, :parts])
    down = torch.full((count, parts, MOST, NUM_IN), float("nan"))
    up = torch.full((count, MOST * sum(sizes)), float("nan"))
    stacks = Stacks(down, up, ranks, sizes, {slot: [] for slot in range(count)})
    for slot in range(count):
        for part in range(parts):
            for half in stacks.place(slot, part, RANKS[slot][part]):
                half.copy_(torch.randn(half.shape))
    return stacks
