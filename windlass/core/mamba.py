"""The sizes of a Mamba-2 layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Heads of a Mamba-2 layer; each has a recurrent state [dim, state_size].

    Heads share B and C in equal groups, as query heads share kv heads. A causal convolution over
    `conv_size` tokens precedes the recurrence: of every head's inputs, and of B and C.
    """

    num_heads: int
    dim: int
    num_groups: int
    state_size: int
    conv_size: int

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.dim

    @property
    def group_features(self) -> int:
        """Features of B or C."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Features that go through the convolution: the heads' inputs, B and C."""
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
