"""Texts to training steps: of like length together, in an order that the seed and the epoch decide.

A step's texts lie side by side, [texts, positions], filled up at the end. Where a guess is made and
where the target's own choice for it stands is worked out here, on the host, once per step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.tools.train_draft.writing import Text

_NEIGHBOURS = 32  # steps' worth of texts that are sorted by length together
_UNIT = 16  # lengths are rounded up to this, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Places:
    """Where guess `j` of every root stands: flat places in [texts, positions], and rows of labels."""

    roots: Tensor
    labels: Tensor
    rows: np.ndarray  # the labels' rows again, ascending, on the host

    def between(self, first: int, after: int) -> slice:
        """The guesses whose labels are in these rows."""
        start, stop = np.searchsorted(self.rows, [first, after])
        return slice(int(start), int(stop))


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, and where the guesses and the labels are.

    A root p is a position whose next token is known; guess j of it is for token p + 2 + j, which the
    target chose at position p + 1 + j. Labels are the positions of answers where a token follows.
    """

    texts: list[Text]
    ids: Tensor  # [texts, positions]; zeros after a text's end
    packed: Tensor  # [texts, positions]: each token's place when all texts lie end to end
    labels: Tensor  # [labels]: flat places in [texts, positions]
    guesses: list[Places]  # per j


def make_batch(texts: list[Text], num_guesses: int, device: torch.device) -> Batch:
    """Lay texts side by side."""
    longest = max(len(text.tokens) for text in texts)
    width = -(-longest // _UNIT) * _UNIT
    ids = np.zeros((len(texts), width), dtype=np.int64)
    packed = np.zeros((len(texts), width), dtype=np.int64)
    label_parts, depth_parts, first = [], [], 0
    for row, text in enumerate(texts):
        count = len(text.tokens)
        ids[row, :count] = text.tokens
        packed[row, :count] = np.arange(first, first + count)
        first += count
        inside = np.arange(text.start, max(text.start, count - 1))
        label_parts.append(row * width + inside)
        depth_parts.append(inside - text.start)
    labels, depths = np.concatenate(label_parts), np.concatenate(depth_parts)
    rows = [np.nonzero(depths >= j)[0] for j in range(num_guesses)]
    roots = [labels[each] - 1 - j for j, each in enumerate(rows)]
    ids_there, packed_there, labels_there, *rest = _to([ids, packed, labels, *roots, *rows], device)
    per_guess = zip(rest[:num_guesses], rest[num_guesses:], rows, strict=True)
    guesses = [Places(*each) for each in per_guess]
    return Batch(texts, ids_there, packed_there, labels_there, guesses)


def epoch(texts: Sequence[Text], batch_tokens: int, seed: int, number: int) -> Iterator[list[Text]]:
    """One epoch's steps, the same for the same seed and number."""
    rng = random.Random(f"{seed} {number}")
    order = list(texts)
    rng.shuffle(order)
    mean = max(1, sum(len(text.tokens) for text in order) // max(1, len(order)))
    window = max(1, batch_tokens // mean) * _NEIGHBOURS
    steps: list[list[Text]] = []
    for at in range(0, len(order), window):
        near = sorted(order[at : at + window], key=lambda text: len(text.tokens))
        steps += in_steps(near, batch_tokens)
    rng.shuffle(steps)
    return iter(steps)


def in_steps(texts: Sequence[Text], batch_tokens: int) -> list[list[Text]]:
    """Neighbours together, as long as they take no more than so many places, filling included."""
    steps: list[list[Text]] = [[]]
    width = 0
    for text in texts:
        wide = max(width, -(-len(text.tokens) // _UNIT) * _UNIT)
        if steps[-1] and wide * (len(steps[-1]) + 1) > batch_tokens:
            steps.append([])
            wide = -(-len(text.tokens) // _UNIT) * _UNIT
        steps[-1].append(text)
        width = wide
    return steps


def _to(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Whole numbers of any shapes, in one copy."""
    flat = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that nobody waits for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
