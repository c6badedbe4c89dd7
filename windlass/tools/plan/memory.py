"""What keys, values and steps take beside the weights, and how many requests that leaves room for.

Weights and pages are exact. What a step needs is an estimate from the largest tensors of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.models.hparams import HParams

KV_DTYPES = {"cpu": ("auto", "int8", "fp8"), "cuda": ("auto", "fp8", "int8")}  # the better first

CONCURRENCIES = (1, 4, 16, 64, 256)  # of a grid


@dataclass(frozen=True, slots=True)
class Need:
    """What one format takes in memory, by context and number of requests."""

    weight_bytes: int
    token_bytes: int
    block_size: int
    step_bytes: int  # of the largest step
    row_bytes: int  # that every request that runs adds to a step: its scores over the vocabulary
    spare_blocks: int  # that the runner keeps for itself

    def kv_bytes(self, context: int, concurrency: int) -> int:
        """Pages for so many requests of so many tokens, each in whole blocks."""
        blocks = -(-context // self.block_size)
        return concurrency * blocks * self.block_size * self.token_bytes

    def total_bytes(self, context: int, concurrency: int) -> int:
        return self.fixed_bytes + self.kv_bytes(context, concurrency) + concurrency * self.row_bytes

    def most_requests(self, context: int, memory: int) -> int:
        """How many requests of so many tokens fit, none if the weights alone do not."""
        return max(0, memory - self.fixed_bytes) // (self.kv_bytes(context, 1) + self.row_bytes)

    @property
    def fixed_bytes(self) -> int:
        spare = self.spare_blocks * self.block_size * self.token_bytes
        return self.weight_bytes + self.step_bytes + spare


def step_bytes(hparams: HParams, num_tokens: int, itemsize: int) -> int:
    """The feed-forward's tensors and the residual stream of so many tokens."""
    return num_tokens * (2 * hparams.hidden_size + 3 * hparams.intermediate_size) * itemsize


def row_bytes(hparams: HParams, itemsize: int) -> int:
    """Scores in the arithmetic's type, and in float32 for the sampler."""
    return hparams.vocab_size * (itemsize + 4)


def contexts(longest: int, asked: int) -> list[int]:
    """Lengths for a grid: powers of four from 1,024, the one asked for, and the model's own."""
    steps = [length for length in (1024, 4096, 16384, 65536, 262144) if length < longest]
    return sorted({*steps, asked, longest})
