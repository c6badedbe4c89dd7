"""The geometry of the KV cache: bytes, groups of equal blocks, and what a request holds."""

from __future__ import annotations

from random import Random

import pytest

from windlass.core.kv_layout import KVGroup, KVLayout


def group(kind: str, num_layers: int, first: int = 0, width: int = 8, **given) -> KVGroup:
    """A group of `num_layers` layers of 2 heads, 4 tokens per block and 2 bytes per value."""
    pages = {"latent": (4, width), "state": (width,)}
    page = pages.get(kind, (2, 2, 4, width))
    layers = tuple(range(first, first + num_layers))
    return KVGroup(kind=kind, layers=layers, page=page, item_bytes=2, **given)


@pytest.mark.parametrize(
    ("made", "layer_bytes"),
    [
        (group("full", 3), 2 * 2 * 4 * 8 * 2),
        (group("full", 3, scale_bytes=4), 2 * 2 * 4 * (8 * 2 + 4)),
        (group("window", 3, window=9), 2 * 2 * 4 * 8 * 2),
        (group("latent", 3), 4 * 8 * 2),
        (group("state", 3, width=100), 100 * 2),
    ],
)
def test_bytes_per_block(made: KVGroup, layer_bytes: int) -> None:
    assert made.layer_bytes == layer_bytes
    layout = KVLayout.of([made], 4)
    assert layout.groups == (made,)
    assert layout.block_bytes == 3 * layer_bytes
    assert layout.num_page_slots == layout.num_layers == 3
    assert layout.token_bytes == (0 if made.kind == "state" else 3 * layer_bytes // 4)


def test_layers_of_one_kind_are_one_group() -> None:
    layout = KVLayout.of([group("full", 1, layer) for layer in range(5)], 4)
    assert layout.groups == (group("full", 5),)
    assert layout.place(3) == (0, 3)
    with pytest.raises(ValueError, match="layer 5: the layout has 5 layers"):
        layout.place(5)


@pytest.mark.parametrize(
    ("num_full", "num_window", "sizes", "num_padded"),
    [
        (21, 7, [7, 7, 7, 7], 0),  # split to the smaller kind
        (4, 4, [4, 4], 0),
        (5, 4, [5, 4], 1),  # one unused page slot, and not nine groups
        (10, 2, [2, 2, 2, 2, 2, 2], 0),
        (27, 1, [4, 4, 4, 4, 4, 4, 3, 1], 4),  # no more than eight groups
    ],
)
def test_groups_have_blocks_of_equal_bytes(
    num_full: int, num_window: int, sizes: list[int], num_padded: int
) -> None:
    layout = KVLayout.of(
        [group("full", num_full), group("window", num_window, num_full, window=6)], 4
    )
    assert [len(each.layers) for each in layout.groups] == sizes
    layer_bytes = layout.groups[0].layer_bytes
    assert layout.block_bytes == max(sizes) * layer_bytes
    padded = len(sizes) * layout.block_bytes - layout.num_layers * layer_bytes
    assert padded == num_padded * layer_bytes
    places = [layout.place(layer) for layer in range(layout.num_layers)]
    assert len(set(places)) == layout.num_layers
    assert all(slot < layout.num_page_slots for _, slot in places)


def test_groups_with_different_pages_share_the_pool() -> None:
    full, state = group("full", 8), group("state", 24, 8, width=500)
    layout = KVLayout.of([full, state], 4)
    assert all(each.num_bytes <= layout.block_bytes for each in layout.groups)
    assert {each.kind for each in layout.groups} == {"full", "state"}
    assert layout.has_state
    wasted = layout.block_bytes * len(layout.groups) - full.num_bytes - state.num_bytes
    assert wasted < 0.2 * (full.num_bytes + state.num_bytes)


def test_a_window_bounds_what_a_request_holds() -> None:
    full = KVLayout.of([group("full", 2)], 4)
    window = KVLayout.of([group("window", 2, window=10)], 4)
    state = KVLayout.of([group("state", 2)], 4)
    assert [full.blocks_for(n) for n in (0, 1, 4, 5, 1000)] == [0, 1, 1, 2, 250]
    assert [window.blocks_for(n) for n in (1, 5, 16, 17, 1000)] == [1, 2, 4, 4, 4]
    assert window.blocks_for(1000, chunk=100) == 3 + 26
    assert [state.blocks_for(n) for n in (1, 5, 1000)] == [1, 2, 2]
    assert full.bytes_for(1000) == 250 * full.block_bytes
    assert window.bytes_for(1000) == 4 * window.block_bytes
    assert window.without_windows() == full
    assert full.without_windows() is full


def test_the_longest_request_that_fits() -> None:
    rng = Random(0)
    for _ in range(200):
        groups = [group("full", 3)] if rng.random() < 0.7 else []
        groups.append(group("window", 2, 3 * len(groups), window=rng.randint(1, 40)))
        layout = KVLayout.of(groups, rng.choice([1, 2, 4]))
        num_blocks, chunk = rng.randint(0, 60), rng.randint(1, 30)
        longest = layout.max_tokens(num_blocks, chunk, 100)
        fits = [n for n in range(101) if layout.blocks_for(n, chunk) <= num_blocks]
        assert longest == max(fits)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "window"},
        {"kind": "full", "window": 4},
        {"kind": "window", "window": 0},
        {"kind": "state", "scale_bytes": 4},
    ],
)
def test_inconsistent_groups_are_refused(given: dict) -> None:
    with pytest.raises(AssertionError):
        KVGroup(layers=(0,), page=(4,), item_bytes=2, **given)
    with pytest.raises(AssertionError, match="each is in one group"):
        KVLayout((group("full", 2), group("full", 2, 1)), 4)
