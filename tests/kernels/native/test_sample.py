"""Sampling by the native library against the reference implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.ops import NativeOps
from windlass.runner import filters

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

# Temperature, top-k, top-p, min-p.
PARAMS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (0.7, 0, 0.9, 0.0),
    (1.3, 40, 1.0, 0.0),
    (0.8, 40, 0.95, 0.05),
    (2.0, 0, 1.0, 0.2),
    (5.0, 1, 1.0, 0.0),
    (1.0, 10**6, 0.3, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 1.0),
]


def keys_of(count: int) -> Tensor:
    return torch.tensor([filters.key(11, position) for position in range(count)])


def assert_same_tokens(ops: NativeOps, logits: Tensor, params: list[tuple[float, ...]]) -> None:
    """Require equal tokens: sums and noise are rounded differently, which hardly ever matters."""
    given = torch.tensor(params).double()
    keys = keys_of(len(given))
    assert ops.sample(logits, given, keys).tolist() == filters.draw(logits, given, keys).tolist()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    size=st.sampled_from([1, 2, 7, 64, 65, 1000, 4099]),
    spread=st.sampled_from([0.1, 1.0, 6.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference(ops: NativeOps, size: int, spread: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    assert_same_tokens(ops, torch.randn(len(PARAMS), size, generator=random) * spread, PARAMS)


def test_a_whole_vocabulary_and_masked_tokens(ops: NativeOps) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * len(PARAMS), 49152, generator=random) * 3
    assert_same_tokens(ops, logits, 4 * PARAMS)
    logits[:, 1000:40000] = float("-inf")
    assert_same_tokens(ops, logits, 4 * PARAMS)
    only = torch.full((2, 300), float("-inf"))
    only[:, 7] = -5.0
    params = torch.tensor([(1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0)]).double()
    assert ops.sample(only, params, keys_of(2)).tolist() == [7, 7]


def test_equal_logits_are_kept_in_order(ops: NativeOps) -> None:
    params = torch.tensor([(1.0, 4, 1.0, 0.0)] * 50).double()
    got = ops.sample(torch.zeros(50, 10), params, keys_of(50))
    assert sorted(set(got.tolist())) == [0, 1, 2, 3]


def test_nan_counts_as_the_maximum(ops: NativeOps) -> None:
    logits = torch.zeros(2, 20)
    logits[0, 5] = float("nan")
    logits[1] = float("-inf")
    params = torch.tensor([(1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.0)]).double()
    for draw in (ops.sample, filters.draw):
        assert draw(logits, params, keys_of(2)).tolist() == [5, 0]


@pytest.mark.parametrize("offset", [0, 4000])
def test_samples_follow_the_distribution(ops: NativeOps, offset: int) -> None:
    """At any offset: other tokens have no probability."""
    probs, draws = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]), 20_000
    row = torch.full((offset + 5,), -200.0)
    row[offset:] = probs.log()
    params, counts = torch.tensor([(1.0, 0, 1.0, 0.0)] * 2000).double(), torch.zeros(5)
    for keys in keys_of(draws).split(2000):
        tokens = ops.sample(row.expand(2000, -1), params, keys) - offset
        counts += torch.bincount(tokens, minlength=5)
    chi_square = ((counts - draws * probs) ** 2 / (draws * probs)).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001
