"""LoRA matrices of one layer with odd sizes and ranks, for kernel tests."""

from __future__ import annotations

import torch

from windlass.kernels.lora import LoraDelta, Stacks

NUM_IN, MAX_RANK = 600, 40  # not a multiple of any block size; three blocks of ranks
SIZES = {"q, k, v": (300, 20, 70), "gate, up": (130, 130), "one": (257,)}
# By slot and part; slot 0 means no adapter.
RANKS = [[0, 0, 0], [16, 4, 40], [0, 17, 1], [8, 0, 0]]


def make_stacks(
    sizes: tuple[int, ...],
    quantised: bool = False,
    num_in: int = NUM_IN,
    max_rank: int = MAX_RANK,
    by_output: bool = False,
) -> Stacks:
    """Stacks whose `ranks` is a view between other layers' ranks, with garbage beyond each rank."""
    count, parts = len(RANKS), len(sizes)
    all_ranks = torch.full((count, parts + 4), 99, dtype=torch.int32)
    ranks = all_ranks[:, 2 : 2 + parts]
    ranks.copy_(torch.tensor(RANKS)[:, :parts])
    down = torch.full((count, parts, max_rank, num_in), float("nan"))
    up = torch.full((count, max_rank * sum(sizes)), 1e9)
    scales = None
    if quantised:
        down, up = (torch.full(half.shape, -128, dtype=torch.int8) for half in (down, up))
        scales = torch.full((*all_ranks.shape, max_rank), float("nan"))[:, 2 : 2 + parts]
    deltas: dict[int, list[LoraDelta]] = {slot: [] for slot in range(count)}
    stacks = Stacks(
        down=down,
        up=up,
        ranks=ranks,
        sizes=sizes,
        deltas=deltas,
        scales=scales,
        by_output=by_output,
    )
    for slot in range(count):
        for part in range(parts):
            rank = RANKS[slot][part]
            own_down, own_up = stacks.destinations(slot, part, rank)
            for matrix in (own_down, *own_up):
                matrix.copy_(torch.randn(matrix.shape) * (40 if quantised else 1))
            if scales is not None:
                scales[slot, part, :rank] = torch.rand(rank) / 1600
    return stacks
