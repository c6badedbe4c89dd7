"""The stack that articles on serving show for Llama-3-70B, to be printed beside what was measured.

Theirs is a table without its setting: requests a second and the median latency, no hardware named.
"""

from __future__ import annotations

from typing import NamedTuple


class Theirs(NamedTuple):
    """Requests a second, and seconds of a whole request (p50)."""

    req_s: float
    p50_s: float


# By rung and whether it is stacked: what they switch on one at a time, they have on the base.
TABLE: dict[tuple[str, str], Theirs] = {
    ("naive", "alone"): Theirs(12, 2.1),
    ("continuous", "base"): Theirs(47, 0.8),
    ("awq", "alone"): Theirs(45, 0.9),
    ("spec", "alone"): Theirs(58, 0.6),
    ("everything", "stacked"): Theirs(89, 0.4),
}
# Where there is no AWQ checkpoint, their row for it stands beside the int4 weights that there are.
STAND_IN = {("int4", "alone"): ("awq", "alone")}


def theirs(rung: str, how: str, has_awq: bool) -> Theirs | None:
    key = (rung, "alone" if how == "both" else how)
    if not has_awq:
        key = STAND_IN.get(key, key)
    return TABLE.get(key)
