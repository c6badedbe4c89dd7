"""Statistical tests of a new version against the old one, for canaries.

Each test returns a p-value: the probability of samples like these if the new version were not worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

MIN_RANKED = 8  # samples of each version below which the normal approximation does not hold


def more_errors(old_errors: int, old_requests: int, *, new_errors: int, new_requests: int) -> float:
    """Fisher's exact test, one-sided: the p-value of the new version's error rate."""
    num_errors, num_all = old_errors + new_errors, old_requests + new_requests
    if not old_requests or not new_requests:
        return 1.0
    # Hypergeometric tail: the new version has `new_errors` or more of all errors.
    total = _log_choose(num_all, new_requests)
    return min(
        1.0,
        sum(
            math.exp(
                _log_choose(num_errors, count)
                + _log_choose(num_all - num_errors, new_requests - count)
                - total
            )
            for count in range(new_errors, min(num_errors, new_requests) + 1)
        ),
    )


def greater(old: Sequence[float], new: Sequence[float]) -> float:
    """Mann-Whitney U test, one-sided: the p-value of larger values of the new version.

    Ranks make it safe for latencies, which have long tails. 1 with fewer than 8 samples of either.
    """
    if min(len(old), len(new)) < MIN_RANKED:
        return 1.0
    num_old, num_new = len(old), len(new)
    num_all = num_old + num_new
    ordered = sorted([(value, False) for value in old] + [(value, True) for value in new])
    rank_sum, at, ties = 0.0, 0, 0
    for _, group in groupby(ordered, key=lambda each: each[0]):
        equals = [is_new for _, is_new in group]
        count = len(equals)
        rank_sum += sum(equals) * (at + (count + 1) / 2)  # equal values share their mean rank
        ties += count**3 - count
        at += count
    u = rank_sum - num_new * (num_new + 1) / 2
    mean = num_old * num_new / 2
    variance = num_old * num_new / 12 * (num_all + 1 - ties / (num_all * (num_all - 1)))
    if variance == 0.0:  # all values are equal
        return 1.0
    z = (u - mean - 0.5) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def _log_choose(n: int, k: int) -> float:
    if k < 0 or k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
