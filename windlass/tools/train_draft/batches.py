"""Batches texts into training steps: similar lengths together, in an order set by seed and epoch.

A step's texts form a padded tensor [texts, positions]. Steps of one shape differ only in one packed
tensor of integers, which the host computes here.
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

from windlass.tools.train_draft.corpus import Text

_WINDOW_STEPS = 32  # the texts of this many steps are sorted by length together
_WIDTH_MULTIPLE = 16  # lengths are rounded up to a multiple, so that few shapes occur
_LABELS_MULTIPLE = 1024  # the same for labels, where shapes should be fewer still


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step, which alone determine its kernels."""

    texts: int
    width: int
    labels: int

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Shape:
        width = _rounded(max(len(text.tokens) for text in texts), _WIDTH_MULTIPLE)
        return cls(len(texts), width, sum(_num_labels(text) for text in texts))

    @classmethod
    def padded(cls, texts: Sequence[Text], batch_tokens: int) -> Shape:
        """A shape that recurs: padded with empty texts and labels of no weight."""
        own = cls.of(texts)
        width = _rounded(own.width, 2 * _WIDTH_MULTIPLE)
        return cls(
            max(own.texts, batch_tokens // width), width, _rounded(own.labels, _LABELS_MULTIPLE)
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded texts and their labels: positions of answers that another token follows.

    The label at position q is the target's choice of token q + 1. Draft token j predicts it from the
    root q - 1 - j, whose next token is known. It counts if the root is not before the prompt's last
    token.
    """

    texts: Sequence[Text]
    ids: Tensor  # [texts, positions]; zeros after a text's end
    state_indices: Tensor  # [texts, positions]: row of each token's states in their source
    labels: Tensor  # [labels]: flat indices into [texts, positions]
    num_before: Tensor  # [labels]: tokens of the answer before the label; -1: padding

    @classmethod
    def from_packed(cls, texts: Sequence[Text], shape: Shape, packed: Tensor) -> Batch:
        """Views of the integers that `pack` made, on any device."""
        size = shape.texts * shape.width
        ids, indices, labels, before = packed.split([size, size, shape.labels, shape.labels])
        padded = (shape.texts, shape.width)
        return cls(
            texts=texts,
            ids=ids.view(padded),
            state_indices=indices.view(padded),
            labels=labels,
            num_before=before,
        )

    def roots(self, j: int) -> Tensor:
        """Flat indices of the roots of draft token `j` for each label."""
        return (self.labels - 1 - j).clamp_min(0)

    def is_counted(self, j: int) -> Tensor:
        """Whether draft token `j` counts for each label [labels]."""
        return self.num_before >= j

    def weights(self, j: int) -> Tensor:
        """The labels' weights in the mean over draft token `j`."""
        counts = self.is_counted(j).float()
        return counts / counts.sum().clamp_min(1)


def pack(texts: Sequence[Text], offsets: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """Pack a step's integers into one row. `offsets`: the first state row of each text."""
    ids = np.zeros((shape.texts, shape.width), dtype=np.int64)
    indices = np.zeros((shape.texts, shape.width), dtype=np.int64)
    labels = np.zeros(shape.labels, dtype=np.int64)
    before = np.full(shape.labels, -1, dtype=np.int64)
    at = 0
    for row, text in enumerate(texts):
        count = len(text.tokens)
        ids[row, :count] = text.tokens
        indices[row, :count] = offsets[row] + np.arange(count)
        inside = np.arange(_num_labels(text))
        labels[at : at + len(inside)] = row * shape.width + text.start + inside
        before[at : at + len(inside)] = inside
        at += len(inside)
    return np.concatenate([array.ravel() for array in (ids, indices, labels, before)])


def make_batch(texts: Sequence[Text], offsets: NDArray[Any], device: torch.device) -> Batch:
    """Pad texts into a batch."""
    shape = Shape.of(texts)
    return Batch.from_packed(texts, shape, to_device(pack(texts, offsets, shape), device))


def text_offsets(texts: Sequence[Text]) -> NDArray[Any]:
    """The start of each text in their concatenation."""
    return np.cumsum([0, *(len(text.tokens) for text in texts[:-1])])


def epoch(texts: Sequence[Text], batch_tokens: int, seed: int, number: int) -> Iterator[list[Text]]:
    """The steps of one epoch, deterministic for a seed and number."""
    rng = random.Random(f"{seed} {number}")
    order = list(texts)
    rng.shuffle(order)
    mean = max(1, sum(len(text.tokens) for text in order) // max(1, len(order)))
    window = max(1, batch_tokens // mean) * _WINDOW_STEPS
    steps: list[list[Text]] = []
    for at in range(0, len(order), window):
        near = sorted(order[at : at + window], key=lambda text: len(text.tokens))
        steps += group_texts(near, batch_tokens)
    rng.shuffle(steps)
    return iter(steps)


def group_texts(texts: Sequence[Text], batch_tokens: int) -> list[list[Text]]:
    """Group consecutive texts into steps of at most `batch_tokens` positions, padding included."""
    steps: list[list[Text]] = [[]]
    width = 0
    for text in texts:
        own = _rounded(len(text.tokens), _WIDTH_MULTIPLE)
        wide = max(width, own)
        if steps[-1] and wide * (len(steps[-1]) + 1) > batch_tokens:
            steps.append([])
            wide = own
        steps[-1].append(text)
        width = wide
    return steps


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy without synchronisation."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _num_labels(text: Text) -> int:
    return max(0, len(text.tokens) - 1 - text.start)


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
