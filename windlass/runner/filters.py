"""Sampling on logits [rows, vocabulary]: penalties, truncation, noise. Reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = float("-inf")
_WORD = 2**32 - 1


def penalise(
    scores: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    """Apply penalties to one row. `counts`: of generated tokens; `seen`: in prompt or output."""
    if repetition != 1.0:
        penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, penalised, scores)
    return scores - frequency * counts - presence * (counts > 0)


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mask unlikely tokens of each row; at least one token remains.

    `min_p` keeps tokens with at least this share of the highest probability. Then `top_k` keeps the
    most likely tokens (0: all), and `top_p` the smallest set of those with this total probability.
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


def apply_temperature(scores: Tensor, params: Tensor) -> Tensor:
    """Temperature and truncation, for rows that are not greedy."""
    temperature, top_k, top_p, min_p = params.to(scores.device).unbind(1)
    rows = scores / temperature[:, None]
    truncated = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero()[:, 0]
    if len(truncated):
        rows[truncated] = truncate(
            rows[truncated], top_k[truncated], top_p=top_p[truncated], min_p=min_p[truncated]
        )
    return rows


def draw(scores: Tensor, params: Tensor, keys: Tensor) -> Tensor:
    """Sample a token per row: the argmax of score plus Gumbel noise.

    params [rows, 4], float64: temperature, top-k, top-p, min-p. Rows at temperature 0, and rows
    whose maximum is not finite, take the argmax. keys [rows], int64: see `key`.
    """
    tokens = scores.argmax(dim=-1)
    params, keys = params.to(scores.device), keys.to(scores.device)
    drawn = ((params[:, 0] > 0) & scores.amax(dim=-1).isfinite()).nonzero()[:, 0]
    if len(drawn):
        rows = apply_temperature(scores[drawn].double(), params[drawn])
        tokens[drawn] = (rows + noise(keys[drawn], scores.shape[-1])).argmax(dim=-1)
    return tokens


def noise(keys: Tensor, size: int) -> Tensor:
    """Gumbel noise [keys, size] from a 32-bit hash of key and token."""
    low, high = (keys & _WORD)[:, None], (keys >> 32)[:, None]
    h = (torch.arange(size, device=keys.device) * 0x9E3779B1 + low) & _WORD
    h = ((h ^ (h >> 16)) * 0x21F0AAAD + high) & _WORD
    h = ((h ^ (h >> 15)) * 0xD35A2D97) & _WORD
    uniform = ((h ^ (h >> 15)).double() + 0.5) / 2**32
    return -(-torch.log1p(-uniform)).log()


def key(seed: int, position: int) -> int:
    """Hash (seed, position) to 63 bits: the key of the noise.

    A request therefore samples the same tokens alone, in any batch, and after a preemption.
    """
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1
