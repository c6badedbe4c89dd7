"""Pure functions on logits [rows, vocabulary]: penalties, truncation, noise. The plain versions."""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = float("-inf")


def penalise(
    scores: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    """One row. `counts` of generated tokens, `seen` in the prompt or the output."""
    if repetition != 1.0:
        pushed = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, pushed, scores)
    return scores - frequency * counts - presence * (counts > 0)


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Rule out all but the likeliest tokens, row by row; at least one stays.

    min_p: at least that share of the best token's probability. Then the `top_k` likeliest (0: all),
    and of those the fewest whose probabilities reach `top_p`.
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    drop = probs < min_p[:, None] * probs[:, :1]
    rank = torch.arange(scores.shape[-1], device=scores.device)
    drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = ordered.masked_fill(drop, _NEVER).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop |= before >= top_p[:, None]
    drop[:, 0] = False
    return scores.scatter(-1, order, ordered.masked_fill(drop, _NEVER))


def noise(seed: int, position: int, size: int, device: torch.device) -> Tensor:
    """Gumbel noise that depends on the request's seed and the position alone.

    So a request draws the same tokens alone, in any batch, and after a preemption.
    """
    generator = torch.Generator(device=device).manual_seed(_mix(seed, position))
    drawn = torch.empty(size, device=device).exponential_(generator=generator)
    return -drawn.clamp_min_(1e-30).log_()


def _mix(seed: int, position: int) -> int:
    """Spread (seed, position) over 63 bits, so that neighbours give unrelated streams."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1
