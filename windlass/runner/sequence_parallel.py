"""Which steps divide their tokens over the ranks of a tensor-parallel group (kernels/token_split.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.config import Limits
from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.kernels.token_split import min_split_tokens
from windlass.parallel.mesh import Group
from windlass.parallel_config import ParallelConfig
from windlass.runner.inputs import StepShape

# By device. On GPUs smaller steps are captured, and small sums are faster in symmetric memory.
MIN_TOKENS = {"cuda": 1024, "cpu": 256}


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Splits steps with many prompt tokens. The decision depends only on the step's shape, so ranks agree."""

    group: Group
    min_tokens: int

    @classmethod
    def of(
        cls, config: ParallelConfig, group: Group, limits: Limits, device: torch.device
    ) -> SequenceParallel | None:
        """None: no step is split. A draft model has a rank of its own."""
        if not config.enable_sequence_parallel or group.size == 1:
            return None
        default = max(MIN_TOKENS[device.type], min_split_tokens(group.size))
        least = config.sequence_parallel_min_tokens or default
        most = limits.max_num_batched_tokens
        if most < least:
            raise ConfigError(
                f"--enable-sequence-parallel would split no step: steps have up to {most} tokens "
                f"(--max-num-batched-tokens), and "
                f"--sequence-parallel-min-tokens is {least}. Raise the first or lower the second."
            )
        return cls(group, least)

    @property
    def choice(self) -> Choice:
        value = f"prompts over {self.group.size} ranks, from {self.min_tokens:,} tokens of a step"
        return Choice("sequence parallelism", value, "--enable-sequence-parallel")

    def splits(self, shape: StepShape) -> bool:
        """Whether the tokens of a step are split.

        Tokens that are not sampled are prompt tokens. Steps with a deterministic row are not split: the
        split depends on the other rows, and changes the order of sums.
        """
        return not shape.batch_invariant and shape.num_tokens - shape.num_sampled >= self.min_tokens
