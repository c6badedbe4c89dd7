"""How good a head is: what a greedy server would accept of its guesses, on texts never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windlass.tools.train_draft.batches import in_steps, make_batch
from windlass.tools.train_draft.head import Head
from windlass.tools.train_draft.target import Target
from windlass.tools.train_draft.writing import Text


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of positions whose first 1, 2, ... guesses are all right, and lengths made of them."""

    by_position: list[float]
    mean_length: float  # 1 + the sum of the shares: tokens a verification gives, over all positions
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
    """Draft at every position of greedy answers, and compare with what the model wrote."""
    chains = np.zeros(head.num_draft_tokens, dtype=np.int64)
    counts = np.zeros(head.num_draft_tokens, dtype=np.int64)
    steps = tokens = 0
    in_order = sorted(texts, key=lambda text: len(text.tokens))
    for group in in_steps(in_order, batch_tokens):
        batch = make_batch(group, target.firsts(group), target.device)
        guesses = head.guess(batch, target.states(batch))
        flat = batch.ids.flatten()
        # accepted[p]: how many guesses of root p are right before the first wrong one.
        unbroken = torch.ones_like(flat, dtype=torch.bool)
        accepted = torch.zeros_like(flat)
        for j, guessed in enumerate(guesses):
            counted = batch.counts(j)
            roots = batch.roots(j)[counted]
            right = torch.zeros_like(unbroken)
            right[roots] = guessed[counted] == flat[roots + 2 + j]
            unbroken &= right
            accepted += unbroken
            chains[j] += int(unbroken[roots].sum())
            counts[j] += len(roots)
        rows = accepted.view(batch.ids.shape).cpu().numpy()
        for row, text in zip(rows, group, strict=True):
            walked = walk(row, text)
            steps, tokens = steps + walked[0], tokens + walked[1]
    shares = (chains / counts.clip(min=1)).tolist()
    return Acceptance(shares, 1 + sum(shares), tokens / max(1, steps), int(counts[0]), len(texts))


def walk(accepted: NDArray[Any], text: Text) -> tuple[int, int]:
    """Verifications that a server would need for an answer, and the tokens that they give."""
    root, end = text.start - 1, len(text.tokens) - 2
    steps = 0
    while root < end:
        root += 1 + int(accepted[root])
        steps += 1
    return steps, root - (text.start - 1)
