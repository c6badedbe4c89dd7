"""Texts to training steps: of like length together, in an order that the seed and the epoch decide.

A step's texts lie side by side, [texts, positions], filled up at the end. All that differs between
steps of one shape is a row of whole numbers, worked out here on the host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.tools.train_draft.writing import Text

_NEIGHBOURS = 32  # steps' worth of texts that are sorted by length together
_UNIT = 16  # lengths are rounded up to this, so that few shapes occur
_MANY = 1024  # what numbers of labels are rounded up to, where shapes should be fewer still


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step: what is computed depends on them alone."""

    texts: int
    width: int
    labels: int

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Shape:
        width = _rounded(max(len(text.tokens) for text in texts), _UNIT)
        return cls(len(texts), width, sum(_num_labels(text) for text in texts))

    @classmethod
    def one_of_few(cls, texts: Sequence[Text], batch_tokens: int) -> Shape:
        """A shape that other steps have as well: filled up with texts and labels of no meaning."""
        own = cls.of(texts)
        width = _rounded(own.width, 2 * _UNIT)
        return cls(max(own.texts, batch_tokens // width), width, _rounded(own.labels, _MANY))


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, and where the labels are: positions of answers where a token follows.

    The label at position q is the target's choice of token q + 1, and every guess j is for it: made
    from the root q - 1 - j, whose next token is known. It counts where the root is not before the
    prompt's last token.
    """

    texts: Sequence[Text]
    ids: Tensor  # [texts, positions]; zeros after a text's end
    places: Tensor  # [texts, positions]: of each token's states among the rows of their source
    labels: Tensor  # [labels]: flat places in [texts, positions]
    depths: Tensor  # [labels]: tokens of the answer before it; -1: a label of no meaning

    @classmethod
    def over(cls, texts: Sequence[Text], shape: Shape, numbers: Tensor) -> Batch:
        """What `lay_out` made, wherever it is now."""
        size = shape.texts * shape.width
        ids, places, labels, depths = numbers.split([size, size, shape.labels, shape.labels])
        side_by_side = (shape.texts, shape.width)
        return cls(texts, ids.view(side_by_side), places.view(side_by_side), labels, depths)

    def roots(self, j: int) -> Tensor:
        """Flat places that guess `j` for each label is made from."""
        return (self.labels - 1 - j).clamp_min(0)

    def counts(self, j: int) -> Tensor:
        """Whether guess `j` is made for a label [labels]."""
        return self.depths >= j

    def weights(self, j: int) -> Tensor:
        """The labels' shares in the mean over guess `j`."""
        counts = self.counts(j).float()
        return counts / counts.sum().clamp_min(1)


def lay_out(texts: Sequence[Text], firsts: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """A step's whole numbers, in one row. `firsts`: where the states of each text begin."""
    ids = np.zeros((shape.texts, shape.width), dtype=np.int64)
    places = np.zeros((shape.texts, shape.width), dtype=np.int64)
    labels = np.zeros(shape.labels, dtype=np.int64)
    depths = np.full(shape.labels, -1, dtype=np.int64)
    at = 0
    for row, text in enumerate(texts):
        count = len(text.tokens)
        ids[row, :count] = text.tokens
        places[row, :count] = firsts[row] + np.arange(count)
        inside = np.arange(_num_labels(text))
        labels[at : at + len(inside)] = row * shape.width + text.start + inside
        depths[at : at + len(inside)] = inside
        at += len(inside)
    return np.concatenate([array.ravel() for array in (ids, places, labels, depths)])


def make_batch(texts: Sequence[Text], firsts: NDArray[Any], device: torch.device) -> Batch:
    """Lay texts side by side."""
    shape = Shape.of(texts)
    return Batch.over(texts, shape, to_device(lay_out(texts, firsts, shape), device))


def end_to_end(texts: Sequence[Text]) -> NDArray[Any]:
    """Where each text begins when they all follow each other."""
    return np.cumsum([0, *(len(text.tokens) for text in texts[:-1])])


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
        own = _rounded(len(text.tokens), _UNIT)
        wide = max(width, own)
        if steps[-1] and wide * (len(steps[-1]) + 1) > batch_tokens:
            steps.append([])
            wide = own
        steps[-1].append(text)
        width = wide
    return steps


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy that nobody waits for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _num_labels(text: Text) -> int:
    return max(0, len(text.tokens) - 1 - text.start)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
