"""Routing of mixture-of-experts MLPs on CUDA, and the order of (token, expert) pairs for their GEMMs.

One kernel chooses the experts of a token. Pair p is expert p % k of token p // k. Few pairs need no
order: each is a tile of its own. Many pairs are sorted by expert, and each expert's pairs fill whole
tiles, so that a tile reads one expert. Pairs whose expert is on another rank are in no tile. Sizes depend
on the number of tokens only, so graphs can be captured. Integer atomics number the pairs of an expert, in any order: a pair's result does not
depend on its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.experts import Routing
from windlass.kernels.triton import pdl
from windlass.kernels.triton.experts_inputs import CHUNK, ExpertInputs, quantise_row

_CHUNK = 64  # pairs and tiles per program that sorts
_VALUES = tl.constexpr(CHUNK)


@triton.jit
def _limited_to_groups(ranks, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """Replace the ranks [groups, experts of a group] outside of the best groups by -infinity."""
    best, at = tl.max(ranks, 1, return_indices=True)
    if TOP2:
        others = tl.arange(0, ranks.shape[1])[None, :] != at[:, None]
        best += tl.max(tl.where(others, ranks, float("-inf")), 1)
    group = tl.arange(0, ranks.shape[0])
    allowed = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        _value, chosen = tl.max(best, 0, return_indices=True)
        allowed = allowed | (group == chosen)
        best = tl.where(group == chosen, float("-inf"), best)
    return tl.where(allowed[:, None], ranks, float("-inf"))


@triton.jit
def route_kernel(
    logits,
    bias,
    expert_scales,
    weights,
    experts,
    expert_map,
    local,
    load,
    counts,
    places,
    x,
    x_codes,
    x_scales,
    scale,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one token; with `counts`, also number each expert's pairs.

    With `expert_map`, `local` gets the experts' indices on this rank. `load` counts tokens per expert.
    With `x_codes` a second program per token quantises its K inputs.
    """
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    if x_codes is not None:  # noqa: SIM102
        if tl.program_id(1) == 1:
            quantise_row(x, x_codes, x_scales, token, tl.num_programs(0), K, BLOCKS, _VALUES)
            return
    num_experts: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    group = tl.arange(0, GROUPS_PAD)[:, None]
    member = tl.arange(0, SIZE_PAD)[None, :]
    expert = group * GROUP_SIZE + member
    inside = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    value = tl.load(logits + token * num_experts + expert, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-value))
    else:
        scores = tl.exp(value - tl.max(tl.max(value, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    ranks = scores
    if bias is not None:
        ranks += tl.load(bias + expert, mask=inside, other=0.0)
    ranks = tl.where(inside, ranks, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        ranks = _limited_to_groups(ranks, TOP_GROUPS, TOP2)
    # Flat indices ascend with the expert's, so ties choose the lower expert.
    flat = tl.reshape(ranks, [GROUPS_PAD * SIZE_PAD])
    scores = tl.reshape(scores, [GROUPS_PAD * SIZE_PAD])
    index = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    slot = tl.arange(0, TOP_K_PAD)
    chosen = slot * 0
    kept = slot * 0.0
    for i in tl.static_range(TOP_K):
        _best, at = tl.max(flat, 0, return_indices=True)
        score = tl.sum(tl.where(index == at, scores, 0.0), 0)
        flat = tl.where(index == at, float("-inf"), flat)
        # NaN logits must not lead outside of the weights.
        which = tl.minimum(at // SIZE_PAD * GROUP_SIZE + at % SIZE_PAD, num_experts - 1)
        chosen = tl.where(slot == i, which, chosen)
        kept = tl.where(slot == i, score, kept)
    if NORMALISED:
        kept = kept / (tl.sum(kept, 0) + 1e-20)
    used = slot < TOP_K
    if expert_scales is not None:
        kept *= tl.load(expert_scales + chosen)
    tl.store(weights + token * TOP_K + slot, kept * scale, mask=used)
    tl.store(experts + token * TOP_K + slot, chosen, mask=used)
    if load is not None:
        one = tl.full([TOP_K_PAD], 1, tl.int64)
        tl.atomic_add(load + chosen, one, mask=used, sem="relaxed")
    here = used
    if expert_map is not None:
        chosen = tl.load(expert_map + chosen)
        here = used & (chosen >= 0)
        tl.store(local + token * TOP_K + slot, chosen, mask=used)
    if counts is not None:
        place = tl.atomic_add(counts + chosen, 1, mask=here, sem="relaxed")
        tl.store(places + token * TOP_K + slot, place, mask=used)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    experts,
    counts,
    places,
    pairs,
    tile_experts,
    tile_rows,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write CHUNK pairs to the tiles of their experts, and describe CHUNK tiles."""
    pdl.begin(PDL)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    each = tl.arange(0, EXPERTS_PAD)
    count = tl.load(counts + each, mask=each < NUM_EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    first = ends - tiles
    expert = tl.load(experts + at, mask=at < num_pairs, other=-1)
    place = tl.load(places + at, mask=at < num_pairs, other=0)
    start = tl.sum(tl.where(expert[:, None] == each[None, :], first[None, :], 0), 1)
    tl.store(pairs + start * ROWS + place, at, mask=expert >= 0)
    # A tile belongs to the first expert whose tiles end behind it; tiles behind all are empty.
    expert = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)
    own = expert[:, None] == each[None, :]
    rows = tl.sum(tl.where(own, count[None, :] - (at[:, None] - first[None, :]) * ROWS, 0), 1)
    tl.store(tile_experts + at, expert, mask=at < num_tiles)
    tl.store(tile_rows + at, tl.minimum(rows, ROWS), mask=at < num_tiles)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a grouped GEMM: `rows` pairs of one expert each, or single pairs in their order."""

    rows: int
    count: int
    experts: Tensor  # int32 [count]; -1: the single pair of the tile is another rank's
    num_rows: Tensor | None = None  # int32 [count], 0 to `rows`; None: a tile is one pair
    pairs: Tensor | None = None  # int32 [count * rows]


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of each token and their weights."""

    weights: Tensor  # float32 [T, k]
    experts: Tensor  # int32 [T, k]
    local: Tensor  # int32 [T, k]: their indices on this rank, or -1
    counts: Tensor | None  # int32 [L]: pairs per expert of this rank, if they are to be sorted
    places: Tensor | None  # int32 [T, k]: the number of a pair among its expert's


def route(
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    *,
    expert_scales: Tensor | None = None,
    counts: Tensor | None = None,
    expert_map: Tensor | None = None,
    load: Tensor | None = None,
    x: Tensor | None = None,
    quantised: ExpertInputs | None = None,
) -> Routed:
    """Choose the experts of each token. `expert_scales` [E] multiply the weights of their experts.

    `counts`, zeros [L], counts the pairs of each expert of this rank, so that they can be sorted; the
    first GEMM sets it to zero again. `expert_map` has the experts' indices on this rank. `load` counts
    the tokens of each expert. Also quantises x to `quantised`, which costs no launch of its own.
    """
    tokens, top_k = logits.shape[0], routing.top_k
    weights = logits.new_empty((tokens, top_k), dtype=torch.float32)
    experts = logits.new_empty((tokens, top_k), dtype=torch.int32)
    local = experts if expert_map is None else torch.empty_like(experts)
    places = None if counts is None else torch.empty_like(experts)
    limited = routing.top_groups < routing.num_groups
    num_groups = routing.num_groups if limited else 1
    group_size = routing.num_experts // num_groups
    route_kernel[(tokens, 1 if quantised is None else 2)](
        logits,
        bias,
        expert_scales,
        weights,
        experts,
        expert_map,
        None if expert_map is None else local,
        load,
        counts,
        places,
        x,
        None if quantised is None else quantised.values,
        None if quantised is None else quantised.scales,
        routing.scale,
        K=1 if quantised is None else quantised.values.shape[1],
        BLOCKS=quantised is not None and quantised.blocks,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        TOP_GROUPS=routing.top_groups if limited else 1,
        TOP2=routing.group_score == "top2",
        TOP_K=top_k,
        SIGMOID=routing.score == "sigmoid",
        NORMALISED=routing.normalised,
        GROUPS_PAD=triton.next_power_of_2(num_groups),
        SIZE_PAD=triton.next_power_of_2(group_size),
        TOP_K_PAD=triton.next_power_of_2(top_k),
        num_warps=1,
        **pdl.options(),
    )
    return Routed(weights, experts, local, counts, places)


def single_pairs(routed: Routed) -> Tiles:
    """A tile for each pair."""
    return Tiles(rows=1, count=routed.local.numel(), experts=routed.local)


def sort_pairs(routed: Routed, rows: int) -> Tiles:
    """Sort the pairs by expert, in tiles of `rows` pairs."""
    assert routed.counts is not None, "only counted pairs can be sorted"
    num_experts, num_pairs = len(routed.counts), routed.experts.numel()
    # Each expert has at most one tile that is not full.
    count = min(num_pairs, num_pairs // rows + num_experts)
    experts = routed.experts.new_empty(count)
    num_rows = torch.empty_like(experts)
    pairs = experts.new_empty(count * rows)
    sort_kernel[(triton.cdiv(num_pairs, _CHUNK),)](
        routed.local,
        routed.counts,
        routed.places,
        pairs,
        experts,
        num_rows,
        num_pairs,
        count,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        ROWS=rows,
        CHUNK=_CHUNK,
        num_warps=4,
        **pdl.options(),
    )
    return Tiles(rows=rows, count=count, experts=experts, num_rows=num_rows, pairs=pairs)
