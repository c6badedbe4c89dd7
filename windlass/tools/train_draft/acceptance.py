"""Measures a head: the draft tokens that a greedy server would accept, on held-out texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windlass.tools.train_draft.batches import group_texts, make_batch
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.head import Head
from windlass.tools.train_draft.target import Target


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of positions whose first 1, 2, ... draft tokens are all accepted, and mean lengths."""

    by_position: list[float]
    mean_length: float  # 1 + the sum of the shares: tokens per verification, over all positions
    walk_length: float  # the same, over the positions where a server would draft
    num_positions: int
    num_texts: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "acceptance_by_position": [round(share, 4) for share in self.by_position],
            "mean_acceptance_length": round(self.mean_length, 4),
            "walk_acceptance_length": round(self.walk_length, 4),
            "positions": self.num_positions,
            "texts": self.num_texts,
        }


def measure(head: Head, target: Target, texts: list[Text], batch_tokens: int) -> Acceptance:
    """Draft at every position of greedy answers, and compare with the model's tokens."""
    num_accepted = np.zeros(head.num_draft_tokens, dtype=np.int64)
    counts = np.zeros(head.num_draft_tokens, dtype=np.int64)
    steps = tokens = 0
    in_order = sorted(texts, key=lambda text: len(text.tokens))
    for group in group_texts(in_order, batch_tokens):
        batch = make_batch(group, target.offsets(group), target.device)
        drafted = head.draft(batch, target.states(batch))
        flat = batch.ids.flatten()
        # accepted[p]: number of draft tokens of root p before the first rejected one.
        unbroken = torch.ones_like(flat, dtype=torch.bool)
        accepted = torch.zeros_like(flat)
        for j, tokens_j in enumerate(drafted):
            counted = batch.is_counted(j)
            roots = batch.roots(j)[counted]
            equal = torch.zeros_like(unbroken)
            equal[roots] = tokens_j[counted] == flat[roots + 2 + j]
            unbroken &= equal
            accepted += unbroken
            num_accepted[j] += int(unbroken[roots].sum())
            counts[j] += len(roots)
        rows = accepted.view(batch.ids.shape).cpu().numpy()
        for row, text in zip(rows, group, strict=True):
            walked = walk(row, text)
            steps, tokens = steps + walked[0], tokens + walked[1]
    shares = (num_accepted / counts.clip(min=1)).tolist()
    return Acceptance(
        by_position=shares,
        mean_length=1 + sum(shares),
        walk_length=tokens / max(1, steps),
        num_positions=int(counts[0]),
        num_texts=len(texts),
    )


def walk(accepted: NDArray[Any], text: Text) -> tuple[int, int]:
    """The number of verifications of an answer on a server, and the tokens that they output."""
    root, end = text.start - 1, len(text.tokens) - 2
    steps = 0
    while root < end:
        root += 1 + int(accepted[root])
        steps += 1
    return steps, root - (text.start - 1)
