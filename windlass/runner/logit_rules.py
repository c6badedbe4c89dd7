"""Token lists of a request (logit_bias, allowed_token_ids, bad words, stop tokens) as tensors.

The tensors are built once, when the request gets a slot: the work per token must not grow with the
length of the lists. Penalties and grammars change with every token and live elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.kernels.storages import Held, held

_NEVER = float("-inf")


class LogitRules:
    """The logit changes of one request that depend on no more of its output than the last tokens."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        stop_ids: frozenset[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.bias = _bias(sampling, vocab_size, device)  # [vocabulary]; None: no bias
        self.num_mask_bytes = -(-vocab_size // 8)
        self._bad_words, last = _by_prefix(sampling)
        self._last = np.array(last, dtype=np.int64)
        self._min_tokens = sampling.min_tokens
        stops = sorted(stop_ids) if sampling.min_tokens else []
        self._stop_ids = np.array(stops, dtype=np.int64)

    @property
    def has_bad_words(self) -> bool:
        """Whether a token may be forbidden because of the tokens before it."""
        return bool(self._bad_words)

    def storages(self) -> Iterator[Held]:
        return held("tables", self.bias)

    def add_bias(self, scores: Tensor) -> Tensor:
        """New scores of one row: logit_bias added, tokens that are never allowed at -inf."""
        return scores.clone() if self.bias is None else scores + self.bias

    def mask_continuations(self, scores: Tensor, tokens: list[int], num_prompt: int) -> None:
        """Mask, in place, the tokens that would complete a bad word or stop before min_tokens."""
        for ids in self.continuations(tokens, len(tokens) - num_prompt):
            scores[torch.from_numpy(ids).to(scores.device)] = _NEVER

    def continuations(self, tokens: list[int], num_output: int) -> list[NDArray[Any]]:
        """Ids of tokens that would complete a bad word after `tokens`, or stop before min_tokens.

        `num_output` tokens were generated; `tokens` may lack the last if there are no bad words.
        """
        banned = []
        for length, prefixes in self._bad_words.items():
            if length <= num_output:
                found = prefixes.get(tuple(tokens[-length:]))
                if found is not None:
                    banned.append(self._last[found])
        if num_output < self._min_tokens and len(self._stop_ids):
            banned.append(self._stop_ids)
        return banned


def _by_prefix(
    sampling: SamplingParams,
) -> tuple[dict[int, dict[tuple[int, ...], slice]], list[int]]:
    """Group the last tokens of bad words by their prefix: slices by prefix, and the last tokens.

    Prefixes are grouped by length, so that a step makes one look-up per length. Words of one token
    are part of the bias.
    """
    grouped: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *prefix, last in sampling.bad_token_ids:
        if prefix:
            grouped.setdefault(len(prefix), {}).setdefault(tuple(prefix), []).append(last)
    ends: list[int] = []
    found: dict[int, dict[tuple[int, ...], slice]] = {}
    for length, prefixes in grouped.items():
        found[length] = {}
        for key, tokens in prefixes.items():
            found[length][key] = slice(len(ends), len(ends) + len(tokens))
            ends += tokens
    return found, ends


def _bias(sampling: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    single = [word[0] for word in sampling.bad_token_ids if len(word) == 1]
    if not sampling.logit_bias and sampling.allowed_token_ids is None and not single:
        return None
    bias = torch.zeros(vocab_size)
    if sampling.logit_bias:
        values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        bias[_ids(list(sampling.logit_bias))] = values
    if sampling.allowed_token_ids is not None:
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[_ids(sampling.allowed_token_ids)] = True
        bias[~allowed] = _NEVER
    bias[_ids(single)] = _NEVER
    return bias.to(device)


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(tokens, dtype=np.int64))
