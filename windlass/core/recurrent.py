"""The sizes of a recurrent layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# mamba: the selective scan of Mamba-2. delta: the gated delta rule. conv: a gated short convolution, without
# a recurrence after it.
Recurrence = Literal["mamba", "delta", "conv"]


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """Heads of a recurrent layer; each has a state [dim, state_size].

    Heads share keys and queries (B and C of Mamba-2) in equal groups, as query heads share kv heads:
    neighbouring heads have the same group, or, if `tiled`, heads whose distance is the number of groups.
    A causal convolution over `conv_size` tokens precedes the recurrence: of every head's inputs, keys and
    queries. `of_conv`: the sizes of a convolution without a recurrence.
    """

    num_heads: int
    dim: int
    num_groups: int
    state_size: int
    conv_size: int
    tiled: bool = False

    @classmethod
    def of_conv(cls, channels: int, conv_size: int) -> RecurrentHeads:
        return cls(num_heads=channels, dim=1, num_groups=0, state_size=0, conv_size=conv_size)

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.dim

    @property
    def group_features(self) -> int:
        """Features of all keys, or of all queries."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Features that go through the convolution: the heads' inputs, keys and queries."""
        return self.inner + 2 * self.group_features

    @property
    def num_recurrent(self) -> int:
        """Numbers of the recurrent states."""
        return self.inner * self.state_size

    @property
    def num_conv(self) -> int:
        """Numbers of the convolution's state: its inputs of the last tokens, but for the next one."""
        return self.channels * (self.conv_size - 1)

    @property
    def num_values(self) -> int:
        return self.num_recurrent + self.num_conv
